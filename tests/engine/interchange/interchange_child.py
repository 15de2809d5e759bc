"""Run in a fresh process with mlx-lm and nothing of ours: loads cache files and goes on.

Arguments: model folder, folder of caches. Each ``NAME.safetensors`` gives a ``NAME.logits``.
"""

from __future__ import annotations

import sys
from pathlib import Path

from mlx_lm_sessions import MlxLmSession, network_of


def main(model_folder: str, caches: str) -> None:
    network = network_of(Path(model_folder))
    for path in sorted(Path(caches).glob("*.safetensors")):
        path.with_suffix(".logits").write_bytes(MlxLmSession.loaded(network, path).continuation())
    ours = [name for name in sys.modules if name.partition(".")[0] in ("kvpack", "engine", "node")]
    assert not ours, ours


if __name__ == "__main__":
    main(*sys.argv[1:])
