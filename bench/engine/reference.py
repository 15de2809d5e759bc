"""The 52-layer geometry with a small hidden size, on whatever MLX computes on by default.

A folder of random weights is written with mlx-lm's own network of that geometry, so both sides load
the same files. Four loops take turns at the same position, past the second window:

- the engine's, as it is;
- the engine's with every step's logits copied to the host;
- the engine's with building ahead turned the other way;
- mlx-lm's.

Then rollback, on planes of the same geometry: 100 windows against 2, in time and memory.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models import muse_glimmer

import engine
from bench.engine.decode import OurLoop, agreement, their_loop
from bench.engine.measure import Timed, all_in_turns, paired
from bench.engine.models import NoNetwork, reference_layout, token_ids
from bench.engine.rollback import (
    BLOCK_TOKENS,
    FAR_WINDOWS,
    WEIGHINGS,
    Rollback,
    rollback_by_context,
)
from engine import PlaneLayout
from engine.ahead import pays_here


@dataclass(frozen=True)
class Geometry:
    """What is built. The defaults are the reference but for the hidden size.

    Attributes:
        layers: A multiple of four.
        window: Tokens that a sliding layer sees.
        hidden: Width of the residual stream.
        query_heads: Query heads of 128 elements; there are 2 heads of keys and values.
        limit_s: Seconds for the rounds of decode, and again for those of rollback.
    """

    layers: int = 52
    window: int = 2048
    hidden: int = 256
    query_heads: int = 32
    limit_s: float = 60.0


@dataclass(frozen=True)
class Loops:
    """Decode, each loop against mlx-lm's, and how many tokens agree."""

    as_is: Timed
    read: Timed
    other: Timed
    builds_ahead: bool
    agreement: str


@contextmanager
def reference_folder(geometry: Geometry) -> Iterator[Path]:
    """A model folder of ``geometry``: the tiny model's tokenizer and config, other sizes."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = engine.tiny_model_files("muse_glimmer", seed=7, window=8, layers=4)
        for file, data in files.items():
            (folder / file).write_bytes(data)
        config = json.loads(files["config.json"])
        config |= _fields(geometry)
        (folder / "config.json").write_text(json.dumps(config))
        mx.random.seed(7)
        network = muse_glimmer.Model(muse_glimmer.ModelArgs.from_dict(config))
        weights = {
            path: array.astype(mx.float16) for path, array in tree_flatten(network.parameters())
        }
        mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
        del network, weights
        yield folder


def _fields(geometry: Geometry) -> dict[str, object]:
    kinds = ["sliding_attention"] * 3 + ["full_attention"]
    return {
        "num_hidden_layers": geometry.layers,
        "layer_types": kinds * (geometry.layers // 4),
        "sliding_window": geometry.window,
        "hidden_size": geometry.hidden,
        "intermediate_size": 2 * geometry.hidden,
        "num_attention_heads": geometry.query_heads,
        "num_key_value_heads": 2,
        "head_dim": 128,
    }


def reference_decode(geometry: Geometry, rounds: int) -> Loops:
    """Seconds per segment of 24 tokens, all four sessions at the same position."""
    with reference_folder(geometry) as folder:
        model = engine.load_model(folder)
        count = 2 * geometry.window + 200
        prompt = [token % model.vocab_size for token in token_ids(count)]
        ahead = pays_here()
        loops = [
            OurLoop(model, prompt),
            OurLoop(model, prompt, read_logits=True),
            OurLoop(model, prompt, ahead=not ahead),
        ]
        theirs = their_loop(folder, prompt, rounds)
        works = [*(loop.segment for loop in loops), theirs.segment]
        *ours, other = all_in_turns(works, rounds, limit_s=geometry.limit_s)
        found = [paired(rounds_of, other) for rounds_of in ours]
        return Loops(*found, builds_ahead=ahead, agreement=agreement(loops[0], theirs))


def reference_rollback(geometry: Geometry, rounds: int) -> Rollback:
    """100 windows against 2, on planes that hold rows nobody computed."""
    # Each round keeps some tokens of its block.
    context = (FAR_WINDOWS + 1) * geometry.window + (rounds + WEIGHINGS + 4) * BLOCK_TOKENS
    layout = reference_layout(geometry.window, context, geometry.layers)
    planes = NoNetwork(layout, PlaneLayout.HEAD_MAJOR)
    return rollback_by_context(planes, rounds, geometry.limit_s)
