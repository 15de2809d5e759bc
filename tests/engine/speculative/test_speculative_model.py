"""The loop over real layers: bytes of a twin, positions, saving between rounds, cancelling."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable

import pytest
from block_support import continue_both, look
from engine_support import ModelCase, reinstall, tokens

from engine import Generation, Model, checkpoint
from engine.draft import ModelDraft, PromptLookup, check_draft
from engine.draft_state import install_draft
from engine.sampling import SamplingParameters
from engine.sampling_state import SamplerState
from engine.speculative import LivePair, Round, speculate, speculative_rounds
from engine.speculative_report import Agreement, SpeculationCounts, plain_tokens
from kvpack.bundle import (
    BundleReader,
    DraftSnapshot,
    Header,
    read_draft_snapshot,
    read_snapshot,
    write_snapshot,
)
from kvpack.errors import IdentityMismatchError, LayoutMismatchError
from kvpack.identity import CallRun, CallSchedule, NumericsFingerprint
from kvpack.keys import EpochKey, Keyring
from kvpack.layout import Producer
from kvpack.manifest import DraftModel

Load = Callable[[ModelCase], Model]
GREEDY = SamplerState.greedy()
CASES = [ModelCase(dtype="float16", window=16), ModelCase(dtype="bfloat16", window=16)]


def begun(model: Model, ids: list[int]) -> Generation:
    generation = model.new_generation()
    generation.prefill(ids[:-1])
    return generation


def tokens_of(rounds: list[Round]) -> list[int]:
    return [token for one in rounds for token in one.token_ids]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.label)
def test_a_draft_that_is_the_target_keeps_its_rate(
    load: Load, case: ModelCase, record_property: Callable[[str, object], None]
) -> None:
    """One token alone and in a block are two call shapes, so near ties may fall differently here.

    The rates are reported. What may not happen is decay: a draft that falls behind.
    """
    model, ids = load(case), tokens(41)
    target, draft = begun(model, ids), ModelDraft(model.new_generation)
    rounds = []
    for one in speculative_rounds(target, draft, ids, GREEDY, draft_tokens=7, tokens_max=320):
        rounds.append(one)
        assert draft.generation.position == target.position
    plain = plain_tokens(begun(model, ids), ids[-1], GREEDY, tokens_max=320)
    agreement = Agreement.between(tokens_of(rounds), plain)
    halves = [SpeculationCounts.of(half).acceptance for half in (rounds[:20], rounds[20:])]
    record_property("acceptance", halves)
    record_property("tokens_equal_to_plain_greedy", agreement.rate)

    assert agreement.compared == 320
    assert min(halves) > 0.75


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.label)
def test_rows_equal_a_twin_that_made_the_same_calls(load: Load, case: ModelCase) -> None:
    """The twin is told the schedule and the tokens that stayed; what was dropped it invents."""
    model, ids = load(case), tokens(41)
    sampler = SamplerState.begin(SamplingParameters(temperature=1.0), seed=2, prompt=ids)
    draft = ModelDraft(load(ModelCase(dtype=case.dtype, window=16, seed=9)).new_generation)
    target = begun(model, ids)
    rounds = list(speculative_rounds(target, draft, ids, sampler, draft_tokens=6, tokens_max=60))
    known = [*ids, *tokens_of(rounds)]
    runs = target.schedule.runs
    assert any(run.dropped_tokens for run in runs)

    twin = begun(model, ids)
    for run in runs[1:]:
        for _ in range(run.calls):
            replay(twin, known, run)
    assert look(twin) == look(target)
    continue_both(twin, target)


def replay(twin: Generation, known: list[int], run: CallRun) -> None:
    first = twin.position
    block = known[first : first + run.kept_tokens] + tokens(run.dropped_tokens, salt=first)
    with twin.checkpoint(run.call_tokens) as mark:
        twin.block(block)
        mark.accept(run.kept_tokens)


@pytest.mark.parametrize("with_draft_state", [True, False])
def test_saved_between_rounds_and_restored(load: Load, with_draft_state: bool) -> None:
    """With the draft's rows every further round is the same; without them it computes them anew."""
    model, ids = load(CASES[1]), tokens(41)
    draft_model = load(ModelCase(dtype="bfloat16", window=8, seed=7))
    check_draft(model, draft_model)
    target, draft = begun(model, ids), ModelDraft(draft_model.new_generation)
    known = list(ids)
    for _ in range(9):
        known += speculate(target, draft, known, GREEDY, draft_tokens=5).token_ids

    # Accepted tokens only: one row for each known token but the boundary.
    snapshot = target.snapshot(known[:-1])
    assert snapshot.position == target.position == len(known) - 1
    restored = reinstall(model, target)
    if with_draft_state:
        found = _through_a_pack(model, target, draft_model, draft.generation, known[:-1])
        again = install_draft(draft_model, found.snapshot, found.model.schedule, restored.position)
        pair = LivePair(restored, again)
        assert pair.draft is not None
        assert look(pair.draft) == look(draft.generation)
    else:
        pair = LivePair(restored)
    moved = ModelDraft(draft_model.new_generation, pair.draft)
    there, here = list(known), list(known)
    for _ in range(6):
        one = speculate(pair.target, moved, there, GREEDY, draft_tokens=5)
        two = speculate(target, draft, here, GREEDY, draft_tokens=5)
        there += one.token_ids
        here += two.token_ids
        assert moved.generation.position == pair.target.position
        if with_draft_state:
            assert (one.token_ids, one.logits) == (two.token_ids, two.logits)
            assert look(pair.target) == look(target)
    assert len(there) > len(known) + 5


