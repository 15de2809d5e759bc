"""What a sampler carries from token to token, as one value that can travel."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from engine.logits import Logits
from engine.sampling import (
    LOGIT_BIAS_ENTRIES_MAX,
    PENALTY_WINDOW_TOKENS_MAX,
    Distribution,
    SamplingParameters,
    distribution,
)
from engine.sampling_random import KEY_BYTES, RandomStream
from engine.sampling_record import RecordReader, RecordWriter
from kvpack.limits import TOKEN_ID_MAX, check_range

_MAGIC: Final = b"kvSA"
_VERSION: Final = 1


@dataclass(frozen=True, slots=True, repr=False)
class SamplerState:
    """Parameters, random stream and recent tokens: all that decides the next choice.

    A value: choosing returns the token and the state after it, so a round that is cancelled leaves
    the state it began with. It holds user text (the history) and the key of numbers to come, so it
    leaves the process sealed or not at all.

    Continuing from equal states over equal logits chooses equal tokens. The numbers of the stream
    are the same on every machine; ``exp`` may differ in its last bit between math libraries, which
    matters only where a number falls that close to an edge.

    Attributes:
        parameters: How tokens are chosen.
        stream: Where the random numbers come from. Greedy choices take none.
        history: The last ``parameters.history_tokens`` tokens at most, oldest first.

    Raises:
        LimitError: The history is longer than the parameters look at, or holds no token id.
    """

    parameters: SamplingParameters
    stream: RandomStream
    history: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        window = self.parameters.history_tokens
        check_range("sampler.history", len(self.history), 0, window, "tokens")
        for token in self.history:
            check_range("sampler.history.token_id", token, 0, TOKEN_ID_MAX)

    def __repr__(self) -> str:
        return f"SamplerState({self.parameters!r}, {self.stream!r})"

    @classmethod
    def greedy(cls) -> SamplerState:
        """Always the largest logit. The stream is never used."""
        return cls(SamplingParameters(temperature=0.0), RandomStream(bytes(KEY_BYTES)))

    @classmethod
    def begin(
        cls, parameters: SamplingParameters, seed: int | None = None, prompt: Sequence[int] = ()
    ) -> SamplerState:
        """The state after ``prompt`` and before the first choice; without a seed unpredictable.

        Raises:
            LimitError: ``seed`` is no u64, or the prompt holds no token id.
        """
        stream = RandomStream.fresh() if seed is None else RandomStream.from_seed(seed)
        return cls(parameters, stream).observe(prompt)

    def observe(self, token_ids: Sequence[int]) -> SamplerState:
        """The state once ``token_ids`` are part of the conversation."""
        window = self.parameters.history_tokens
        if not window or not token_ids:
            return self
        recent = (*self.history, *token_ids[-window:])[-window:]
        return dataclasses.replace(self, history=recent)

    def distribution(self, logits: Logits) -> Distribution:
        """Probabilities of the next token; draws nothing.

        Raises:
            LimitError: Logits that have no largest finite value, or an id outside the vocabulary.
        """
        return distribution(logits.values(), self.parameters, self.history)

    def uniform(self) -> tuple[float, SamplerState]:
        """One random number in [0, 1), and the state without it."""
        value, stream = self.stream.uniform()
        return value, dataclasses.replace(self, stream=stream)

    def draw(self, choices: Distribution) -> tuple[int, SamplerState]:
        """A token of ``choices`` and the state in which it is part of the conversation.

        A distribution over one token takes no random number.
        """
        token, state = choices.only_token, self
        if token is None:
            value, state = self.uniform()
            token = choices.token_at(value)
        return token, state.observe((token,))

    def choose(self, logits: Logits) -> tuple[int, SamplerState]:
        """The next token and the state after it.

        Raises:
            LimitError: As :meth:`distribution`.
        """
        return self.draw(self.distribution(logits))

    def to_bytes(self) -> bytes:
        """A record ``kvSA`` version 1: the parameters in the order of their fields, then key,
        counter and history."""
        chosen = self.parameters
        record = RecordWriter(_MAGIC, _VERSION)
        record.f64(chosen.temperature).u32(chosen.top_k).f64(chosen.top_p).f64(chosen.min_p)
        record.f64(chosen.repetition_penalty)
        record.f64(chosen.presence_penalty).f64(chosen.frequency_penalty)
        record.u32(chosen.penalty_window_tokens).u32(len(chosen.logit_bias))
        for token, value in chosen.logit_bias:
            record.u32(token).f64(value)
        record.blob(self.stream.key).u64(self.stream.counter).u32s(self.history)
        return record.finish()

    @classmethod
    def from_bytes(cls, data: bytes) -> SamplerState:
        """The state whose record ``data`` is.

        Raises:
            FormatError: Another record, another version, cut short or too long.
            LimitError: A field is outside its cap.
        """
        record = RecordReader(data, _MAGIC, _VERSION, "sampler")
        parameters = SamplingParameters(
            temperature=record.f64("temperature"),
            top_k=record.u32("top_k"),
            top_p=record.f64("top_p"),
            min_p=record.f64("min_p"),
            repetition_penalty=record.f64("repetition_penalty"),
            presence_penalty=record.f64("presence_penalty"),
            frequency_penalty=record.f64("frequency_penalty"),
            penalty_window_tokens=record.u32("penalty_window_tokens"),
            logit_bias=record.many(
                "logit_bias",
                LOGIT_BIAS_ENTRIES_MAX,
                lambda: (record.u32("logit_bias.token_id"), record.f64("logit_bias.value")),
            ),
        )
        stream = RandomStream(record.blob("key", KEY_BYTES), record.u64("counter"))
        history = record.u32s("history", PENALTY_WINDOW_TOKENS_MAX)
        record.finish()
        return cls(parameters, stream, history)
