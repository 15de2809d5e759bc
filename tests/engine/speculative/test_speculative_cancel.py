"""A block that is stopped anywhere leaves the generation as before; nothing undecided gets out."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import mlx.core as mx
import pytest
from block_support import at, block_rows, continue_both, look
from engine_support import ModelCase, reinstall, tokens

from engine import Generation, Model, TornGenerationError
from engine.cache import PlaneCache
from engine.planes import Plane
from kvpack.errors import LimitError
from kvpack.limits import SPECULATIVE_BLOCK_TOKENS_MAX

Load = Callable[[ModelCase], Model]
Arm = Callable[[type, str, int], None]


class Stopped(KeyboardInterrupt):
    """Not an ``Exception``: what a cancelled task or a signal raises is often none."""


@pytest.fixture
def stop_at(monkeypatch: pytest.MonkeyPatch) -> Iterator[Arm]:
    """Raise at the n-th call of a method, before or after it did its work, and only then."""

    def arm(owner: object, name: str, number: int, *, after: bool = False) -> None:
        original, calls = getattr(owner, name), [0]

        def stopping(*args: object, **kwargs: object) -> object:
            calls[0] += 1
            if calls[0] == number and not after:
                raise Stopped
            result = original(*args, **kwargs)
            if calls[0] == number and after:
                raise Stopped
            return result

        monkeypatch.setattr(owner, name, stopping)

    return arm


#: Where a block of the four-layer model can be stopped: in a layer, in a plane, at evaluation.
PLACES = [
    *[(PlaneCache, "update_and_fetch", n, after) for n in (1, 2, 4) for after in (False, True)],
    (Plane, "_grow", 3, False),
    (Plane, "_write", 1, True),
    (Plane, "_write", 3, False),
    (mx, "eval", 2, False),
    (mx, "eval", 2, True),
]


@pytest.mark.parametrize(
    "place", PLACES, ids=lambda p: f"{p[1]}-{p[2]}-{'after' if p[3] else 'before'}"
)
@pytest.mark.parametrize(("window", "start"), [(8, 5), (8, 8), (8, 21), (64, 21)])
def test_stopped_in_the_middle_of_a_call(
    load: Load, stop_at: Arm, monkeypatch: pytest.MonkeyPatch, window: int, start: int, place: tuple
) -> None:
    model = load(ModelCase(window=window, dtype="float16"))
    origin = at(model, start)
    live, twin = reinstall(model, origin), reinstall(model, origin)
    before = look(live)
    owner, name, number, after = place
    stop_at(owner, name, number, after=after)
    with pytest.raises(Stopped), live.checkpoint(11):
        live.block(tokens(11, salt=1))
    monkeypatch.undo()

    assert look(live) == before
    continue_both(live, twin)


def test_stopped_between_forward_and_commit(load: Load) -> None:
    model = load(ModelCase(dtype="bfloat16"))
    for start in (5, 8, 30):
        origin = at(model, start)
        live, twin = reinstall(model, origin), reinstall(model, origin)
        before = look(live)
        with pytest.raises(Stopped), live.checkpoint(16):
            live.block(tokens(16, salt=1))
            raise Stopped
        assert look(live) == before
        continue_both(live, twin)


@pytest.mark.parametrize("grown", [1, 2, 3])
def test_stopped_while_a_plane_grows(
    load: Load, stop_at: Arm, monkeypatch: pytest.MonkeyPatch, grown: int
) -> None:
    """Keys that grew without their values would keep the values short for ever."""
    model = load(ModelCase(window=512, dtype="float16"))
    origin = at(model, 250)
    live, twin = reinstall(model, origin), reinstall(model, origin)
    before = look(live)
    stop_at(Plane, "_grown", grown)
    with pytest.raises(Stopped), live.checkpoint(11):
        live.block(tokens(11, salt=1))
    monkeypatch.undo()

    assert look(live) == before
    continue_both(live, twin)


@pytest.mark.parametrize("kept", [0, 3, 5])
def test_stopped_in_a_later_call_can_still_keep_the_calls_before(
    load: Load, stop_at: Arm, monkeypatch: pytest.MonkeyPatch, kept: int
) -> None:
    model = load(ModelCase(dtype="float16"))
    origin = at(model, 21)
    live, twin = reinstall(model, origin), reinstall(model, origin)
    said = tokens(9, salt=2)
    checkpoint = live.checkpoint(9)
    for token in said[:5]:
        live.step(token)
    stop_at(PlaneCache, "update_and_fetch", 3)
    with pytest.raises(Stopped):
        live.block(said[5:])
    monkeypatch.undo()
    with pytest.raises(TornGenerationError):
        live.step(said[5])
    checkpoint.accept(kept)

    for token in said[:kept]:
        twin.step(token)
    assert look(live) == look(twin)
    continue_both(live, twin)


def test_a_call_outside_a_checkpoint_still_tears(load: Load, stop_at: Arm) -> None:
    live = at(load(ModelCase(dtype="float16")), 9)
    stop_at(PlaneCache, "update_and_fetch", 2)
    with pytest.raises(Stopped):
        live.block([1, 2])
    with pytest.raises(TornGenerationError):
        live.checkpoint(1)


@pytest.mark.parametrize("count", [0, SPECULATIVE_BLOCK_TOKENS_MAX + 1, 300])
def test_blocks_beyond_sixteen_are_refused(load: Load, count: int) -> None:
    live = at(load(ModelCase(dtype="float16")), 9)
    before = look(live)
    with pytest.raises(LimitError, match=r"block\.token_count: expected 1 to 16 tokens"):
        live.checkpoint(count)
    with pytest.raises(LimitError, match=r"block\.token_count"):
        live.block([1] * count)
    assert look(live) == before


def test_calls_may_not_outgrow_their_checkpoint(load: Load) -> None:
    live = at(load(ModelCase(dtype="float16")), 9)
    before = look(live)
    with live.checkpoint(4) as checkpoint:
        live.block([1, 2, 3])
        for call in (lambda: live.block([1, 2]), lambda: live.prefill([1, 2])):
            with pytest.raises(LimitError, match="at most 1 more"):
                call()
        live.step(4)
        with pytest.raises(LimitError, match="at most 0 more"):
            live.step(5)
        with pytest.raises(LimitError, match="kept_tokens"):
            checkpoint.accept(5)
        assert checkpoint.is_open
        checkpoint.accept(0)
    assert look(live) == before


def test_nothing_undecided_is_handed_out(load: Load) -> None:
    model = load(ModelCase(dtype="float16"))
    live = at(model, 9)
    spec = live.snapshot(tokens(9)).tiles[0].spec
    with live.checkpoint(2):
        for refused in (
            lambda: live.snapshot(tokens(9)),
            lambda: live.read_tile(spec),
            lambda: live.checkpoint(1),
        ):
            with pytest.raises(RuntimeError, match="checkpoint is open"):
                refused()
    assert live.read_tile(spec)


def test_a_checkpoint_is_settled_once(load: Load) -> None:
    live = at(load(ModelCase(dtype="float16")), 9)
    checkpoint = live.checkpoint(2)
    live.block([1, 2])
    checkpoint.accept(1)
    for again in (lambda: checkpoint.accept(1), checkpoint.roll_back):
        with pytest.raises(RuntimeError, match="settled already"):
            again()
    assert live.position == 10


def test_what_is_retained_does_not_depend_on_the_context(load: Load) -> None:
    """Rows, and the bytes that MLX holds for them: two windows against a hundred."""
    model = load(ModelCase(dtype="float16"))
    rows, held, settling = [], [], []
    for start in (2 * 8, 100 * 8):
        live = model.new_generation()
        live.prefill(tokens(start))
        live.step(1)
        before = active_bytes()
        with live.checkpoint(16) as checkpoint:
            rows.append(checkpoint.retained_rows)
            live.block(tokens(16))
            held.append(active_bytes() - before)
            before = active_bytes()
            mx.reset_peak_memory()
            checkpoint.accept(3)
            mx.synchronize()
            settling.append(max(0, mx.get_peak_memory() - before))
    # Three rings of eight rows each; the full plane keeps three integers.
    assert rows == [24, 24]
    # These, and the block's own rows for the same rings; twice that, for the allocator. The full
    # plane's buffer alone grew by 768 rows between the two.
    most = 2 * (24 + 3 * 16) * model.layout.row_bytes(0)
    assert 0 < max(held) <= most
    assert max(settling) <= most


def active_bytes() -> int:
    mx.synchronize()
    return int(mx.get_active_memory())


def test_rows_that_were_taken_back_never_leave(load: Load) -> None:
    """They stay in spare slots of the full plane until overwritten. No tile can reach them."""
    model = load(ModelCase(dtype="float16"))
    for start in (3, 21):
        live = at(model, start)
        secret = [(200 + index) for index in range(16)]
        rows, _ = block_rows(model, reinstall(model, live), secret)
        with live.checkpoint(16) as checkpoint:
            live.block(secret)
            checkpoint.accept(1)
        poison = [row for (_, position), row in rows.items() if position > start]
        key_bytes = [row[: len(row) // 2] for row in poison]
        assert leaked(key_bytes, planes_memory(live)), "the test must be able to see them"
        assert not leaked(key_bytes, snapshot_memory(live))
        live.step(5)
        live.prefill(tokens(3, salt=6))
        assert not leaked(key_bytes, snapshot_memory(live))


def leaked(patterns: list[bytes], memory: list[bytes]) -> int:
    return sum(pattern in part for pattern in patterns for part in memory)


def planes_memory(generation: Generation) -> list[bytes]:
    """All rows of the planes' buffers, live or not, token-major."""
    parts = []
    for cache in generation._caches:
        key = cache.plane.key
        assert key is not None
        parts.append(bytes(memoryview(mx.contiguous(key[0].transpose(1, 0, 2)).view(mx.uint16))))
    return parts


def snapshot_memory(generation: Generation) -> list[bytes]:
    return [bytes(tile.data) for tile in generation.snapshot([0] * generation.position).tiles]
