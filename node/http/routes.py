"""All routes there are. A route that is not in this list does not exist."""

from __future__ import annotations

from typing import Final

from node.http import (
    chat,
    completions,
    conversations,
    economics,
    health,
    metrics,
    models,
    page,
    responses,
    sessions,
    slots,
)
from node.http.access import Endpoint

ENDPOINTS: Final[tuple[Endpoint, ...]] = (
    *health.routes(),
    *models.routes(),
    *chat.routes(),
    *completions.routes(),
    *responses.routes(),
    *conversations.routes(),
    *metrics.routes(),
    *economics.routes(),
    *page.routes(),
    *sessions.routes(),
    *slots.routes(),
)
