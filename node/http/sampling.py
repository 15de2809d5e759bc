"""How tokens are chosen: the fields of OpenAI's and of mlx_lm.server's requests, as one state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import msgspec

from node.http.errors import bad_request, unsupported
from node.serving.options import AnswerDefaults

if TYPE_CHECKING:
    from engine import DecodingState

#: Last tokens that penalties look at where the request does not say: what mlx_lm.server has.
PENALTY_WINDOW_TOKENS: Final = 20

_U64: Final = 1 << 64
_I64_MIN: Final = -(1 << 63)


class Sampling(msgspec.Struct):
    """The fields; None is the node's default."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    repetition_context_size: int | None = None
    presence_penalty: float | None = None
    presence_context_size: int | None = None
    frequency_penalty: float | None = None
    frequency_context_size: int | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None


def decoding_of(
    sampling: Sampling, defaults: AnswerDefaults, token_ids: Sequence[int]
) -> DecodingState:
    """The state before the first choice after ``token_ids``, which penalties look at, too.

    Raises:
        ApiError: A field contradicts another, or is of no use.
        LimitError: A number is outside its range; names it.
    """
    from engine import DecodingState, SamplerState, SamplingParameters, TextStream
    from engine.sampling_random import RandomStream

    parameters = SamplingParameters(
        temperature=_either(sampling.temperature, defaults.temperature),
        top_k=defaults.top_k if sampling.top_k is None else sampling.top_k,
        top_p=_either(sampling.top_p, defaults.top_p),
        min_p=_either(sampling.min_p, defaults.min_p),
        # mlx_lm.server writes 0 for "no penalty".
        repetition_penalty=sampling.repetition_penalty or 1.0,
        presence_penalty=sampling.presence_penalty or 0.0,
        frequency_penalty=sampling.frequency_penalty or 0.0,
        penalty_window_tokens=_penalty_window(sampling),
        logit_bias=_logit_bias(sampling.logit_bias or {}),
    )
    random = (
        RandomStream.fresh()
        if sampling.seed is None
        else RandomStream.from_seed(_seed(sampling.seed))
    )
    stops = (sampling.stop,) if isinstance(sampling.stop, str) else tuple(sampling.stop or ())
    sampler = SamplerState(parameters, random).observe(token_ids)
    return DecodingState(sampler, TextStream(stops))


def _either(given: float | None, default: float) -> float:
    return default if given is None else given


def _seed(seed: int) -> int:
    """Clients draw signed 64-bit numbers, too: each has a stream of its own."""
    if not _I64_MIN <= seed < _U64:
        raise bad_request("seed: expected a 64-bit number", param="seed", code="invalid_value")
    return seed % _U64


def _penalty_window(sampling: Sampling) -> int:
    """One window for all penalties that are in force."""
    windows = {
        PENALTY_WINDOW_TOKENS if size is None else size
        for penalty, size in (
            (sampling.repetition_penalty not in (None, 0.0, 1.0), sampling.repetition_context_size),
            (bool(sampling.presence_penalty), sampling.presence_context_size),
            (bool(sampling.frequency_penalty), sampling.frequency_context_size),
        )
        if penalty
    }
    if len(windows) > 1:
        raise unsupported("repetition_context_size", "expected one size for all penalties")
    return windows.pop() if windows else PENALTY_WINDOW_TOKENS


def _logit_bias(bias: dict[str, float]) -> tuple[tuple[int, float], ...]:
    try:
        pairs = {int(token): value for token, value in bias.items()}
    except ValueError:
        raise bad_request(
            "logit_bias: expected token ids as keys", param="logit_bias", code="invalid_value"
        ) from None
    return tuple(sorted(pairs.items()))
