"""``python -m bench.drain.node``: a node of made rows that keeps what a served node keeps.

As ``kvnode bench serve``, but what arrives is spooled and kept in the store of cuts, as by
``kvnode serve``. Planes have room for few further tokens: a model's grow with the session, and
taking memory that nobody uses would be measured as a part of each move.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from node.config import Address, ServeConfig, prepare_process

# gRPC reads its environment when it is imported.
prepare_process()

from node.bench.geometry import MUSE_GLIMMER, read_layout  # noqa: E402
from node.bench.model import MadeModel, start_engine  # noqa: E402
from node.daemon import serve  # noqa: E402
from node.engine_thread import EngineThread  # noqa: E402
from node.server import Fitting  # noqa: E402

#: Rows that a session may get beyond its prompt.
ROOM_TOKENS = 256


def main() -> None:
    """Serve until standard input ends."""
    parser = argparse.ArgumentParser(prog="python -m bench.drain.node")
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--credentials", type=Path, required=True)
    parser.add_argument("--directory", required=True)
    parser.add_argument("--rows", type=int, required=True, help="of a session that is opened")
    asked = parser.parse_args()
    model = MadeModel(MUSE_GLIMMER, read_layout(MUSE_GLIMMER), further_tokens=ROOM_TOKENS)
    model.made_tokens = asked.rows

    async def load(_: ServeConfig) -> EngineThread:
        return await start_engine(model)

    config = ServeConfig(
        Address("127.0.0.1", 0), asked.data_dir, asked.data_dir, asked.credentials,
        asked.directory, volume_worst_s=60.0,
    )  # fmt: skip
    serve(config, stop_on_stdin_end=True, fitting=Fitting(load=load))


if __name__ == "__main__":
    main()
