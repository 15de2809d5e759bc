"""What uninterrupted sessions give: the first child's work. Nothing is ever restored here but
the rows that a block leaves, whose twin must not use the checkpoint that it is there to judge.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from node.prove.cases import (
    STEPS_AFTER_BLOCK,
    STEPS_AFTER_CHUNK,
    Continuation,
    History,
    RollbackStation,
    ShapePair,
    Station,
)
from node.prove.compare import Comparison, Twin, compare_logits, compare_state
from node.prove.cuts import Cut, write_cut, write_pack
from node.prove.files import (
    CONTROL_FILE,
    block_file,
    cut_file,
    kept_file,
    pack_file,
    twin_file,
)
from node.prove.sessions import (
    continuation,
    live_session,
    replay,
    rows_before_and_after,
    single_calls,
    state_digest,
    tiles_digest,
    token_stream,
)

if TYPE_CHECKING:
    from engine import Generation, Logits, Model, ObservedCall

#: Blocks of the greedy comparison.
_GREEDY_ROUNDS: Final = 4


@dataclass(frozen=True, slots=True)
class Written:
    """What was written for a station.

    Attributes:
        control: The same calls once more without any cache, against the first time.
        file_bytes: Bytes in the folder.
    """

    control: Comparison
    file_bytes: int


class Writer:
    """Computes twins and writes them, and the cuts, into ``folder``."""

    def __init__(self, model: Model, folder: Path) -> None:
        self._model = model
        self._folder = folder

    def control(self, history: History) -> Written:
        """The same session twice, with no cache in between."""
        first = self._twin(live_session(self._model, history))
        again = replay(self._model, live_session(self._model, history), first)
        return Written(again.at("in one process"), first.write(self._folder / CONTROL_FILE))

    def station(self, station: Station) -> Written:
        """Cut a session and write what it gives when it goes on."""
        control, size, start = Comparison(), 0, b""
        kinds = [kind for kind in Continuation if any(k is kind for _, k in station.restores)]
        for kind in kinds:
            live = live_session(self._model, station.history)
            if start:
                control += compare_state(start, state_digest(live), "of the same calls again")
            else:
                start, size = self._cut(live, station)
            twin = self._twin(live, kind, start)
            size += twin.write(self._folder / twin_file(station, kind))
        return Written(control, size)

    def rollback(self, station: RollbackStation) -> Written:
        """For each block: a session that made its call and kept the first rows."""
        base = live_session(self._model, station.history)
        start, size = self._cut(base, station)
        control = Comparison()
        for count in sorted({count for count, _ in station.blocks}):
            whole = live_session(self._model, station.history)
            control += compare_state(start, state_digest(whole), "of the same calls again")
            logits = whole.block(token_stream(self._model.vocab_size, count, "block"))
            path = self._folder / block_file(station, count)
            size += path.write_bytes(_joined(logits))
            seen = self._observed(station, count)
            control += compare_logits(_joined(logits), seen.logits).at("of the same block again")
            # The shorter ones first: they read rows of the block before the twin goes on.
            for kept in sorted(kept for n, kept in station.blocks if n == count):
                after = self._after_block(station, base, whole, seen, kept)
                path = self._folder / kept_file(station, count, kept)
                size += self._block_twin(after).write(path)
        return Written(control, size)

    def _after_block(
        self,
        station: RollbackStation,
        base: Generation,
        whole: Generation,
        seen: ObservedCall,
        kept: int,
    ) -> Generation:
        """The state after ``kept`` tokens of a block, by no checkpoint.

        Rows of the block are those that the layers handed over: a ring narrower than the block
        has lost the first ones, and what is proved is that the checkpoint has not.
        """
        count = len(seen.logits)
        if kept == count:
            return whole
        if kept == 0:
            return live_session(self._model, station.history)
        position = base.position
        before, after = rows_before_and_after(self._model.layout, position, position + kept)
        installer = self._model.installer(position + kept)
        for spec in before:
            installer.scatter(base.read_tile(spec))
        for spec in after:
            installer.scatter(seen.tile(spec))
        return installer.finish(base.schedule.after_call(count, count - kept))

    def _observed(self, station: RollbackStation, count: int) -> ObservedCall:
        """The block's call once more, by somebody who looks at what the layers hand over."""
        from engine import ObservedCall

        session = live_session(self._model, station.history)
        ids = token_stream(self._model.vocab_size, count, "block")
        return ObservedCall(self._model, session, ids)

    def _block_twin(self, session: Generation) -> Twin:
        start = state_digest(session)
        logits = single_calls(self._model, session, STEPS_AFTER_BLOCK, "after block")
        data = _joined(logits)
        return Twin(start, state_digest(session), data)

    def shapes(self, pair: ShapePair) -> Comparison:
        """The same tokens by unequal calls: how far apart they are."""
        left, right = (live_session(self._model, way) for way in (pair.left, pair.right))
        if pair.block_tokens:
            return self._greedy_by_blocks(left, right, pair.block_tokens)
        found = list(single_calls(self._model, left, STEPS_AFTER_CHUNK, "shapes"))
        expected = _joined(single_calls(self._model, right, STEPS_AFTER_CHUNK, "shapes"))
        return compare_logits(expected, found)

    def _greedy_by_blocks(self, blocks: Generation, plain: Generation, count: int) -> Comparison:
        """Plain greedy decoding, and the same tokens by blocks as a perfect draft would send."""
        total, token = Comparison(), token_stream(self._model.vocab_size, 1, "greedy")[0]
        for _ in range(_GREEDY_ROUNDS):
            asked, said = [], []
            for _ in range(count):
                asked.append(token)
                said.append(plain.step(token))
                token = said[-1].argmax()
            total += compare_logits(_joined(said), blocks.block(asked))
        return total

    def _cut(self, live: Generation, station: Station | RollbackStation) -> tuple[bytes, int]:
        """Write the cut, the pack too where it is asked for: digest of its rows, and bytes."""
        token_ids = token_stream(self._model.vocab_size, live.position)
        cut = Cut(live.snapshot(token_ids), live.schedule)
        size = write_cut(self._folder / cut_file(station), cut)
        if isinstance(station, Station):
            path = self._folder / pack_file(station)
            size += write_pack(path, self._folder, self._model, cut)
        return tiles_digest(cut.snapshot.tiles), size

    def _twin(
        self,
        session: Generation,
        kind: Continuation = Continuation.DECODES,
        start: bytes | None = None,
    ) -> Twin:
        """Let ``session`` go on. ``start``: the digest of its rows now, if known."""
        start = state_digest(session) if start is None else start
        data = _joined(continuation(self._model, session, kind))
        return Twin(start, state_digest(session), data)


def _joined(logits: Iterable[Logits]) -> bytes:
    return b"".join(one.data for one in logits)
