"""From a request to an order for the slots, and from what came of it to the body of an answer."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec
from starlette.responses import Response

from node.chat.policy import Budget, Policy
from node.http.errors import bad_request
from node.serving.order import MissReason, RunOrder, RunUsage, TokenLogprob
from node.serving.serving import Serving

if TYPE_CHECKING:
    from engine import DecodingState

#: The part of a context that is kept free for an answer at most, however long it may become: who
#: asks for more than the context holds gets what is left of it.
RESERVE_SHARE: Final = 4

#: The part of a context that a shift drops at least, so that not every turn makes another one.
STEP_SHARE: Final = 4

#: What stands in JSON for a probability of zero, which has no logarithm.
_NO_LOGPROB: Final = -9999.0


def new_id(prefix: str) -> str:
    """A name that nobody can guess: ``prefix-…``."""
    return f"{prefix}-{secrets.token_hex(12)}"


def max_tokens_of(serving: Serving, *given: int | None) -> int:
    """Tokens that an answer may have: the first number given, or the node's default.

    Raises:
        ApiError: Below 1.
    """
    asked = next((number for number in given if number is not None), None)
    if asked is not None and asked < 1:
        raise bad_request(
            f"max_tokens: expected 1 or more, found {asked}", param="max_tokens",
            code="invalid_value",
        )  # fmt: skip
    return serving.options.answer.max_tokens if asked is None else asked


def budget_of(serving: Serving, max_tokens: int, policy: Policy | None = None) -> Budget:
    """Room for a prompt before an answer of up to ``max_tokens``.

    Args:
        serving: The node.
        max_tokens: Of the answer. More than a quarter of the context is not kept free for it.
        policy: What happens to what is longer; None: what the node was told.
    """
    limit = serving.facts.max_context
    chosen = Policy(serving.options.context_policy.value) if policy is None else policy
    return Budget(
        limit, min(max_tokens, max(1, limit // RESERVE_SHARE)), chosen, limit // STEP_SHARE
    )


def order_of(
    serving: Serving,
    tenant: str,
    token_ids: Sequence[int],
    decoding: DecodingState,
    max_tokens: int,
    *,
    top_logprobs: int | None = None,
    reuse: bool = True,
    ends: bool = True,
    shifted: bool = False,
) -> RunOrder:
    """An order for an answer after ``token_ids``, which leave room for at least one token."""
    room = serving.facts.max_context - len(token_ids)
    return RunOrder(
        tenant,
        tuple(token_ids),
        decoding,
        max(1, min(max_tokens, room)),
        serving.engine.model.end_token_ids if ends else frozenset(),
        top_logprobs,
        reuse=reuse,
        shifted=shifted,
    )


def json_response(body: dict[str, Any]) -> Response:
    """A whole answer. With logprobs it has megabytes, and others wait for the loop meanwhile."""
    return Response(msgspec.json.encode(body), media_type="application/json")


def usage_body(usage: RunUsage) -> dict[str, Any]:
    """``usage`` of chat and completions. Its counts do not depend on what was cached."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def reuse_body(usage: RunUsage, dropped_turns: int = 0) -> dict[str, Any]:
    """The field ``kvpack`` of an answer: what of the prompt was not computed again, and why not."""
    body: dict[str, Any] = {
        "rung": usage.rung.value,
        "cached_tokens": usage.cached_tokens,
        "evaluated_tokens": usage.evaluated_tokens,
        "restored_bytes": usage.restored_bytes,
        "dropped_turns": dropped_turns,
        "queued_s": round(usage.queued_s, 6),
        "first_token_s": round(usage.first_token_s, 6),
    }
    if usage.miss is not MissReason.NONE:
        body["miss"] = usage.miss.value
    if usage.fallback.value != "none":
        body["prefill_fallback"] = usage.fallback.value
    return body


def spent_tokens(usage: RunUsage) -> int:
    """What an answer counts against its tenant's quota: what was computed for it."""
    return usage.evaluated_tokens + usage.completion_tokens


class Spelling:
    """Tokens as text, for logprobs."""

    def __init__(self, serving: Serving) -> None:
        self._token_bytes = serving.token_bytes

    def entry(self, logprob: TokenLogprob) -> dict[str, Any]:
        """As chat's clients read it."""
        top = [self._one(token, value) for token, value in logprob.top]
        return self._one(logprob.token_id, logprob.logprob) | {"top_logprobs": top}

    def text(self, token_id: int) -> str:
        """The token alone; half a character is U+FFFD, its bytes are beside it."""
        return self._token_bytes(token_id).decode(errors="replace")

    def _one(self, token_id: int, logprob: float) -> dict[str, Any]:
        spelled = self._token_bytes(token_id)
        return {
            "token": spelled.decode(errors="replace"),
            "logprob": finite(logprob),
            "bytes": list(spelled),
        }


def finite(logprob: float) -> float:
    """``logprob`` as JSON can say it."""
    return max(logprob, _NO_LOGPROB)