class Stopped(KeyboardInterrupt):
    """As raised by a signal, or by whoever cancels."""


def stopped(*_: object) -> object:
    raise Stopped


#: Where a round can be stopped: the owner's method that does not come back.
ROUND_PLACES = [
    (Generation, "block"),
    (Generation, "step"),
    (ModelDraft, "reach"),
    (ModelDraft, "accept"),
    (checkpoint.Checkpoint, "accept"),
]


@pytest.mark.parametrize(("owner", "name"), ROUND_PLACES, ids=lambda p: getattr(p, "__name__", p))
def test_a_round_stopped_anywhere_never_happened(
    load: Load, monkeypatch: pytest.MonkeyPatch, owner: type, name: str
) -> None:
    model, ids = load(CASES[0]), tokens(41)
    sampler = SamplerState.begin(SamplingParameters(temperature=0.9), seed=3, prompt=ids)
    target, draft = begun(model, ids), ModelDraft(model.new_generation)
    known = [*ids, *speculate(target, draft, ids, sampler, draft_tokens=5).token_ids]
    twin, twin_draft = reinstall(model, target), reinstall(model, draft.generation)
    before = look(target)
    monkeypatch.setattr(owner, name, stopped)
    with pytest.raises(Stopped):
        speculate(target, draft, known, sampler, draft_tokens=5)
    monkeypatch.undo()

    assert look(target) == before
    assert draft.generation.position == target.position
    one = speculate(target, draft, known, sampler, draft_tokens=5)
    two = speculate(
        twin, ModelDraft(model.new_generation, twin_draft), known, sampler, draft_tokens=5
    )
    assert (one.token_ids, one.logits, one.sampler) == (two.token_ids, two.logits, two.sampler)


