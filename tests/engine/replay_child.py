"""Run in a fresh process: restores cuts from files and writes the logits that follow.

Arguments: model folder, plane layout, folder of cuts. Each ``NAME.cut`` gives a ``NAME.logits``.
"""

from __future__ import annotations

import sys
from pathlib import Path

from engine_support import restore
from replay_plan import continuation

import engine


def main(model_folder: str, layout: str, cuts: str) -> None:
    model = engine.load_model(Path(model_folder), plane_layout=engine.PlaneLayout(layout))
    for cut in sorted(Path(cuts).glob("*.cut")):
        generation = restore(cut, model)
        cut.with_suffix(".logits").write_bytes(continuation(generation))


if __name__ == "__main__":
    main(*sys.argv[1:])
