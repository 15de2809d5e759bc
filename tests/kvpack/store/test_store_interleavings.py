"""Writer, second writer and collector at every step of one another.

Two savers write the cut that a collector is evicting, or one that shares its chunks. Whatever the
order, no visible cut ever misses a chunk, nobody is told of a success that did not happen, and a
last collection leaves nothing behind. The collector's plan is the worst there is: it condemns
everything that anybody will ever write.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import pytest
from schedule_kit import Actor, Content, Ended, Phase, act, explore
from store_kit import HEADER, KEY, NOW, Session, token_ids

from kvpack.bundle import encode_header
from kvpack.errors import KvpackError
from kvpack.manifest import manifest_id, seal_manifest
from kvpack.store import Budget, GcPolicy, Hold, HoldKind, names
from kvpack.store.cut import join_cut
from kvpack.store.intent import Intent, end, pin, publish, rely
from kvpack.store.interface import ObjectData
from kvpack.store.mark import marks_of
from kvpack.store.plan import DELETE_ORDER
from kvpack.store.records import Record, State
from kvpack.store.steps import Steps, put
from kvpack.store.sweep import close_expired, end_sweeps, sweep_once

IDS = token_ids(5)
EXPIRES = NOW + 100


@dataclass(frozen=True)
class Prepared:
    """A cut that is about to be saved."""

    chunks: tuple[ObjectData, ...]
    cut: bytes
    hold: Hold

    @property
    def name(self) -> str:
        return names.cut_name(self.cut[-32:])

    def objects(self) -> dict[str, bytes]:
        return {
            **{item.name: item.data for item in self.chunks},
            self.name: self.cut,
            self.hold.name: b"",
        }


def store_objects(intent: Intent, objects: Sequence[ObjectData]) -> Steps[None]:
    """What a writer does with chunks that it brings."""
    yield from pin(intent, [item.name for item in objects], EXPIRES, 0, 1)
    yield from put(objects)


def prepare(lineage: int, *, logits: bool = False) -> Prepared:
    session = Session(IDS)
    session.grow(len(IDS))
    sealed, manifest = session.cut(logits=logits)
    blob = seal_manifest(KEY, encode_header(HEADER), manifest)
    chunks = tuple(
        ObjectData(names.chunk_name(chunk.reference.seal_id), chunk.object) for chunk in sealed
    )
    hold = Hold(NOW, len(IDS), bytes([lineage]) * 16, HoldKind.TURN, manifest_id(blob))
    return Prepared(chunks, join_cut(encode_header(HEADER), blob), hold)


#: Saved long ago, and on its way out.
OLD = prepare(1)
#: The same cut again, by another session.
SAME = prepare(2)
#: One that shares the rows and the ids, and has logits of its own.
SHARING = prepare(3, logits=True)


def saving(prepared: Prepared, writer: int, *, relying: bool = False) -> Actor:
    """What a writer does, operation by operation; ``relying`` on chunks that it does not bring."""
    stored = [item.name for item in prepared.chunks]

    def intent_of(carry: tuple[int, frozenset[str]] | None) -> Intent:
        length, pins = carry or (0, frozenset())
        return Intent(bytes([writer]) * 16, length, set(pins))

    def phase(steps_of: Callable[[Intent], Steps[object]]) -> Phase:
        def run(carry: tuple[int, frozenset[str]] | None) -> Steps[object]:
            intent = intent_of(carry)
            yield from steps_of(intent)
            return intent.length, frozenset(intent.pins)

        return run

    def publishing(intent: Intent) -> Steps[None]:
        return publish(intent, stored, prepared.cut, [prepared.hold.name], EXPIRES, 1)

    brought = prepared.chunks[3:] if relying else prepared.chunks
    phases = [
        phase(lambda intent: store_objects(intent, brought)),
        phase(publishing),
        phase(lambda intent: end(intent, 1)),
    ]
    if relying:
        phases.insert(0, phase(lambda intent: rely(intent, stored[:3], EXPIRES, 0, 1)))
    return phases


def collecting(now: int, batch_names: int = 64) -> Actor:
    """A collector that condemns everything that anybody will ever write."""
    doomed: dict[str, bytes] = {**OLD.objects(), **SAME.objects(), **SHARING.objects()}
    ordered = sorted(doomed, key=lambda name: DELETE_ORDER.index(names.kind_of(name)))
    policy = GcPolicy(Budget(1 << 40, 0), grace_s=0)
    dropped = frozenset({OLD.hold.name})
    return [
        lambda _: end_sweeps(batch_names),
        lambda _: close_expired(policy, now, batch_names),
        lambda _: sweep_once(ordered, dropped, b"c" * 16, {}, batch_names),
    ]


def require_no_dangling(content: Content) -> None:
    for name, data in content.items():
        if names.kind_of(name) == names.CUTS:
            for shared, peer in marks_of(data, names.cut_id_of(name)).chunk_names():
                assert shared in content or peer in content, "a visible cut misses a chunk"


def run_alone(content: dict[str, bytes], actor: Actor) -> None:
    """Run one actor to its end."""
    for phase in actor:
        steps = phase(None)
        try:
            operation = next(steps)
            while True:
                result = act(content, operation)
                failed = isinstance(result, KvpackError)
                operation = steps.throw(result) if failed else steps.send(result)
        except StopIteration:
            continue


def require_end(savers: Mapping[str, Prepared], allowed: set[str]):
    """What must be true when everybody has ended."""

    def require(content: Content, ends: Mapping[str, Ended]) -> None:
        for name, prepared in savers.items():
            ended = ends[name]
            if ended.error:
                assert ended.error in allowed, ended
            else:
                assert prepared.name in content and prepared.hold.name in content
        assert not any(name.startswith("sweeps/") for name in content)
        # Much later a collector finds no intent alive, and leaves exactly the held cuts.
        rest = dict(content)
        run_alone(rest, collecting(NOW + 10_000))
        require_no_dangling(rest)
        assert {names.kind_of(name) for name in rest} <= {"chunks", "cuts", "holds"}
        for name, prepared in savers.items():
            if not ends[name].error:
                assert prepared.objects().items() <= rest.items()

    return require


def walk(savers: Mapping[str, tuple[Prepared, bool]], now: int, batch_names: int = 64) -> int:
    """Walk everything that the savers and a collector can do to one another."""
    actors = {
        name: saving(prepared, number, relying=relying)
        for number, (name, (prepared, relying)) in enumerate(savers.items(), start=1)
    }
    actors["collector"] = collecting(now, batch_names)
    allowed = {"StoreBusyError", "NotStoredError"}
    if now > EXPIRES:
        allowed.add("IntentLostError")
    checks = require_end({name: prepared for name, (prepared, _) in savers.items()}, allowed)
    return explore(OLD.objects(), actors, require_no_dangling, checks)


@pytest.mark.parametrize("now", [NOW, NOW + 1000], ids=["in_time", "intents_expired"])
@pytest.mark.parametrize("prepared", [SAME, SHARING], ids=["same_cut", "sharing_cut"])
def test_one_writer_against_a_collector_name_by_name(prepared: Prepared, now: int) -> None:
    assert walk({"writer": (prepared, False)}, now, batch_names=1) > 300


@pytest.mark.parametrize("now", [NOW, NOW + 1000], ids=["in_time", "intents_expired"])
def test_a_writer_that_relies_on_what_is_there(now: int) -> None:
    assert walk({"writer": (SHARING, True)}, now, batch_names=1) > 300


# Of one writer whose intent expired all orders are walked above; of two, by make test-slow.
@pytest.mark.parametrize(
    "now",
    [
        pytest.param(NOW, id="in_time"),
        pytest.param(NOW + 1000, id="intents_expired", marks=pytest.mark.slow),
    ],
)
def test_two_writers_and_a_collector(now: int) -> None:
    states = walk({"first": (SAME, False), "second": (SHARING, True)}, now)
    assert states > 3000


def test_a_dead_writer_that_had_decided_is_finished_by_the_collector() -> None:
    content = {item.name: item.data for item in SAME.chunks}
    intent = names.intent_name(bytes([1]) * 16, 0)
    record = Record(State.PUBLISHING, EXPIRES, 0, (), (SAME.hold.name,), SAME.cut)
    content[intent] = record.encode()
    run_alone(content, collecting(NOW + 10_000))
    assert content == SAME.objects()


def test_a_dead_writer_whose_chunks_are_gone_is_not_finished() -> None:
    content = {item.name: item.data for item in SAME.chunks[1:]}
    intent = names.intent_name(bytes([1]) * 16, 0)
    record = Record(State.PUBLISHING, EXPIRES, 0, (), (SAME.hold.name,), SAME.cut)
    content[intent] = record.encode()
    run_alone(content, collecting(NOW + 10_000))
    assert content == {}
