"""All routes there are. A route that is not in this list does not exist."""

from __future__ import annotations

from typing import Final

from node.http import chat, health, metrics, models, page, sessions
from node.http.access import Endpoint

ENDPOINTS: Final[tuple[Endpoint, ...]] = (
    *health.routes(),
    *models.routes(),
    *chat.routes(),
    *metrics.routes(),
    *page.routes(),
    *sessions.routes(),
)
