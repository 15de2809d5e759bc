"""What the slots did since the start, as plain numbers that only grow."""

from __future__ import annotations

from dataclasses import dataclass, field

from node.metrics.histogram import Histogram
from node.serving.order import Rung


@dataclass(slots=True)
class Counts:
    """Of one floor. At any moment submitted = ended in each way + waiting + running.

    Attributes:
        submitted: Answers that were taken on.
        refused: Answers that were not: too many wait, staging busy, draining, unhealthy.
        finished: Whole ones.
        cancelled: Ended by their client, or by the end of the node.
        stalled: Ended since nobody read them.
        failed: Ended by an error.
        prompt_tokens: Of the prompts whose first token was generated.
        evaluated_tokens: Of these, computed for the answer.
        cached_tokens: Of these, begun from, by where they were held. With the evaluated ones they
            are the prompt tokens.
        generated_tokens: All tokens generated, also of answers that did not finish.
        prefilled_tokens: All prompt tokens computed, also of answers that did not finish.
        restored_bytes: Plaintext of rows brought back, also for answers that did not finish.
        rebuilds: Contexts of sessions that were rebuilt and swapped in.
        continuations: Answers that went on in the live state of a session or of a slot.
        queued_s: Waits for a slot.
        first_token_s: Waits for a first token, from the submission on.
    """

    submitted: int = 0
    refused: int = 0
    finished: int = 0
    cancelled: int = 0
    stalled: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    evaluated_tokens: int = 0
    cached_tokens: dict[Rung, int] = field(default_factory=lambda: dict.fromkeys(Rung, 0))
    generated_tokens: int = 0
    prefilled_tokens: int = 0
    restored_bytes: int = 0
    rebuilds: int = 0
    continuations: int = 0
    queued_s: Histogram = field(default_factory=Histogram)
    first_token_s: Histogram = field(default_factory=Histogram)

    @property
    def ended(self) -> int:
        """Answers that are over, in whatever way."""
        return self.finished + self.cancelled + self.stalled + self.failed
