"""What a user of mlx-lm does today: ``save_prompt_cache``, scp or rsync, ``load_prompt_cache``.

The cache is of the reference geometry and full of random halves. Saving and loading are done by two
processes, as on two machines; loading ends when every array is evaluated. Each process answers a
line of JSON with one::

    python -m bench.peers.mlx_lm TOKENS|load
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.measured import FAILED, NOT_INSTALLED, Contender, Sample
from bench.payload import kv_bytes
from bench.peers.ssh import Ssh
from bench.turns import NoFigureError, Turn
from kvpack.layout import LayerKind
from node.bench.geometry import muse_glimmer

ROOT = Path(__file__).resolve().parents[2]
PROTECTS = "encryption and authentication in transit; nothing in the file"
_GCM = "aes256-gcm@openssh.com"
_WAYS = {
    "scp": ("save, scp, load", ""),
    "scp_gcm": ("save, scp -c aes256-gcm, load", _GCM),
    "rsync": ("save, rsync over ssh, load", ""),
}


@dataclass
class End:
    """A process that has a cache, or takes one."""

    process: subprocess.Popen[str]

    def ask(self, **order: Any) -> dict[str, Any]:
        """Its answer to one order."""
        if self.process.stdin is None or self.process.stdout is None:
            raise OSError("started without pipes")
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        return self.answer()

    def answer(self) -> dict[str, Any]:
        line = self.process.stdout.readline() if self.process.stdout else ""
        if not line:
            raise NoFigureError(FAILED, "mlx-lm's process ended")
        said: dict[str, Any] = json.loads(line)
        if "problem" in said:
            raise NoFigureError(NOT_INSTALLED if said["missing"] else FAILED, said["problem"])
        return said


@contextlib.contextmanager
def end(what: str) -> Iterator[End]:
    """A process that holds a cache of so many tokens, or with ``load`` one that takes some."""
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.peers.mlx_lm", what],
        cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        yield End(process)
    finally:
        process.kill()
        process.wait()


def ways_turns(
    group: str, tokens: int, source: End, target: End, ssh: Ssh, folder: Path,
    chosen: Sequence[str] = tuple(_WAYS),
) -> Iterator[Turn]:  # fmt: skip
    """A turn for each of the ways that were chosen to get the file across."""
    saved, copied = folder / "saved.safetensors", folder / "copied.safetensors"
    source.answer()
    target.answer()

    def forget() -> None:
        for path in (saved, copied):
            path.unlink(missing_ok=True)

    for word in chosen:
        title, cipher = _WAYS[word]
        contender = Contender(f"mlx_lm_{word}", f"mlx-lm: {title}", group, protects=PROTECTS)

        def once(
            contender: Contender = contender, word: str = word, cipher: str = cipher
        ) -> dict[str, Sample]:
            save = source.ask(save=str(saved))
            start_s = time.perf_counter()
            ssh.copy(word.partition("_")[0], saved, copied, cipher)
            copy_s = time.perf_counter() - start_s
            load = target.ask(load=str(copied))
            if source.ask(digest=True) != target.ask(digest=True):
                raise NoFigureError(FAILED, "the cache that was loaded is another one")
            target.ask(drop=True)
            forget()
            detail = {"save_s": save["seconds"], "copy_s": copy_s, "load_s": load["seconds"]}
            return {contender.name: Sample(sum(detail.values()), kv_bytes(tokens), detail=detail)}

        yield Turn([contender], once, forget)


def made_cache(tokens: int) -> list[Any]:
    """mlx-lm's own cache objects in the reference geometry, filled as after ``tokens - 1`` rows."""
    import mlx.core as mx
    import numpy as np
    from mlx_lm.models.cache import KVCache, RotatingKVCache

    random = np.random.default_rng(9)
    position, made = tokens - 1, []
    for layer in muse_glimmer().layers:
        count = min(position, layer.window_tokens or position)
        shape = (1, layer.kv_heads, count, layer.key_dim)
        words = count * layer.kv_heads * layer.key_dim // 4
        keys, values = (
            mx.array(random.integers(0, 1 << 64, words, np.uint64).view(np.float16).reshape(shape))
            for _ in range(2)
        )
        window = layer.kind is LayerKind.SWA
        cache = RotatingKVCache(max_size=layer.window_tokens) if window else KVCache()
        if window:
            # As it lies after many tokens: full, the next row to be written at its beginning.
            cache.keys, cache.values, cache.offset, cache._idx = keys, values, position, count
        else:
            cache.update_and_fetch(keys, values)
        mx.eval(cache.keys, cache.values)
        made.append(cache)
    return made


def digest(caches: list[Any]) -> str:
    """Of every live row, in order."""
    import mlx.core as mx
    import numpy as np
    from blake3 import blake3

    found = blake3()
    for cache in caches:
        for array in cache.state:
            if isinstance(array, mx.array):
                words = np.array(mx.contiguous(array).view(mx.uint16))
                found.update(words.reshape(-1).view(np.uint8))
            else:
                found.update(repr(array).encode())
    return found.hexdigest()


def serve(what: str) -> None:
    """Answer orders until there are none."""
    import mlx.core as mx
    from mlx_lm.models.cache import load_prompt_cache, save_prompt_cache

    caches = [] if what == "load" else made_cache(int(what))
    _say({"ready": True})
    for line in sys.stdin:
        order, start_s = json.loads(line), time.perf_counter()
        if "digest" in order:
            _say({"digest": digest(caches)})
            continue
        if "save" in order:
            save_prompt_cache(order["save"], caches)
        elif "load" in order:
            caches = load_prompt_cache(order["load"])
            mx.eval([cache.state for cache in caches])
        else:
            caches = []
        _say({"seconds": time.perf_counter() - start_s})


def _say(said: dict[str, Any]) -> None:
    print(json.dumps(said), flush=True)


if __name__ == "__main__":
    try:
        serve(sys.argv[1])
    except Exception as error:  # noqa: BLE001 - whatever it raises is what is reported
        missing = isinstance(error, ImportError)
        _say({"problem": f"{type(error).__name__}: {error}", "missing": missing})
