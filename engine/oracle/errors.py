"""What the oracle refuses before it computes anything: a config or weights it cannot stand for."""

from __future__ import annotations

from kvpack.errors import FieldError


class OracleModelError(FieldError):
    """A config field or a tensor is missing, of another shape, or asks for unsupported math.

    ``field`` is the config field or the tensor's name. The oracle never guesses: where two
    published references fill in a missing field differently, the field must be given.
    """

    reason = "bad_oracle_model"