def test_stopped_after_the_draft_accepted_the_draft_begins_again(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It alone went on; rows of tokens that the target took back must not stay in it."""
    model, ids = load(CASES[0]), tokens(41)
    target, draft = begun(model, ids), ModelDraft(model.new_generation)
    before = look(target)
    accept, calls = checkpoint.Checkpoint.accept, []

    def second_stops(self: checkpoint.Checkpoint, kept: int) -> None:
        calls.append(kept)
        if len(calls) == 2:
            raise Stopped
        accept(self, kept)

    monkeypatch.setattr(checkpoint.Checkpoint, "accept", second_stops)
    with pytest.raises(Stopped):
        speculate(target, draft, ids, GREEDY, draft_tokens=5)
    monkeypatch.undo()
    assert look(target) == before
    assert draft.generation.position == 0
    speculate(target, draft, ids, GREEDY, draft_tokens=5)
    assert draft.generation.position == target.position


def test_lookup_through_the_model_gives_the_target_s_tokens(load: Load) -> None:
    """A prompt that repeats: what is accepted is what single steps say, up to near ties."""
    model, ids = load(CASES[0]), tokens(12) * 4
    rounds = list(
        speculative_rounds(
            begun(model, ids), PromptLookup(), ids, GREEDY, draft_tokens=6, tokens_max=60
        )
    )
    counts = SpeculationCounts.of(rounds)
    plain = plain_tokens(begun(model, ids), ids[-1], GREEDY, tokens_max=60)
    assert counts.proposed_tokens > 0
    assert Agreement.between(tokens_of(rounds), plain).first_difference in (None, *range(10, 60))


def test_drafts_of_another_vocabulary_or_context_are_refused(load: Load) -> None:
    model = load(CASES[0])
    parts = model._parts

    def other(**changes: object) -> Model:
        return Model(dataclasses.replace(parts, **changes))  # type: ignore[arg-type]

    tokenizer = dataclasses.replace(parts.identity, tokenizer_digest=bytes(32))
    with pytest.raises(IdentityMismatchError, match=r"draft\.tokenizer_digest"):
        check_draft(model, other(identity=tokenizer))
    with pytest.raises(LayoutMismatchError, match=r"draft\.vocab_size: expected 320, found 9"):
        check_draft(model, other(vocab_size=9))
    short = dataclasses.replace(parts.layout, max_context_tokens=100)
    with pytest.raises(LayoutMismatchError, match=r"draft\.max_context_tokens: expected >= 131072"):
        check_draft(model, other(layout=short))
    check_draft(model, other())


def _through_a_pack(
    model: Model, target: Generation, draft_model: Model, draft: Generation, ids: list[int]
) -> DraftSnapshot:
    """What a pack of both gives back of the draft; the target's rows come back as they were."""
    key, sink = EpochKey("acme", 1, bytes(range(32))), io.BytesIO()
    header = Header.of(model.identity("acme"), 1)
    numerics = NumericsFingerprint((("backend", "cpu"),))
    about = DraftModel(draft_model.identity("acme"), numerics, draft.schedule)
    snapshot = target.snapshot(ids)
    write_snapshot(
        sink, key, header, snapshot, numerics, target.schedule,
        draft=DraftSnapshot(about, draft.snapshot(ids)),
    )  # fmt: skip
    reader = BundleReader(sink, Keyring([key]))
    assert read_snapshot(reader) == snapshot
    found = read_draft_snapshot(reader)
    assert found is not None
    assert found.model == about
    return found


def test_a_draft_s_rows_are_refused_unless_they_are_this_draft_s(load: Load) -> None:
    model, ids = load(CASES[0]), tokens(30)
    draft = begun(model, ids)
    rows = draft.snapshot(ids[:-1])
    assert look(install_draft(model, rows, draft.schedule, 29)) == look(draft)
    with pytest.raises(LayoutMismatchError, match=r"draft\.position: expected 28, found 29"):
        install_draft(model, rows, draft.schedule, 28)
    with pytest.raises(LayoutMismatchError, match=r"layers\[0\]"):
        install_draft(load(ModelCase(dtype="float16", window=8)), rows, draft.schedule, 29)
    with pytest.raises(LayoutMismatchError, match=r"schedule\.position"):
        install_draft(model, rows, CallSchedule((CallRun(28, 1),)), 29)
    # No snapshot of the oracle has halves; one that lies about it is refused all the same.
    object.__setattr__(rows, "producer", Producer.ORACLE)
    with pytest.raises(LayoutMismatchError, match="producer"):
        install_draft(model, rows, draft.schedule, 29)
