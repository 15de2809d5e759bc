"""The whole page: places with their first contents. Works without the script, as of its loading."""

from __future__ import annotations

import html
from collections.abc import Mapping
from typing import Final

from node.page.assets import ASSETS

#: No script, style, picture or connection from elsewhere; no form, no frame, nothing inline.
POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)

#: Beside the policy.
HEADERS: Final[Mapping[str, str]] = {
    "content-security-policy": POLICY,
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}

#: Ids and headings, in the order of a narrow screen; ``wide`` ones take the left column.
_SECTIONS: Final = (
    ("moves", "Moves", "wide"),
    ("slots", "Slots", "side"),
    ("memory", "Memory of a session", "wide"),
    ("sessions", "Sessions and their owners", "wide"),
    ("cache", "Cache", "side"),
    ("costs", "What kept rows save", "side"),
    ("nodes", "Nodes", "side"),
    ("refusals", "Last refusals", "side"),
)


def document(node: str, parts: Mapping[str, str]) -> str:
    """The page of ``node`` with ``parts`` in their places."""
    columns = {
        column: "".join(
            f'<section class="card {name}"><h2>{heading}</h2>'
            f'<div id="{name}">{parts[name]}</div></section>'
            for name, heading, where in _SECTIONS
            if where == column
        )
        for column in ("wide", "side")
    }
    title = html.escape(node)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title} - kvpack</title>
<link rel="icon" href="{ASSETS["icon.svg"].url}" type="image/svg+xml">
<link rel="stylesheet" href="{ASSETS["page.css"].url}">
<script src="{ASSETS["page.js"].url}" defer></script>
<noscript><meta http-equiv="refresh" content="5"></noscript>
</head>
<body data-link="first">
<header>
<h1>{title}</h1><div id="health" role="status">{parts["health"]}</div>
<p class="live">Live</p>
<p id="facts">{parts["facts"]}</p>
<p class="lost" role="alert">Not connected: shown as of <span id="seen">its loading</span>.</p>
</header>
<main>
<div id="tiles">{parts["tiles"]}</div>
<div class="columns"><div>{columns["wide"]}</div><div>{columns["side"]}</div></div>
</main>
</body>
</html>
"""
