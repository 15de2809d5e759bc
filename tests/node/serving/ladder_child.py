"""A process that keeps cuts until it is killed: run by test_ladder_kill.

    python ladder_child.py MODEL STORE KEY

Prints a line for each cut that is durable: its tokens, and a digest of all of its rows.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from ladder_support import CALL, Place, rows, text

from kvpack.keys import load_key_file
from kvpack.store import HoldKind
from node.engine_thread import EngineThread
from node.stream import Stream


def digest(tiles: list[bytes]) -> str:
    return hashlib.sha256(b"".join(tiles)).hexdigest()


async def main(model: str, store: str, key: str) -> None:
    engine = await EngineThread.load(Path(model))
    place = Place(engine, Path(store))
    place.keys["ours"] = load_key_file(Path(key))
    ladder = place.open()
    ids = text(300)
    base = await ladder.begin("ours", ids)
    stream = Stream(base.generation, ids, engine.model.vocab_size)
    trail = ladder.trail("ours", stream, base)
    for number in range(200):
        while size := stream.backlog_call(CALL):
            await engine.call(stream.prefill_next, size)
        await trail.cut(HoldKind.TURN)
        known = list(stream.token_ids), digest(await rows(engine, stream.generation))
        await engine.call(stream.decode_next)
        if number % 3:
            await ladder.settled()
            print(json.dumps(known), flush=True)
        stream.extend(text(11, stream.position))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
