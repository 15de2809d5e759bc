"""What ``kvnode economics`` shows: an answer that was checked, and the table of it."""

from __future__ import annotations

import json
import re
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from http.client import HTTPException
from typing import Any, Final
from urllib.parse import urlsplit

from node.errors import PeerAnswerError, PeerUnavailableError, UsageError

PATH: Final = "/kvpack/economics"
NOT_MEASURED: Final = "not measured"

#: A node remembers 256 cuts, at some 300 bytes each.
ANSWER_BYTES_MAX: Final = 1 << 20
ANSWER_S: Final = 30.0

#: Beyond any number of tokens, bytes or seconds; within it every number can be written.
_NUMBER_MAX: Final = 1 << 60

_CUT: Final = re.compile(r"(?:[0-9a-f]{2}){1,64}")
_TIER: Final = re.compile(r"[a-z]{1,16}")

_HEAD: Final = ("cut", "tokens", "bytes", "prefill s", "restore s", "from", "times", "ratio")


def fetch(url: str, key: str) -> dict[str, Any]:
    """Ask the node at ``url``.

    Args:
        url: ``http://HOST:PORT`` or ``https://``.
        key: Of an administrator; empty: the node needs none.

    Raises:
        UsageError: Not such a URL.
        PeerUnavailableError: Nobody answers there.
        PeerAnswerError: The node refuses, or what answers is no node of this release.
    """
    request = urllib.request.Request(_place(url) + PATH)  # noqa: S310 - checked
    if key:
        request.add_header("Authorization", f"Bearer {key}")
    # No proxy of the environment: it would be told the key.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _Stay)
    try:
        with opener.open(request, timeout=ANSWER_S) as answer:
            body = answer.read(ANSWER_BYTES_MAX + 1)
    except urllib.error.HTTPError as error:
        raise _refusal(url, error) from None
    except (OSError, HTTPException, ssl.SSLError) as error:
        why = getattr(error, "reason", error)
        raise PeerUnavailableError(f"{url}: nobody answers there: {why}") from error
    if len(body) > ANSWER_BYTES_MAX:
        raise _no_answer(url, f"expected at most {ANSWER_BYTES_MAX} bytes")
    return _checked(url, body)


def table(cuts: list[dict[str, Any]]) -> str:
    """One line for each cut and tier, the deepest first; what was not measured says so."""
    lines = [_HEAD, *(line for cut in cuts for line in _lines(cut))]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def _lines(cut: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    prefill, tokens = cut["prefill"], cut["tokens"]
    whole = prefill is not None and prefill["computed_tokens"] == tokens
    taken = f"{prefill['wall_s']:.3f}" if whole else NOT_MEASURED
    first = (cut["cut"][:12], f"{tokens:,}", f"{cut['state_bytes']:,}", taken)
    if not cut["restores"]:
        yield (*first, NOT_MEASURED, "-", "0", "-")
    for one in cut["restores"]:
        ratio = one["of_prefill"]
        said = "-" if ratio is None else f"{ratio:.4f}"
        yield (*first, f"{one['median_s']:.3f}", one["tier"], str(one["count"]), said)


class _Stay(urllib.request.HTTPRedirectHandler):
    """A key is sent to the place that was named, and to no other."""

    def redirect_request(self, *_: object, **__: object) -> None:
        return None


def _place(url: str) -> str:
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        usable = False
    try:
        # As the name is looked up. Labels that are too long or missing are none of a host.
        usable = usable and url.isascii() and url.isprintable() and " " not in url
        usable = bool(usable and (parts.hostname or "").encode("idna"))
    except UnicodeError:
        usable = False
    if not usable or parts.path not in ("", "/") or parts.query or parts.username is not None:
        raise UsageError(f"--url {url[:100]!r}: expected http://HOST:PORT or https://HOST:PORT")
    return f"{parts.scheme}://{parts.netloc}"


def _refusal(url: str, error: urllib.error.HTTPError) -> PeerAnswerError:
    try:
        with error:
            said = json.loads(error.read(ANSWER_BYTES_MAX))["error"]
        return PeerAnswerError(str(said["code"])[:64], f"{url}: {str(said['message'])[:300]}")
    except (OSError, HTTPException, ValueError, LookupError, TypeError, RecursionError):
        return _no_answer(url, f"expected its times, found HTTP status {error.code}")


def _no_answer(url: str, what: str) -> PeerAnswerError:
    return PeerAnswerError("no_node", f"{url}: no node of this release: {what}")


def _checked(url: str, body: bytes) -> dict[str, Any]:
    """The answer, with every field that is shown in its place and of its kind."""
    try:
        answer = json.loads(body)
        for cut in answer["cuts"]:
            if not _CUT.fullmatch(cut["cut"]):
                raise ValueError("cut")
            numbers = [cut["tokens"], cut["state_bytes"]]
            if cut["prefill"] is not None:
                numbers += [cut["prefill"][name] for name in ("computed_tokens", "wall_s")]
            for one in cut["restores"]:
                numbers += [one["count"], one["median_s"]]
                numbers += [] if one["of_prefill"] is None else [one["of_prefill"]]
                if not _TIER.fullmatch(one["tier"]):
                    raise ValueError("tier")
            if not all(type(n) in (int, float) and 0 <= n <= _NUMBER_MAX for n in numbers):
                raise ValueError("number")
    except (ValueError, LookupError, TypeError, RecursionError):
        raise _no_answer(url, "expected times of cuts, found something else") from None
    found: dict[str, Any] = answer
    return found
