"""A session's cut, brought back: rows, tokens, and what else it was."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvpack.chunk import ChunkClass
from kvpack.errors import KvpackError
from kvpack.keys import Keyring
from kvpack.store import CutReader
from node.errors import ConsentError, InventoryError
from node.serving.order import MissReason, Rung
from node.serving.reuse import Base
from node.session import Session
from node.state import SessionState, decode_sampler, decode_state

if TYPE_CHECKING:
    from engine import DecodingState, Generation
    from kvpack.store import ObjectStore
    from node.binding import PackBinding
    from node.directory import OwnershipToken
    from node.serving.ladder.line import CutGrid


@dataclass(frozen=True, slots=True, repr=False)
class SessionText:
    """What a session's cut says beside its rows.

    Attributes:
        reader: The cut.
        token_ids: All known tokens, the pending one included. The user's text.
        state: What the session is.
        decoding: How its next token is chosen.
    """

    reader: CutReader
    token_ids: tuple[int, ...]
    state: SessionState
    decoding: DecodingState


@dataclass(frozen=True, slots=True, repr=False)
class Woken:
    """A session as it was at a cut.

    Attributes:
        cut_id: The cut.
        generation: Its rows; detached.
        token_ids: All known tokens, the pending one included. The user's text.
        state: What the session is.
        decoding: How its next token is chosen.
        restored_bytes: Plaintext brought back, from the manifest.
        grid: What of it is sealed already.
    """

    cut_id: bytes
    generation: Generation
    token_ids: tuple[int, ...]
    state: SessionState
    decoding: DecodingState
    restored_bytes: int
    grid: CutGrid

    @property
    def position(self) -> int:
        """Tokens computed."""
        return self.generation.position

    @property
    def base(self) -> Base:
        """Where the session begins, for the trail of its cuts to come."""
        return Base(
            self.generation, self.position, Rung.DURABLE, MissReason.NONE, self.restored_bytes,
            grid=self.grid, exact=not self.generation.is_mixed,
        )  # fmt: skip

    def session(self, session_id: str, token: OwnershipToken, vocab_size: int) -> Session:
        """The session, owned by ``token``."""
        session = Session(
            session_id, token, self.generation, self.token_ids, vocab_size, self.decoding
        )
        session.restore(self.state)
        return session


def read_session(store: ObjectStore, binding: PackBinding, cut_id: bytes) -> SessionText:
    """Read what is no rows. Blocking.

    Raises:
        NotStoredError: The cut, or a chunk of it, is gone.
        InventoryError: It is no session's cut.
        KvpackError: It is damaged, or another tenant's or model's.
    """
    reader = CutReader(store, Keyring([binding.key]), cut_id)
    if reader.cut.header.identity_digest != binding.header.identity_digest:
        raise InventoryError("cut: another model's")
    state = decoding = None
    for reference in reader.references(ChunkClass.SESSION):
        state = decode_state(reader.open(reference).plaintext)
    for reference in reader.references(ChunkClass.SAMPLER):
        decoding = decode_sampler(reader.open(reference).plaintext)
    if state is None or decoding is None:
        raise InventoryError("cut: no session's")
    return SessionText(reader, (*reader.token_ids(), state.pending_token), state, decoding)


def require_same_numerics(text: SessionText, binding: PackBinding) -> None:
    """Refuse rows of another build: they would go on as ``compatible``.

    Raises:
        ConsentError: Names what differs.
    """
    numerics = text.reader.cut.manifest.numerics
    different = binding.numerics.first_difference(numerics)
    if different is not None:
        name, ours, theirs = different
        raise ConsentError(f"cut: numerics[{name}] is {theirs}, here {ours}")


def is_session_cut(store: ObjectStore, binding: PackBinding, cut_id: bytes) -> bool:
    """Whether a session can be woken from the cut. Blocking."""
    try:
        reader = CutReader(store, Keyring([binding.key]), cut_id)
    except KvpackError:
        return False
    return any(reader.references(ChunkClass.SESSION))
