"""Who made the rows (identity), on what (numerics fingerprint), and in which calls (schedule).

Identity decides whether rows may be used at all. Numerics and schedule decide whether a
continuation may be called ``exact``. None of these is ever a path or a name somebody gave.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from kvpack import limits
from kvpack.errors import IdentityMismatchError, LayoutMismatchError, LimitError
from kvpack.layout import CacheLayout

DIGEST_BYTES = 32

#: The entry that only the numerics of mixed rows have, and its one value.
_MIXED = ("mixed_rows", "yes")


def _check_digest(field: str, value: bytes) -> None:
    if len(value) != DIGEST_BYTES:
        raise LimitError(field, f"{DIGEST_BYTES} bytes", f"{len(value)} bytes")


def _check_pairs(field: str, names: list[str]) -> None:
    limits.check_range(field, len(names), 0, limits.NAMED_VALUES_MAX, "entries")
    if names != sorted(set(names)):
        raise LimitError(field, "unique names in ascending order", "another order")
    for name in names:
        limits.check_name(f"{field}.name", name)


@dataclass(frozen=True, slots=True)
class Identity:
    """Everything whose change makes stored rows somebody else's rows.

    Attributes:
        tenant: Whose key seals the rows.
        weights_digest: 32 bytes over all weights.
        quantisation: ``"none"`` or a canonical description such as ``"affine bits=4 group=64"``.
        adapter_digest: 32 bytes; all zero where no adapter is loaded.
        tokenizer_digest: 32 bytes over the tokenizer's definition.
        chat_template_digest: 32 bytes; all zero where there is no template.
        engine_abi: The row convention (RoPE layout, window rule, dtype), not the build.
        layout: Shape, kinds, windows and RoPE of every layer.
        constants: Scalar constants of the math as ``(name, bits of an IEEE 754 double)``, by name.

    Raises:
        LimitError: A field is outside its cap.
    """

    tenant: str
    weights_digest: bytes
    quantisation: str
    adapter_digest: bytes
    tokenizer_digest: bytes
    chat_template_digest: bytes
    engine_abi: str
    layout: CacheLayout
    constants: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        for field in ("tenant", "quantisation", "engine_abi"):
            limits.check_name(field, getattr(self, field))
        for field in (
            "weights_digest", "adapter_digest", "tokenizer_digest", "chat_template_digest",
        ):  # fmt: skip
            _check_digest(field, getattr(self, field))
        _check_pairs("constants", [name for name, _ in self.constants])
        for name, bits in self.constants:
            limits.check_range(f"constants[{name}]", bits, 0, (1 << 64) - 1)


def require_same_identity(expected: Identity, found: Identity) -> None:
    """Refuse another identity, naming the first field that differs and both values.

    Raises:
        IdentityMismatchError: A field of the identity differs.
        LayoutMismatchError: The layouts differ; the field is a path such as ``layers[7].kv_heads``.
    """
    for field in dataclasses.fields(Identity):
        ours, theirs = getattr(expected, field.name), getattr(found, field.name)
        if ours == theirs:
            continue
        if field.name == "layout":
            require_same_layout(ours, theirs)
        if field.name == "constants":
            _raise_first_constant(dict(ours), dict(theirs))
        raise IdentityMismatchError(field.name, _show(ours), _show(theirs))


def require_same_layout(expected: CacheLayout, found: CacheLayout) -> None:
    """Refuse another layout, naming the first field that differs and both values.

    Raises:
        LayoutMismatchError: The field is ``encoding``, ``max_context_tokens``, ``layers`` or
            ``layers[i].FIELD``.
    """
    if len(expected.layers) != len(found.layers):
        raise LayoutMismatchError("layers", len(expected.layers), len(found.layers))
    for index, (ours, theirs) in enumerate(zip(expected.layers, found.layers, strict=True)):
        for field in dataclasses.fields(ours):
            left, right = getattr(ours, field.name), getattr(theirs, field.name)
            if left != right:
                raise LayoutMismatchError(
                    f"layers[{index}].{field.name}", _show(left), _show(right)
                )
    for name in ("encoding", "max_context_tokens"):
        left, right = getattr(expected, name), getattr(found, name)
        if left != right:
            raise LayoutMismatchError(name, _show(left), _show(right))


def _raise_first_constant(ours: dict[str, int], theirs: dict[str, int]) -> None:
    for name in sorted(set(ours) | set(theirs)):
        if ours.get(name) != theirs.get(name):
            raise IdentityMismatchError(
                f"constants[{name}]", _show_bits(ours.get(name)), _show_bits(theirs.get(name))
            )


def _show_bits(bits: int | None) -> str:
    return "absent" if bits is None else f"0x{bits:016x}"


def _show(value: object) -> object:
    if isinstance(value, bytes):
        return value.hex()[:16] + "…"
    return getattr(value, "value", value)


@dataclass(frozen=True, slots=True)
class NumericsFingerprint:
    """What decides the bits of a continuation, beyond identity and call shapes.

    Attributes:
        values: ``(name, value)`` by name: ``numerics_revision``, ``mlx``, ``mlx_lm``, ``backend``,
            ``device``, ``os``, ``dtype`` and the switches that change kernels.

    Raises:
        LimitError: A name or value is outside its cap, or names are not unique and ascending.
    """

    values: tuple[tuple[str, str], ...]

    def __post_init__(self) -> None:
        _check_pairs("numerics", [name for name, _ in self.values])
        for name, value in self.values:
            limits.check_name(f"numerics[{name}]", value)

    @property
    def is_mixed(self) -> bool:
        """Whether this is what is said of rows that not one build computed all of."""
        return _MIXED[0] in dict(self.values)

    def of_mixed_rows(self) -> NumericsFingerprint:
        """What whoever computes on this says of rows some of which others computed.

        It equals no fingerprint that anybody computes on, so wherever such rows are offered they
        go on as ``compatible`` at most. The other entries tell who wrote it down.

        Raises:
            LimitError: There is no room for one more entry.
        """
        values = dict((*self.values, _MIXED))
        return NumericsFingerprint(tuple(sorted(values.items())))

    def first_difference(self, other: NumericsFingerprint) -> tuple[str, str, str] | None:
        """``(name, ours, theirs)`` of the first value that differs, or None where equal."""
        ours, theirs = dict(self.values), dict(other.values)
        for name in sorted(set(ours) | set(theirs)):
            if ours.get(name) != theirs.get(name):
                return name, ours.get(name, "absent"), theirs.get(name, "absent")
        return None


@dataclass(frozen=True, slots=True)
class CallRun:
    """``calls`` forward calls of ``call_tokens`` tokens each, one after the other.

    A speculative block computes rows that are then rolled back. The rows that stay were computed
    in a call of the block's size all the same, so the run names that size and what was dropped.

    Attributes:
        call_tokens: Tokens of each call.
        calls: Number of calls.
        dropped_tokens: How many of each call's last rows were rolled back; above 0 only for
            speculative blocks. A block that was rolled back whole is not in the schedule.

    Raises:
        LimitError: A count is not positive, or more is dropped than a block can drop.
    """

    call_tokens: int
    calls: int
    dropped_tokens: int = 0

    def __post_init__(self) -> None:
        limits.check_range("schedule.call_tokens", self.call_tokens, 1, limits.POSITION_MAX)
        limits.check_range("schedule.calls", self.calls, 1, limits.POSITION_MAX)
        is_block = self.call_tokens <= limits.SPECULATIVE_BLOCK_TOKENS_MAX
        droppable = self.call_tokens - 1 if is_block else 0
        limits.check_range("schedule.dropped_tokens", self.dropped_tokens, 0, droppable)

    @property
    def kept_tokens(self) -> int:
        """Rows of each call that stayed."""
        return self.call_tokens - self.dropped_tokens


@dataclass(frozen=True, slots=True)
class CallSchedule:
    """How each row was computed: run-length list of forward calls from position 0.

    Equal schedules are needed for warm to equal cold bit for bit: kernels give other bits for
    other call shapes.

    Raises:
        LimitError: Too many runs.
    """

    runs: tuple[CallRun, ...] = ()

    def __post_init__(self) -> None:
        limits.check_range("schedule.runs", len(self.runs), 0, limits.SCHEDULE_RUNS_MAX)

    @property
    def position(self) -> int:
        """Tokens that all calls together computed and kept."""
        return sum(run.kept_tokens * run.calls for run in self.runs)

    def after_call(self, call_tokens: int, dropped_tokens: int = 0) -> CallSchedule:
        """The schedule with one more call of ``call_tokens`` tokens.

        Args:
            call_tokens: Tokens of the call.
            dropped_tokens: How many of its last rows were rolled back.

        Raises:
            LimitError: A count is outside its cap, or the schedule has no room for another run.
        """
        one = CallRun(call_tokens, 1, dropped_tokens)
        if self.runs and self.runs[-1] == dataclasses.replace(one, calls=self.runs[-1].calls):
            last = dataclasses.replace(one, calls=self.runs[-1].calls + 1)
            return CallSchedule((*self.runs[:-1], last))
        return CallSchedule((*self.runs, one))
