"""Whether this node may be given work, in one word, and why not."""

from __future__ import annotations

import enum
import logging

from engine.errors import CacheDiscontinuity, TornGenerationError
from kvpack.errors import KvpackError
from node.errors import DrainingError, UnhealthyError

log = logging.getLogger(__name__)


class HealthState(enum.Enum):
    """What a load balancer asks."""

    LOADING = "loading"
    OK = "ok"
    DRAINING = "draining"
    UNHEALTHY = "unhealthy"  # until restart


def leaves_uncertain(error: BaseException) -> bool:
    """Whether the engine's state is uncertain after a call that ended with ``error``.

    Our own errors are raised before anything was changed, but for those of a call that stopped
    half way. Of what another library raised nobody knows what it left.
    """
    if isinstance(error, TornGenerationError | CacheDiscontinuity):
        return True
    return not isinstance(error, KvpackError)


class Health:
    """One node's. Only :meth:`latch` is final.

    Attributes:
        state: The word.
        why: What was latched; empty before. No text, no tokens.
    """

    def __init__(self) -> None:
        self.state = HealthState.LOADING
        self.why = ""

    def ready(self) -> None:
        """The model is loaded."""
        if self.state is HealthState.LOADING:
            self.state = HealthState.OK

    def drain(self) -> None:
        """The node is about to stop."""
        if self.state is not HealthState.UNHEALTHY:
            self.state = HealthState.DRAINING

    def latch(self, error: BaseException) -> None:
        """A call ended with ``error`` and left the engine in a state that nobody knows."""
        if self.state is HealthState.UNHEALTHY:
            return
        # The class alone: what a library's sentence holds is not known to be free of text.
        self.state, self.why = HealthState.UNHEALTHY, type(error).__name__
        log.error("unhealthy until restart: an engine call ended with %s", self.why)

    def require(self) -> None:
        """Refuse work that this node cannot do.

        Raises:
            DrainingError: It is about to stop, or has not begun.
            UnhealthyError: It was latched.
        """
        if self.state is HealthState.UNHEALTHY:
            raise self.unhealthy()
        if self.state is not HealthState.OK:
            raise DrainingError(f"this node is {self.state.value}: it takes no new work")

    def unhealthy(self) -> UnhealthyError:
        """What everybody is told once it was latched."""
        return UnhealthyError(f"an engine call ended with {self.why}; restart this node")
