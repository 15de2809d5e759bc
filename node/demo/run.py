"""The demo's course: two processes, one hand-over, a twin, a pack, a flipped byte."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvpack.errors import EXIT_GOOD, EXIT_MALFORMED, EXIT_NOT_AUTHENTIC, KvpackError
from kvpack.layout import CacheLayout, LayerKind
from kvpack.wire import decode_layout
from node.client import NodeClient
from node.demo.processes import ChildError, ServeProcess, run_command, serving
from node.demo.seam import Seam, read_seam
from node.demo.stage import CLIENT, SOURCE, TARGET, Stage
from node.demo.text import DemoText, require_window
from node.errors import UsageError
from node.pb.v1 import session_pb2 as pb

#: Logits compared beyond the boundary call's own.
FURTHER_STEPS: Final = 64

MOVED: Final = "moved"
TWIN: Final = "twin"

Progress = Callable[[str, float], None]


@dataclass(frozen=True, slots=True)
class Verified:
    """What ``kvpack verify`` said: its exit code, and its reason where it refused."""

    exit_code: int
    reason: str


@dataclass(frozen=True, slots=True)
class DemoResult:
    """Everything that the demo saw.

    Attributes:
        model: Name of the model folder.
        text: The text.
        text_tokens: Tokens in it.
        prompt_tokens: Tokens used.
        layout: Shape of the cache, as the source describes it.
        window_tokens: Smallest window.
        source: The giving process.
        target: The taking process.
        move: What the source measured.
        steps: Logits compared.
        equal_steps: Logits that were equal as bytes.
        seam: The text on both sides of the move.
        pack: The saved pack.
        key: Its key file.
        verified: The verdict on the pack.
        tampered: The verdict on a copy with one byte flipped.
        seconds: The whole demo.
    """

    model: str
    text: DemoText
    text_tokens: int
    prompt_tokens: int
    layout: CacheLayout
    window_tokens: int
    source: ServeProcess
    target: ServeProcess
    move: pb.MigrateResult
    steps: int
    equal_steps: int
    seam: Seam
    pack: Path
    key: Path
    verified: Verified
    tampered: Verified
    seconds: float

    @property
    def ring_wraps(self) -> int:
        """How often the prompt ran round the ring: the boundary token is computed apart."""
        return (self.prompt_tokens - 1) // self.window_tokens

    def expected_bytes(self, kind: LayerKind) -> int:
        """The geometry's arithmetic: rows of the cut, for one token less than the prompt."""
        rows = self.prompt_tokens - 1
        return sum(
            min(rows, layer.window_tokens or rows)
            * layer.kv_heads
            * (layer.key_dim + layer.value_dim)
            * self.layout.encoding.element_bytes
            for layer in self.layout.layers
            if layer.kind is kind
        )


async def run_demo(
    stage: Stage,
    text: DemoText,
    tokens: int,
    addresses: Sequence[str],
    progress: Progress,
) -> DemoResult:
    """Run the demo on a stage that was set.

    Raises:
        KvpackError: Something could not be done at all. What was done but did not hold is in the
            result.
    """
    start = time.monotonic()
    progress("starting two nodes", 0.0)
    async with _two_nodes(stage, addresses) as (source, target, giving, taking):
        described = await giving.describe()
        token_ids = await giving.tokenize(text.text)
        layout = decode_layout(described.layout)
        # A model without a window has no ring that the text would have to go round.
        if layout.layers_of(LayerKind.SWA):
            check_tokens(tokens, described.window_tokens)
            require_window(text, len(token_ids), described.window_tokens, "tokens")
        prompt = token_ids[:tokens]
        move = await _hand_over(giving, target, prompt, progress)
        progress("comparing with a twin that never moved", 0.0)
        compared = await _compare(giving, taking, prompt, move, progress)
        seam = await read_seam(taking, prompt, compared.token_ids)
        progress("saving and verifying", 0.0)
        saved = await taking.save(await taking.get(MOVED))
        shutil.copyfile(saved.path, stage.pack)
        stage.pack.chmod(0o600)
        verified = await _verify(stage.pack, stage.key)
        tampered = await _verify(_flip_one_byte(stage.pack, stage.work), stage.key)
    return DemoResult(
        model=described.model,
        text=text,
        text_tokens=len(token_ids),
        prompt_tokens=len(prompt),
        layout=layout,
        window_tokens=described.window_tokens,
        source=source,
        target=target,
        move=move,
        steps=compared.steps,
        equal_steps=compared.equal_steps,
        seam=seam,
        pack=stage.pack,
        key=stage.key,
        verified=verified,
        tampered=tampered,
        seconds=time.monotonic() - start,
    )


@contextlib.asynccontextmanager
async def _two_nodes(
    stage: Stage, addresses: Sequence[str]
) -> AsyncIterator[tuple[ServeProcess, ServeProcess, NodeClient, NodeClient]]:
    async with contextlib.AsyncExitStack() as stack:
        starts = [
            asyncio.ensure_future(
                stack.enter_async_context(
                    serving(stage.serve_arguments(name, address), stage.log(name))
                )
            )
            for name, address in zip((SOURCE, TARGET), addresses, strict=True)
        ]
        try:
            source, target = await asyncio.gather(*starts)
        except KvpackError:
            for start in starts:
                start.cancel()
            raise
        finally:
            # One failed or we were stopped: the other must have stopped before the stack closes.
            await asyncio.wait(starts)
        credentials = stage.credentials(CLIENT)
        giving = NodeClient(credentials, SOURCE, source.address)
        taking = NodeClient(credentials, TARGET, target.address)
        yield (
            source,
            target,
            await stack.enter_async_context(giving),
            await stack.enter_async_context(taking),
        )


