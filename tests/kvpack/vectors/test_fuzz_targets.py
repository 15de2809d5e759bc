"""The fuzz targets on their seeds and on a few thousand changes of them, without atheris."""

from __future__ import annotations

import random

import pytest

from kvpack.errors import KvpackError
from tests.fuzz import targets
from tests.fuzz.seeds import seeds

_SEED, _EXECUTIONS = 2_718, 1_000


@pytest.mark.parametrize("name", targets.NAMES)
def test_both_parsers_agree_on_the_seeds_and_around_them(name: str) -> None:
    print(f"seed {_SEED}")
    draw, found = random.Random(_SEED), seeds(name)
    verdicts = {targets.run(name, data) for data in found}
    assert verdicts == {True, False}
    for _ in range(_EXECUTIONS):
        data = bytearray(draw.choice(found) or b"\0")
        place = draw.randrange(len(data))
        data[place] = draw.choice((0, 1, 0x80, 0xFF, draw.randrange(256)))
        if draw.randrange(3) == 0:
            del data[draw.randrange(len(data)) :]
        targets.run(name, bytes(data))


def test_a_disagreement_and_a_foreign_exception_are_findings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(data: bytes) -> None:
        raise KvpackError("no")

    monkeypatch.setitem(targets._TARGETS, "scan", (refuse, bytes))
    with pytest.raises(targets.Disagreement, match="scan: kvpack False, reference True"):
        targets.run("scan", b"")
    monkeypatch.setitem(targets._TARGETS, "scan", (lambda data: data[9], bytes))
    with pytest.raises(IndexError):
        targets.run("scan", b"")
