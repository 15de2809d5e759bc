"""How much one tenant may have under way and may compute: shares of a node that several use."""

from __future__ import annotations

import collections
import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final

from node.http.errors import ApiError
from node.http.limits import IN_FLIGHT_MAX

_MINUTE_S: Final = 60.0

#: Tenants whose use is remembered; the one that was longest away is forgotten.
TENANTS_MAX: Final = 1024


@dataclass(slots=True)
class _Use:
    in_flight: int = 0
    owed_tokens: float = 0.0
    seen_s: float = 0.0


class Quotas:
    """Counts what tenants have. Tokens flow off evenly: so many a minute.

    Args:
        calls: Calls of one tenant that may be under way at once.
        tokens_per_minute: Tokens computed, of prompts and answers; None: as many as it gets.
        now_s: A clock that never goes back.
    """

    def __init__(
        self,
        calls: int = IN_FLIGHT_MAX,
        tokens_per_minute: int | None = None,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._calls = calls
        self._tokens_per_minute = tokens_per_minute
        self._now_s = now_s
        self._uses: collections.OrderedDict[str, _Use] = collections.OrderedDict()

    @contextlib.contextmanager
    def admitted(self, tenant: str) -> Iterator[None]:
        """One call of ``tenant``, for as long as the block runs.

        Raises:
            ApiError: 429: it has as many as it may, or has computed as much as it may.
        """
        use = self._use(tenant)
        if use.in_flight >= self._calls:
            raise _too_many(f"{use.in_flight} calls are under way, as many as a tenant may have", 1)
        per_minute = self._tokens_per_minute
        if per_minute is not None and use.owed_tokens >= per_minute:
            wait_s = (use.owed_tokens - per_minute + 1) * _MINUTE_S / per_minute
            raise _too_many(f"{per_minute} tokens a minute are used up", wait_s)
        use.in_flight += 1
        try:
            yield
        finally:
            use.in_flight -= 1

    def spend(self, tenant: str, tokens: int) -> None:
        """``tenant`` has had so many tokens computed."""
        if self._tokens_per_minute is not None:
            self._use(tenant).owed_tokens += tokens

    def _use(self, tenant: str) -> _Use:
        use = self._uses.setdefault(tenant, _Use(seen_s=self._now_s()))
        self._uses.move_to_end(tenant)
        now_s = self._now_s()
        if self._tokens_per_minute is not None:
            flown = (now_s - use.seen_s) * self._tokens_per_minute / _MINUTE_S
            use.owed_tokens = max(0.0, use.owed_tokens - flown)
        use.seen_s = now_s
        if len(self._uses) > TENANTS_MAX:
            oldest = next(iter(self._uses))
            if not self._uses[oldest].in_flight:
                del self._uses[oldest]
        return use


def _too_many(why: str, after_s: float) -> ApiError:
    return ApiError(
        HTTPStatus.TOO_MANY_REQUESTS, "rate_limit_exceeded", why,
        headers={"Retry-After": str(max(1, round(after_s)))},
    )  # fmt: skip