async def _hand_over(
    giving: NodeClient, target: ServeProcess, prompt: list[int], progress: Progress
) -> pb.MigrateResult:
    session = await giving.open(MOVED)
    request = pb.MigrateRequest(
        session_id=MOVED,
        token=session.token,
        target_node=target.node,
        target_address=str(target.address),
        token_ids=prompt,
    )
    async for event in giving.migrate(request):
        if event.WhichOneof("event") == "result":
            return event.result
        now = event.progress
        progress("prefill and hand-over", now.computed_tokens / max(1, now.total_tokens))
    raise ChildError("the source ended a hand-over without a result")


@dataclass(frozen=True, slots=True, repr=False)
class _Compared:
    """Steps asked for, steps that were equal, and the tokens that the target chose."""

    steps: int
    equal_steps: int
    token_ids: list[int]


async def _compare(
    giving: NodeClient,
    taking: NodeClient,
    prompt: list[int],
    move: pb.MigrateResult,
    progress: Progress,
) -> _Compared:
    """Compare raw logits of the moved session and of a twin, step by step, as bytes.

    The first is the boundary call's own; then at least ``FURTHER_STEPS`` more.
    """
    twin = await giving.append(await giving.open(TWIN), prompt)
    moved = await taking.get(MOVED)
    steps = 1 + FURTHER_STEPS
    index = move.first_index
    ours = taking.generate(moved, index, steps)
    theirs = giving.generate(twin, index, steps)
    token_ids: list[int] = []
    equal = 0
    while len(token_ids) < steps:
        left, right = await anext(ours, None), await anext(theirs, None)
        if left is None or right is None:
            break
        token_ids.append(left.token_id)
        equal += _same_step(left, right)
        progress("comparing with a twin that never moved", len(token_ids) / steps)
    return _Compared(steps, equal, token_ids)


def _same_step(left: pb.GenerateEvent, right: pb.GenerateEvent) -> bool:
    same_place = (left.index, left.token_id) == (right.index, right.token_id)
    return same_place and len(left.logits) > 0 and left.logits == right.logits


async def _verify(pack: Path, key: Path) -> Verified:
    """Run the real command: the demo believes its exit code, not this process."""
    ran = await run_command("kvpack", "verify", "--json", "--key", str(key), str(pack))
    try:
        said = json.loads(ran.stdout)
    except ValueError:
        return Verified(ran.exit_code, " ".join(ran.stderr.split()) or "no answer")
    return Verified(ran.exit_code, str(said.get("reason", "")))


def _flip_one_byte(pack: Path, folder: Path) -> Path:
    content = bytearray(pack.read_bytes())
    content[len(content) // 2] ^= 0x01
    copy = folder / "tampered.kvpack"
    copy.write_bytes(content)
    return copy


def failures(result: DemoResult) -> list[str]:
    """Everything that the demo promises and that did not hold; empty where all did."""
    move = result.move
    wire_most = 1.05 * move.payload_bytes
    nope, swa = (result.expected_bytes(kind) for kind in (LayerKind.FULL, LayerKind.SWA))
    refusals = (EXIT_MALFORMED, EXIT_NOT_AUTHENTIC)
    promises = {
        f"bytes.nope is {move.nope_bytes}, the geometry says {nope}": move.nope_bytes == nope,
        f"bytes.swa is {move.swa_bytes}, the geometry says {swa}": move.swa_bytes == swa,
        f"bytes.wire_total is {move.wire_bytes}, more than 1.05 x payload": (
            move.wire_bytes <= wire_most or result.prompt_tokens < WIRE_CHECK_TOKENS
        ),
        f"{result.equal_steps} of {result.steps} steps are bitwise equal": (
            result.equal_steps == result.steps >= FURTHER_STEPS
        ),
        f"state is {move.state_verdict}": move.state_verdict == "exact",
        f"continuation is {move.continuation_verdict}": move.continuation_verdict == "exact",
        f"verify refused the pack: {result.verified.reason}": (
            result.verified.exit_code == EXIT_GOOD
        ),
        f"verify said {result.tampered.exit_code} to a flipped byte": (
            result.tampered.exit_code in refusals
        ),
        "source and target are one process": result.source.pid != result.target.pid,
    }
    return [text for text, held in promises.items() if not held]


#: Below this the fixed messages (header, manifest) weigh more than 5 % of a tiny model's rows.
WIRE_CHECK_TOKENS: Final = 1024


def check_tokens(tokens: int, window_tokens: int) -> None:
    """Refuse a prompt that does not fill one window.

    Raises:
        UsageError: It is shorter.
    """
    if tokens < window_tokens:
        raise UsageError(f"--tokens {tokens}: expected at least one window of {window_tokens}")
