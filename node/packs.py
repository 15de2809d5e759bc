"""Sessions as packs: the manifest of a cut, a whole pack on disk, and the way back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvpack.chunk import ChunkClass, ChunkReference
from kvpack.errors import LayoutMismatchError
from kvpack.identity import CallSchedule
from kvpack.layout import Producer
from kvpack.manifest import (
    Component,
    ComponentKind,
    KnownReferences,
    Manifest,
    seal_manifest,
)
from kvpack.snapshot import SessionCacheSnapshot
from node.binding import PackBinding
from node.errors import SessionStateError
from node.state import encode_sampler, encode_state

if TYPE_CHECKING:
    from node.session import Session


@dataclass(frozen=True, slots=True)
class SavedPack:
    """A pack that was published: where, how large, and of which cut."""

    path: Path
    file_bytes: int
    position: int


@dataclass(frozen=True, slots=True, repr=False)
class SessionCut:
    """Everything of a session at one position, as an immutable value.

    Attributes:
        snapshot: Rows and token ids.
        states: Plaintext of the SESSION and SAMPLER chunks.
        schedule: The calls that computed the rows.
        mixed: They are not all this node's own.
    """

    snapshot: SessionCacheSnapshot
    states: Mapping[ChunkClass, bytes]
    schedule: CallSchedule
    mixed: bool


def manifest_blob(
    binding: PackBinding,
    position: int,
    schedule: CallSchedule,
    references: tuple[ChunkReference, ...] | KnownReferences,
    *,
    mixed: bool,
) -> bytes:
    """The sealed manifest of a cut of this node; ``mixed``: not all of its rows are its own."""
    known, named = None, references
    if isinstance(named, KnownReferences):
        known, named = named, named.references
    component = Component(ComponentKind.TARGET, binding.context.identity_digest)
    manifest = Manifest(
        producer=Producer.ENGINE,
        position=position,
        numerics=binding.stated(mixed=mixed),
        schedule=schedule,
        references=named,
        components=(component,),
    )
    return seal_manifest(binding.key, binding.header_bytes, manifest, known=known)


def require_engine_rows(manifest: Manifest) -> None:
    """Refuse rows that no engine computed: they would be continued, and saved, as if one had.

    Raises:
        LayoutMismatchError: The manifest names another producer.
    """
    if manifest.producer is not Producer.ENGINE:
        raise LayoutMismatchError("producer", Producer.ENGINE.value, manifest.producer.value)


def cut_session(session: Session) -> SessionCut:
    """The session at its present position. Runs on the engine thread.

    Raises:
        SessionStateError: Nothing is computed yet.
    """
    position = session.position
    if not 0 < position < session.next_index:
        raise SessionStateError(
            f"session {session.session_id}: nothing to save: {position} tokens are computed"
        )
    generation = session.generation
    snapshot = generation.snapshot(session.token_ids[:position])
    states = state_bytes(session, position)
    return SessionCut(snapshot, states, generation.schedule, generation.is_mixed)


def state_bytes(session: Session, cut: int) -> dict[ChunkClass, bytes]:
    """Plaintext of the SESSION and SAMPLER chunks of a session that stands at ``cut``."""
    return {
        ChunkClass.SESSION: encode_state(session.state(cut)),
        ChunkClass.SAMPLER: encode_sampler(session.decoding),
    }
