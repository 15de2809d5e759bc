"""Known ids stay, whatever their text would be encoded to (fault 32, fault 40)."""

from __future__ import annotations

import itertools

import chat_support
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from engine.stream_bytes import byte_fallback_bytes
from node.chat.splice import Codec, Splice, splice

#: Text with marks of the trained model in it, split characters, accents in two forms.
_PIECES = st.sampled_from(
    [
        *("a", " the", "\n", "  ", "\r\n", "1234", " said Mr. ", "\ufffd"),
        *("🙂", "👩\u200d👩\u200d👦", "\u00e9", "e\u0301", "שלום", "中文"),
        *("<|end|>", "<|user|>", "<|", "|>"),
    ]
)
TEXTS = st.lists(_PIECES, max_size=12).map("".join)
RELAXED = settings(
    deadline=None,
    max_examples=80,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@pytest.fixture(scope="module", params=["trained", "tiny", "spaced"])
def codec(request):
    """A byte-level tokenizer with merges, one without, and one that puts a space before text."""
    if request.param == "spaced":
        return _spaced()
    model = request.getfixturevalue(request.param)
    return Codec(model.encode, model.token_bytes())


def _spaced() -> Codec:
    """As Llama 2's: byte fallback, composed accents, and a space before every text."""
    letters = ["▁", *"abdehimrst", "▁t", "▁th", "the", "▁the", "é"]
    vocabulary = {f"<0x{value:02X}>": value for value in range(256)}
    vocabulary.update({token: 256 + index for index, token in enumerate(letters)})
    merges = [("▁", "t"), ("▁t", "h"), ("▁th", "e")]
    tokenizer = Tokenizer(BPE(vocabulary, merges, byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFC(), normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_next")
    tokenizer.decoder = decoders.ByteFallback()
    return Codec(
        lambda text: tokenizer.encode(text, add_special_tokens=False).ids if text else [],
        lambda token: byte_fallback_bytes(tokenizer.id_to_token(token)),
    )


def own_form(codec: Codec, text: str) -> str:
    """What the tokenizer makes of ``text``: it may compose accents and put a space before."""
    return codec.text(codec.encode(text))


def check(codec: Codec, known: list[int], rendered: str):
    found = splice(known, rendered, codec)
    assert codec.text(found.token_ids) in (rendered, own_form(codec, rendered))
    assert found.token_ids[: found.kept_tokens] == tuple(known[: found.kept_tokens])
    assert (found.splice is Splice.EXACT) <= (found.kept_tokens == len(known))
    assert found.splice in (Splice.EXACT, Splice.REWOUND, Splice.FULL)
    return found


@RELAXED
@given(said=TEXTS, more=TEXTS, cuts=st.lists(st.integers(0, 60), max_size=4))
def test_ids_of_another_cut_are_kept_whole(codec, said, more, cuts):
    """Known ids that are not those of their text, as generated ones are not."""
    places = sorted({0, len(said), *(cut for cut in cuts if cut < len(said))})
    parts = [said[a:b] for a, b in itertools.pairwise(places)]
    known = [token for part in parts for token in codec.encode(part)]
    found = check(codec, known, said + more)
    if codec.text(known) == said and codec.text(codec.encode(more)) == more:
        assert found.splice is Splice.EXACT
        assert found.token_ids == (*known, *codec.encode(more))


@RELAXED
@given(known_text=TEXTS, rendered=TEXTS)
def test_any_two_texts_meet_where_they_agree(codec, known_text, rendered):
    check(codec, list(codec.encode(known_text)), rendered)


@RELAXED
@given(known=st.lists(st.integers(0, 255), max_size=20), more=TEXTS)
def test_bytes_that_are_no_text_are_kept_as_they_were_shown(tiny, known, more):
    """A tiny model's answers: random bytes, shown with U+FFFD and sent back so."""
    codec = Codec(tiny.encode, tiny.token_bytes())
    found = check(codec, known, codec.text(known) + more)
    assert found.splice is Splice.EXACT and found.token_ids[: len(known)] == tuple(known)


@pytest.mark.parametrize("split", [1, 2, 3])
def test_half_a_character_stays_half(tiny, split):
    """max_tokens in the middle of an emoji: the client saw U+FFFD and sends that."""
    codec = Codec(tiny.encode, tiny.token_bytes())
    known = list(b"so " + "🙂".encode()[:split])
    found = check(codec, known, "so \ufffd<|turn_end|>\n")
    assert found.splice is Splice.EXACT and found.kept_tokens == len(known)


def test_a_mark_is_never_cut_in_two(trained):
    """Known text ends inside of a mark of the new text: the mark's token must come out whole."""
    codec = Codec(trained.encode, trained.token_bytes())
    known = [*trained.encode("<|user|>so"), *chat_support.by_character(trained, "<|us")]
    rendered = "<|user|>so<|end|>"
    found = check(codec, known, rendered)
    assert found.token_ids == tuple(trained.encode(rendered))
    assert found.splice is not Splice.EXACT


def test_composed_and_decomposed_accents_are_one_text_to_a_tokenizer_that_composes():
    codec = _spaced()
    known = codec.encode("the \u00e9")
    found = splice(known, "the e\u0301 the", codec)
    assert found.splice is Splice.EXACT and codec.text(found.token_ids) == " the \u00e9 the"


def test_a_tokenizer_that_puts_a_space_before_every_text_puts_none_inside():
    codec = _spaced()
    known = codec.encode("the")
    found = check(codec, known, " thethe")
    assert codec.text(found.token_ids) == "  thethe"
