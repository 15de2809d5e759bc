"""What a session that never moved would say: the same prompt and greedy steps in this process."""

from __future__ import annotations

from pathlib import Path

from engine import Generation, load_model, prefill_calls
from engine.model import Model


def prompt(length: int, seed: int) -> list[int]:
    """Token ids that look like bytes."""
    return [(seed * 31 + 7 * i + i * i) % 251 for i in range(length)]


class Twin:
    """One session's tokens and logits, computed as far as somebody asks for them.

    Only to be used on the thread that loaded the model.
    """

    def __init__(self, model: Model, token_ids: list[int]) -> None:
        self._generation: Generation = model.new_generation()
        self.token_ids = list(token_ids)
        self.given = len(token_ids)
        place = 0
        for call_tokens in prefill_calls(0, self.given - 1):
            self._generation.prefill(self.token_ids[place : place + call_tokens])
            place += call_tokens
        self._logits: list[bytes] = []

    def at(self, index: int) -> tuple[int, bytes]:
        """The token at ``index`` and the logits that it was chosen from, as bytes."""
        while len(self.token_ids) <= index:
            logits = self._generation.step(self.token_ids[-1])
            self._logits.append(bytes(logits.data))
            self.token_ids.append(logits.argmax())
        return self.token_ids[index], self._logits[index - self.given]


class Twins:
    """Twins of one model, by prompt."""

    def __init__(self, model_dir: Path) -> None:
        self._model = load_model(model_dir)
        self._known: dict[tuple[int, int], Twin] = {}

    def of(self, length: int, seed: int) -> Twin:
        found = self._known.get((length, seed))
        if found is None:
            found = self._known[length, seed] = Twin(self._model, prompt(length, seed))
            while len(self._known) > 8:
                del self._known[next(iter(self._known))]
        return found
