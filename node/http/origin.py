"""Web pages of others that would use a browser on this machine to reach the port.

A browser sends any page's request to a loopback address. Where a key is needed that helps no page;
where none is, the browser's own words are checked: ``Origin`` names the page, and ``Host`` the name
that it was told, which is not ours where a page had its own name point here.
"""

from __future__ import annotations

from collections.abc import Sequence
from http import HTTPStatus
from urllib.parse import urlsplit

from starlette.datastructures import Headers

from node.http.errors import ApiError
from node.http.options import is_loopback

#: Every page there is: the default of ``mlx_lm.server``, and here a choice.
EVERY_ORIGIN = "*"


def is_allowed(origin: str, allowed: Sequence[str]) -> bool:
    """Whether pages of ``origin`` were let in by ``--allowed-origins``."""
    return EVERY_ORIGIN in allowed or origin in allowed


def check_origin(headers: Headers, allowed: Sequence[str], scheme: str) -> None:
    """Refuse a page that is neither ours nor allowed. Who sends no ``Origin`` is no page.

    Raises:
        ApiError: 403.
    """
    origin = headers.get("origin")
    if origin is None or is_allowed(origin, allowed):
        return
    if origin != f"{scheme}://{headers.get('host', '')}":
        raise ApiError(
            HTTPStatus.FORBIDDEN, "origin_refused",
            "Origin: web pages of that origin may not call; --allowed-origins names those that may",
        )  # fmt: skip


def check_host(headers: Headers, host: str) -> None:
    """Refuse a caller that was told another name than ours: only a page can have been.

    Raises:
        ApiError: 403.
    """
    try:
        called = urlsplit(f"//{headers.get('host', '')}").hostname or ""
    except ValueError:
        called = ""
    if called != host and not is_loopback(called):
        raise ApiError(
            HTTPStatus.FORBIDDEN, "host_refused",
            f"Host: expected {host} or a loopback name, since no key is asked for",
        )  # fmt: skip
