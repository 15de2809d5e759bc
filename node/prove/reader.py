"""Restores: the second child's work. It holds nothing but files that another process wrote."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvpack.snapshot import Tile
from node.prove.cases import (
    STEPS_AFTER_BLOCK,
    Continuation,
    History,
    RollbackStation,
    Route,
    Station,
)
from node.prove.compare import Comparison, Twin, compare_logits
from node.prove.cuts import Cut, read_cut, read_pack
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
    pieces,
    replay,
    run_calls,
    single_calls,
    state_digest,
    token_stream,
)

if TYPE_CHECKING:
    from engine import Generation, Logits, Model

#: Tokens of the session that a restore replaces, and steps that it makes meanwhile.
_USED_TOKENS: Final = 83
_USED_STEPS: Final = 8


class Reader:
    """Restores the cuts in ``folder`` and compares what they give with their twins."""

    def __init__(self, model: Model, folder: Path) -> None:
        self._model = model
        self._folder = folder
        self._routes: dict[Route, Callable[[Station, Continuation, Twin], Comparison]] = {
            Route.SNAPSHOT: self._from_snapshot,
            Route.PACK: self._from_pack,
            Route.TILES: self._from_tiles,
            Route.USED: self._over_used,
        }

    def control(self, history: History) -> Comparison:
        """The control's session once more: no cache, another process."""
        twin = Twin.read(self._folder / CONTROL_FILE)
        session = live_session(self._model, history)
        return replay(self._model, session, twin).at("in another process")

    def restore(self, station: Station, route: Route, kind: Continuation) -> Comparison:
        """Restore a cut one way and go on one way.

        Raises:
            KvpackError: The cut was refused.
            OSError: It is not there.
        """
        twin = Twin.read(self._folder / twin_file(station, kind))
        return self._routes[route](station, kind, twin)

    def rollback(self, station: RollbackStation, count: int, kept: int) -> Comparison:
        """Restore a cut, compute a block, take back all but its first tokens, and go on.

        Raises:
            KvpackError: The cut or the block was refused.
            OSError: It is not there.
        """
        model = self._model
        twin = Twin.read(self._folder / kept_file(station, count, kept))
        block = (self._folder / block_file(station, count)).read_bytes()
        cut = read_cut(self._folder / cut_file(station), model)
        session = self._install(cut)
        checkpoint = session.checkpoint(count)
        logits = session.block(token_stream(model.vocab_size, count, "block"))
        if kept:
            checkpoint.accept(kept)
        else:
            checkpoint.roll_back()
        start = state_digest(session)
        found = list(single_calls(model, session, STEPS_AFTER_BLOCK, "after block"))
        compared = compare_logits(block, logits).at("in the block")
        return compared + twin.compare(start, found, state_digest(session))

    def _from_snapshot(self, station: Station, kind: Continuation, twin: Twin) -> Comparison:
        cut = read_cut(self._folder / cut_file(station), self._model)
        return replay(self._model, self._install(cut), twin, kind)

    def _from_pack(self, station: Station, kind: Continuation, twin: Twin) -> Comparison:
        cut = read_pack(self._folder / pack_file(station), self._folder, self._model)
        return replay(self._model, self._install(cut), twin, kind)

    def _from_tiles(self, station: Station, kind: Continuation, twin: Twin) -> Comparison:
        cut = read_cut(self._folder / cut_file(station), self._model)
        tiles = pieces(self._model.layout, cut.snapshot.tiles)
        return replay(self._model, self._install(cut, tiles), twin, kind)

    def _over_used(self, station: Station, kind: Continuation, twin: Twin) -> Comparison:
        """The restored session takes the place of one that was in use, and is in use still."""
        expected = list(self._used_steps(self._used_session()))
        slot = self._used_session()
        used = slot
        cut = read_cut(self._folder / cut_file(station), self._model)
        slot = self._install(cut)
        start = state_digest(slot)
        others = self._used_steps(used)
        found: list[Logits] = []
        said: list[Logits] = []
        for logits in continuation(self._model, slot, kind):
            found.append(logits)
            # In turns: neither may see a row of the other.
            said.extend(itertools.islice(others, 1))
        compared = twin.compare(start, found, state_digest(slot))
        data = b"".join(one.data for one in expected)
        return compared + compare_logits(data, said).at("the session it replaces")

    def _used_session(self) -> Generation:
        session = self._model.new_generation()
        count = min(_USED_TOKENS, self._model.layout.max_context_tokens // 2)
        run_calls(session, token_stream(self._model.vocab_size, count, "used"), [count])
        return session

    def _used_steps(self, session: Generation) -> Iterator[Logits]:
        return single_calls(self._model, session, _USED_STEPS, "used steps")

    def _install(self, cut: Cut, tiles: Iterable[Tile] | None = None) -> Generation:
        """What ``cut`` holds, from its own tiles or from ``tiles`` of the same rows."""
        installer = self._model.installer(cut.schedule.position, producer=cut.snapshot.producer)
        for tile in cut.snapshot.tiles if tiles is None else tiles:
            installer.scatter(tile)
        return installer.finish(cut.schedule)
