"""What a session gives that never moves: the measure of every moved one."""

from __future__ import annotations

from node.session import Session


class Twin:
    """What a session of each prompt gives that never moves."""

    def __init__(self, model) -> None:
        self._model = model
        self._sessions: dict[int, tuple[Session, dict[int, tuple[int, bytes]]]] = {}

    def prompt(self, length: int) -> list[int]:
        return [(31 + 7 * i + i * i) % 251 for i in range(length)]

    def token(self, length: int, index: int) -> tuple[int, bytes]:
        """The token at ``index``, and the digest of the logits it was chosen from."""
        session, known = self._sessions.get(length) or self._begin(length)
        while index not in known:
            decoded = session.decode_next()
            known[decoded.index] = (decoded.token_id, decoded.logits.digest())
        return known[index]

    def _begin(self, length: int):
        model = self._model
        session = Session("twin", None, model.new_generation(), vocab_size=model.vocab_size)
        session.extend(self.prompt(length))
        for call_tokens in session.backlog_calls():
            session.prefill_next(call_tokens)
        self._sessions[length] = (session, {})
        return self._sessions[length]
