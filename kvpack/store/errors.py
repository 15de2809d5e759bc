"""What a store can answer beyond the format's own errors."""

from __future__ import annotations

from kvpack.errors import KvpackError, PublishError


class StoreError(KvpackError):
    """A store cannot do what was asked, and nothing was changed."""

    reason = "store_failed"


class NotStoredError(StoreError):
    """No object has this name. For a cache that is a miss, for a session it is a loss."""

    reason = "not_stored"

    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__(f"{name}: not in the store")


class ConflictError(StoreError):
    """The name holds other bytes. Nothing is replaced; one of the two was made wrongly."""

    reason = "conflict"

    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__(f"{name}: holds other bytes, and nothing is ever replaced")


class StoreBusyError(StoreError):
    """A collector is at work on what was asked for. Retry later."""

    reason = "store_busy"


class IntentLostError(StoreError):
    """The writer's intent expired and was closed: what it relied on may be gone. Start again."""

    reason = "intent_lost"


class StoreAwayError(StoreError):
    """The place did not answer, or said that it cannot now; retries did not help. Retry later."""

    reason = "store_away"


class StoreDeniedError(StoreError):
    """The place does not let us: no credentials, wrong ones, or ones that may not do this."""

    reason = "store_denied"


class StoreUnsafeError(StoreError):
    """The place breaks a promise that the store is built on. Nothing is kept there."""

    reason = "store_unsafe"


class StoreExtraError(StoreError):
    """What reaches such a place is not installed."""

    reason = "store_extra_missing"


class StoreFullError(PublishError):
    """The budget or the disk has no room. Nothing of what was refused is left behind.

    Attributes:
        path: Which store or file.
        needed_bytes: What was to be written.
        free_bytes: What there was room for; None where the volume does not say.
    """

    reason = "store_full"

    def __init__(self, path: str, why: str, needed_bytes: int, free_bytes: int | None) -> None:
        self.path = path
        self.needed_bytes = needed_bytes
        self.free_bytes = free_bytes
        free = "an unknown number of" if free_bytes is None else str(free_bytes)
        super().__init__(f"{path}: {why}: {needed_bytes} bytes are needed, {free} bytes are free")
