"""The settings of every run that the card reports, one frozen value each."""

from __future__ import annotations

from dataclasses import dataclass

from architecture import Shape


@dataclass(frozen=True, slots=True)
class Phase:
    """``steps`` updates on ``batch`` sequences of ``tokens`` tokens.

    ``plain_share`` of the sequences are nothing but a stretch of a novel; the others hold facts.
    """

    tokens: int
    batch: int
    steps: int
    plain_share: float = 0.45


@dataclass(frozen=True, slots=True)
class Recipe:
    """One run.

    Attributes:
        dropout: Share of activations dropped at the embedding and after each branch.
        token_noise: Share of novel tokens that are replaced by random ones in the input.
        teacher_share: Weight of the teachers' distribution in the loss; 0 without teachers.
    """

    shape: Shape
    phases: tuple[Phase, ...]
    dropout: float
    learning_rate: float = 3e-3
    token_noise: float = 0.0
    weight_decay: float = 0.1
    warmup_steps: int = 100
    decay_share: float = 0.6
    teacher_share: float = 0.0
    seed: int = 6

    @property
    def steps(self) -> int:
        """Updates over all phases."""
        return sum(phase.steps for phase in self.phases)


MAIN = Shape(hidden=192, intermediate=448, layers=12, heads=4)
DRAFT = Shape(hidden=128, intermediate=384, layers=4, heads=4)
SMOKE = Shape(hidden=64, intermediate=96, layers=4, heads=2)

RECIPES = {
    # Long sequences hold fewer facts per token, so more of them hold any.
    "main": Recipe(
        MAIN, (Phase(2048, 32, 1300), Phase(8192, 8, 500, plain_share=0.25)), dropout=0.3
    ),
    "draft": Recipe(DRAFT, (Phase(8192, 8, 700),), dropout=0.1, teacher_share=0.7),
    "smoke": Recipe(SMOKE, (Phase(384, 2, 4), Phase(512, 1, 2)), dropout=0.1, warmup_steps=2),
}
