"""``GET /v1/models``: the one model that this node serves."""

from __future__ import annotations

from typing import Any

from starlette.responses import JSONResponse

from node.http.access import Access, Answer, Call, Endpoint
from node.http.errors import ApiError, not_found
from node.serving.serving import ModelFacts

#: What mlx_lm.server's clients send for "the one that is loaded".
DEFAULT_MODEL = "default_model"


def routes() -> list[Endpoint]:
    """Of this module."""
    return [
        Endpoint("/v1/models", "GET", Access.TENANT, list_models),
        Endpoint("/models", "GET", Access.TENANT, list_models),
        Endpoint("/v1/models/{model:path}", "GET", Access.TENANT, get_model),
    ]


async def list_models(call: Call) -> Answer:
    """A list of one."""
    return JSONResponse({"object": "list", "data": [model_object(call.serving.facts)]})


async def get_model(call: Call) -> Answer:
    """That one, by its name."""
    facts = call.serving.facts
    if call.request.path_params["model"] not in facts.names:
        raise _unknown(facts)
    return JSONResponse(model_object(facts))


def model_object(facts: ModelFacts) -> dict[str, Any]:
    """As OpenAI's clients read it; ``context_length`` is what other local servers add."""
    return {
        "id": facts.name,
        "object": "model",
        "created": facts.created_s,
        "owned_by": "kvpack",
        "context_length": facts.max_context,
    }


def check_model(facts: ModelFacts, asked: str | None) -> str:
    """The model's name, if ``asked`` means it: its name, its path, ``default_model`` or nothing.

    Raises:
        ApiError: 404 ``model_not_found``: the answer of another model would be another answer.
    """
    if asked in (None, "", DEFAULT_MODEL, *facts.names):
        return facts.name
    raise _unknown(facts)


def _unknown(facts: ModelFacts) -> ApiError:
    return not_found(
        f"model: this node serves {facts.name} alone", param="model", code="model_not_found"
    )
