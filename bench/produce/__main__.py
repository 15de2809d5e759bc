"""The measurement: rows of torch, continued by torch itself and by MLX; tokens and drift."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np

from engine import load_model, prefill_calls
from engine.logits import Logits
from kvpack.identity import require_same_identity
from kvpack.snapshot import cut_tile_specs
from node.produce.model import load
from node.produce.network import Placing
from node.shipped import find_shipped


@dataclass(frozen=True)
class Agreement:
    """What was found.

    Attributes:
        model: Name of the folder.
        dtype: Of the rows.
        device: Where torch computed.
        prompt_tokens: Tokens whose rows torch computed.
        window_tokens: The smallest window.
        steps: Tokens that both went on with.
        equal_tokens: How many of them are equal, place by place, each going on from its own.
        equal_at_first: How many are equal before the first that is not.
        agreed: How many tokens MLX would choose as torch does where it is given torch's.
        drift_first: Largest difference of logits after the prompt.
        drift: Largest difference of logits over all steps, MLX given torch's tokens.
        logits: Largest logit, for comparison.
    """

    model: str
    dtype: str
    device: str
    prompt_tokens: int
    window_tokens: int
    steps: int
    equal_tokens: int
    equal_at_first: int
    agreed: int
    drift_first: float
    drift: float
    logits: float


def installed(model: Any, source: Any, count: int) -> Any:
    """A generation of MLX's with the rows of ``source``, tile by tile as they would travel."""
    installer = model.installer(count)
    for tile in source.read_tiles(cut_tile_specs(model.layout, count)):
        installer.scatter(tile)
    return installer.finish(source.schedule, mixed=True)


def goes_on(generation: Any, token: int, steps: int, told: list[int] | None = None) -> list[Logits]:
    """Logits of single-token calls; greedy, or after the tokens that are ``told``."""
    found = []
    for index in range(steps):
        found.append(generation.step(token))
        token = found[-1].argmax() if told is None else told[index]
    return found


def measure(
    folder: Path, dtype: str | None, tokens: list[int], steps: int, device: str | None
) -> Agreement:
    """Compute, hand over, go on by both, compare."""
    torch_model = load(folder, Placing(device), dtype)
    source = torch_model.new_generation()
    ids = [token % torch_model.vocab_size for token in tokens]
    rows, first = len(ids) - 1, 0
    for count in prefill_calls(0, rows):
        source.prefill(ids[first : first + count])
        first += count
    model = load_model(folder, dtype=dtype, allow_float32=True)
    require_same_identity(torch_model.identity("t"), model.identity("t"))
    free, guided = (installed(model, source, rows) for _ in range(2))
    theirs = goes_on(source, ids[-1], steps)
    chosen = [one.argmax() for one in theirs]
    ours = [one.argmax() for one in goes_on(free, ids[-1], steps)]
    after = goes_on(guided, ids[-1], steps, chosen)
    apart = [
        float(np.abs(a.values() - b.values()).max()) for a, b in zip(theirs, after, strict=True)
    ]
    same = [a == b for a, b in zip(chosen, ours, strict=True)]
    numerics = dict(torch_model.numerics().values)
    return Agreement(
        torch_model.name,
        numerics["dtype"],
        numerics["device"],
        rows,
        model.window_tokens,
        steps,
        sum(same),
        same.index(False) if False in same else steps,
        sum(a == b.argmax() for a, b in zip(chosen, after, strict=True)),
        apart[0],
        max(apart),
        max(float(np.abs(one.values()).max()) for one in theirs),
    )


@click.command()
@click.argument("folder", type=click.Path(path_type=Path, exists=True))
@click.option("--dtype", type=click.Choice(["float16", "bfloat16", "float32"]))
@click.option("--tokens", default=700, show_default=True)
@click.option("--steps", default=256, show_default=True)
@click.option("--device")
@click.option("--json", "as_json", is_flag=True)
def main(
    folder: Path, dtype: str | None, tokens: int, steps: int, device: str | None, as_json: bool
) -> None:
    """Measure one folder."""
    from tokenizers import Tokenizer

    text = find_shipped("prompt.txt").read_text()
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids
    found = measure(folder, dtype, (ids * (1 + tokens // len(ids)))[:tokens], steps, device)
    if as_json:
        click.echo(json.dumps(asdict(found)))
        return
    for name, value in asdict(found).items():
        click.echo(f"{name:16} {value}")


if __name__ == "__main__":
    main()
