"""What an S3 service answers when it fails, as one clear error that names the store.

``obstore`` gives text alone, which holds the request's URL and the answer's body. Of that only the
status and the service's own code word go on, and the cause is not chained: a body may repeat whom
the request spoke for.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from kvpack.store.errors import StoreAwayError, StoreDeniedError, StoreError, StoreFullError

_STATUS: Final = re.compile(r"status code: (\d{3})")
_CODE: Final = re.compile(r"<Code>([A-Za-z0-9.]{1,64})</Code>")
#: Requests that ask this machine, or the token service, who we are.
_CREDENTIALS: Final = re.compile(
    r"performing [A-Z]+ https?://(169\.254\.\d+\.\d+|sts\.[a-z0-9.-]*amazonaws\.com)[/:]"
)

_NO_CREDENTIALS: Final = "no credentials: neither environment nor files nor this machine give any"

_FULL: Final = frozenset({"QuotaExceeded", "InsufficientStorage", "ServiceQuotaExceededException"})
_AGAIN: Final = frozenset({"SlowDown", "RequestTimeout", "InternalError", "ServiceUnavailable"})
_SKEWED: Final = "RequestTimeTooSkewed"


@dataclass(frozen=True, slots=True)
class Trouble:
    """One failed request.

    Attributes:
        status: HTTP status; 0: no answer, or half of one.
        code: The service's own word; may be empty.
        hint: Where there was no answer: what was waited for.
    """

    status: int
    code: str
    hint: str = ""

    @classmethod
    def of(cls, error: Exception) -> Trouble:
        """Read what ``obstore`` says."""
        text = str(error)
        if _CREDENTIALS.search(text):
            return cls(0, "", _NO_CREDENTIALS)
        status, code = _STATUS.search(text), _CODE.search(text)
        if status is None:
            return cls(0, code[1] if code else "", _hint(text))
        return cls(int(status[1]), code[1] if code else "")

    @property
    def is_passing(self) -> bool:
        """Whether the same request may succeed a little later."""
        if self.hint == _NO_CREDENTIALS:
            return False
        return self.status in (0, 429) or self.status >= 500 or self.code in _AGAIN

    @property
    def is_ambiguous(self) -> bool:
        """Whether the request may have been carried out all the same."""
        return self.status == 0 or self.status >= 500

    def error(self, place: str) -> StoreError | StoreFullError:
        """As what callers know."""
        if self.code in _FULL or self.status == 507:
            return StoreFullError(place, f"the service answers {self._words}", 0, None)
        if self.status in (401, 403):
            clock = ": this machine's clock is wrong" if self.code == _SKEWED else ""
            return StoreDeniedError(f"{place}: the service answers {self._words}{clock}")
        if self.hint == _NO_CREDENTIALS:
            return StoreDeniedError(f"{place}: {self.hint}")
        if self.is_passing:
            answer = f"answers {self._words}" if self.status else self.hint
            return StoreAwayError(f"{place}: the service {answer}; nothing more is tried")
        return StoreError(f"{place}: the service answers {self._words}")

    @property
    def _words(self) -> str:
        return f"{self.status} ({self.code})" if self.code else str(self.status)


def _hint(text: str) -> str:
    """Why there was no answer, in words of our own."""
    for mark, words in (
        ("Connect", "cannot be reached"),
        ("TimedOut", "does not answer in time"),
        ("Timeout", "does not answer in time"),
    ):
        if mark in text:
            return words
    return "breaks off in the middle of its answer"
