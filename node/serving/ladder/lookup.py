"""The deepest cut of a prompt, and why there is no deeper one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvpack.errors import KvpackError
from kvpack.keys import Keyring
from kvpack.layout import Producer
from kvpack.store import CutReader, StoredCut, cut_cadence_tokens, find_deepest
from node.serving.order import MissReason

if TYPE_CHECKING:
    from kvpack.store import ObjectStore
    from node.binding import PackBinding

#: A chat template begins every prompt with the same few tokens. Fewer than that is no text.
COMMON_TOKENS: Final = 32

#: Kept cuts whose tokens are read to learn how far the prompt agrees with them.
_RIVALS_READ: Final = 4

#: What a lookup answers for cuts that are whole, and of no use to this prompt.
_NO_DAMAGE: Final = frozenset({"not_admitted", "other_tokens", "no_logits"})


@dataclass(frozen=True, slots=True, repr=False)
class Found:
    """What the store holds of a prompt.

    Attributes:
        reader: The deepest cut that can be begun from; None: there is none.
        miss: Why there is no deeper one.
    """

    reader: CutReader | None
    miss: MissReason

    @property
    def position(self) -> int:
        """Tokens of the cut."""
        return 0 if self.reader is None else self.reader.cut.position


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a lookup saw beside its answer.

    Attributes:
        damaged: A deeper cut could not be proved.
        numerics_changed: A deeper cut was computed by another build.
        agreed_tokens: So many of the prompt's first tokens some kept text begins with, as far as
            that can be told: whole blocks by name, beyond them only what was compared.
    """

    damaged: bool
    numerics_changed: bool
    agreed_tokens: int


def why(evidence: Evidence, position: int, wanted: int, cadence_tokens: int) -> MissReason:
    """Why no cut deeper than ``position`` serves a prompt.

    Args:
        evidence: What the lookup saw.
        position: Of the cut that was found, 0 for none.
        wanted: Tokens of the prompt without its last.
        cadence_tokens: Distance of two cuts of a growing text.
    """
    if position >= wanted:
        return MissReason.NONE
    if evidence.damaged:
        return MissReason.DAMAGED
    if evidence.numerics_changed:
        return MissReason.NUMERICS_CHANGED
    agreed = evidence.agreed_tokens
    if agreed <= position or (position == 0 and agreed < COMMON_TOKENS):
        return MissReason.NONE if position else MissReason.COLD
    # A ring goes back only to where it was cut. Where the whole prompt is kept text, or a cadence
    # of it is, there was a cut once, or would have been.
    if agreed >= wanted or agreed - position >= cadence_tokens:
        return MissReason.WINDOW_COLLECTED
    return MissReason.INPUT_CHANGED


def find(
    store: ObjectStore,
    binding: PackBinding,
    token_ids: tuple[int, ...],
    *,
    above: int = 0,
    refused: frozenset[bytes] = frozenset(),
    tip_of: Callable[[bytes], bytes] = lambda _: b"",
) -> Found:
    """Look for the deepest cut of ``token_ids``. Blocking; whatever is broken is a miss.

    Args:
        store: Where cuts lie.
        binding: Whose, under which key.
        token_ids: The prompt. No cut of all of it is taken: its last token is left to compute.
        above: Tokens that the caller holds: what is not deeper is not given.
        refused: Cuts that were tried and could not be read.
        tip_of: The deepest cut of the text that a cut is of; empty where that is not known.
    """
    wanted, keyring = len(token_ids) - 1, Keyring([binding.key])
    changed: list[int] = []

    def admit(cut: StoredCut) -> bool:
        if cut.position > wanted or cut.manifest.producer is not Producer.ENGINE:
            return False
        if not binding.owns(cut.manifest.numerics):
            changed.append(cut.position)
            return False
        return cut.cut_id not in refused

    found = find_deepest(store, keyring, binding.key, binding.header, token_ids, admit=admit)
    reader, deeper = None, max(above, found.position)
    try:
        if found.cut is not None and found.position > above:
            reader = CutReader(store, keyring, found.cut.cut_id)
    except KvpackError:
        # It went since it was found.
        deeper = above
    damaged = bool(refused) or any(
        miss.reason not in _NO_DAMAGE and (miss.position > deeper or not miss.cut_id)
        for miss in found.misses
    )
    if deeper >= wanted:
        return Found(reader, MissReason.NONE)
    tip = b"" if found.cut is None else tip_of(found.cut.cut_id)
    rivals = [*([tip] if tip else []), *found.rivals[:_RIVALS_READ]]
    agreed = max(
        [
            found.known_tokens,
            *(_agreed_tokens(store, keyring, rival, token_ids) for rival in rivals),
        ]
    )
    evidence = Evidence(damaged, any(position > deeper for position in changed), agreed)
    return Found(reader, why(evidence, deeper, wanted, cut_cadence_tokens(binding.layout)))


def _agreed_tokens(
    store: ObjectStore, keyring: Keyring, cut_id: bytes, token_ids: tuple[int, ...]
) -> int:
    """How far the prompt agrees with a kept text; 0 where that cannot be read."""
    try:
        return _common(CutReader(store, keyring, cut_id).token_ids(), token_ids)
    except KvpackError:
        return 0


def _common(left: tuple[int, ...], right: tuple[int, ...]) -> int:
    """Length of the common beginning: by halves, whose comparison costs next to nothing."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
