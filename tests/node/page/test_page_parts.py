"""The page's parts as text: real numbers, plain words, nothing that its policy forbids."""

from __future__ import annotations

import dataclasses
import re
from html.parser import HTMLParser

import page_scene as scene
import pytest

from engine import errors as engine_errors
from kvpack import errors as kvpack_errors
from kvpack.errors import KvpackError
from kvpack.store import errors as store_errors
from node import errors as node_errors
from node.metrics.views import Direction, SessionView, Standing
from node.migration.table import SourceState, TargetState
from node.page import units, words
from node.page.assets import ASSETS
from node.page.document import document
from node.page.fragments import PARTS, fragments
from node.page.plot import axes_for, memory_plot
from node.records import errors as records_errors
from node.serving.health import HealthState
from node.serving.order import MissReason
from node.serving.slots import SlotState


def page(status=None) -> str:
    return document("studio", fragments(status or scene.status(), scene.recorder()))


class Reader(HTMLParser):
    """Every tag with its attributes; refuses tags that do not close as they opened."""

    VOID = frozenset({"meta", "link", "br"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_nothing_inline_and_nothing_from_elsewhere():
    for tag, attributes in Reader(page()).tags:
        assert "style" not in attributes, tag
        assert not [name for name in attributes if name.startswith("on")], tag
        assert tag != "style"
        for name in ("src", "href"):
            assert attributes.get(name, "page/").startswith("page/"), attributes
    assert "url(" not in ASSETS["page.css"].body.decode()
    for name in ("eval", "innerHTML = `", "document.write", "http"):
        assert name not in ASSETS["page.js"].body.decode()


def test_every_id_has_one_place_and_every_part_one_id():
    ids = [attributes["id"] for _, attributes in Reader(page()).tags if attributes.get("id")]
    assert len(ids) == len(set(ids))
    assert set(PARTS) <= set(ids)


def test_a_name_that_looks_like_markup_is_text():
    evil = SessionView("<script>alert(1)</script>", "<b>n</b>", Standing.SERVING, 10, 11)
    status = dataclasses.replace(scene.status(), sessions=(evil,), model="<i>m</i>", why="<u>")
    assert not [tag for tag, _ in Reader(page(status)).tags if tag in ("i", "u") and "<i>m" in tag]
    assert "<script>alert" not in page(status)
    assert "<i>m" not in page(status) and "<b>n" not in page(status) and "<u>" not in page(status)


def test_curves_go_through_the_real_numbers():
    shape, positions = scene.MEMORY, scene.status().positions()
    axes = axes_for(shape, positions)
    assert (axes.tokens, axes.size) == (32_768, 512 << 20)
    figure = memory_plot(shape, positions)
    curves = dict(re.findall(r'class="curve (ring|full)" d="M([^"]+)"', figure))
    ring = [tuple(map(float, point.split())) for point in curves["ring"].split("L")]
    full = [tuple(map(float, point.split())) for point in curves["full"].split("L")]
    flat = 100 - 100 * (2048 * 39 * 1024) / axes.size
    assert ring == [
        (0, 100), (6.25, pytest.approx(flat, abs=0.01)), (100, pytest.approx(flat, abs=0.01)),
    ]  # fmt: skip
    grown = 100 - 100 * (32_768 * 13 * 1024) / axes.size
    assert full == [(0, 100), (100, pytest.approx(grown, abs=0.01))]
    assert figure.count('class="dot ring"') == len(set(positions))
    assert "24,310 tokens: 78.0 MiB" in figure and "24,310 tokens: 309 MiB" in figure
    assert "flat at 78.0 MiB from 2,048 tokens on" in figure


@pytest.mark.parametrize("longest", [0, 1, 2047, 2048, 9_000, 131_072])
def test_axes_hold_what_they_show(longest):
    axes = axes_for(scene.MEMORY, [longest])
    assert axes.tokens >= longest
    assert axes.size >= scene.MEMORY.full_bytes(min(longest, axes.tokens))
    for line in re.findall(r' d="M?([^"]+)"', memory_plot(scene.MEMORY, [longest] * (longest > 0))):
        for number in re.findall(r"-?\d+\.\d+", line):
            assert 0 <= float(number) <= 100


def test_a_move_shows_bytes_and_time_left():
    part = fragments(scene.status(), scene.recorder())["moves"]
    total = scene.MEMORY.ring_bytes(9_472) + scene.MEMORY.full_bytes(9_472)
    assert f'<progress max="{total}" value="{int(total * 0.72)}"' in part
    assert "143 MiB of 198 MiB" in part
    assert "1.4 s left" in part
    assert "Remote prefill" in part and "transient" not in part
    assert "81 ms without a token" in part
    assert "nobody consented" in part


def test_an_empty_node_says_so():
    loading = dataclasses.replace(
        scene.status(), health=HealthState.LOADING, model="", memory=None, lease=None,
        sessions=(), moves=(), nodes=(), sessions_owned=0,
    )  # fmt: skip
    text = page(loading)
    assert "Loading the model" in text
    assert "None yet." in text and "Known once the model is loaded." in text


def test_every_state_has_words():
    assert set(words.HEALTH) == set(HealthState)
    assert set(words.SLOTS) == set(SlotState)
    assert set(words.STANDINGS) == set(Standing)
    assert set(words.MISSES) == set(MissReason)
    assert set(words.STEPS[Direction.OUT]) == {state.value for state in SourceState}
    assert set(words.STEPS[Direction.IN]) == {state.value for state in TargetState}


def reasons() -> set[str]:
    """The stable word of every error class there is."""
    found = set()
    for module in (kvpack_errors, store_errors, engine_errors, node_errors, records_errors):
        for kind in vars(module).values():
            if isinstance(kind, type) and issubclass(kind, KvpackError):
                found.add(kind.reason)
    return found


def test_every_reason_for_a_refusal_has_a_sentence():
    assert sorted(reasons() - set(words.REFUSALS)) == []
    for reason, sentence in words.REFUSALS.items():
        assert sentence[0].isupper() and sentence.endswith("."), reason
    assert words.refusal_words("some_new_word") == "Refused: some new word."


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "0.98 KiB"), (1024, "1.00 KiB"), (81_788_928, "78.0 MiB"),
     (1_826_619_392, "1.70 GiB"), (1 << 40, "1.00 TiB"), (1_048_000, "1.00 MiB")],
)  # fmt: skip
def test_bytes_have_binary_units(count, text):
    assert units.bytes_text(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 ms"), (0.0841, "84 ms"), (0.9996, "1.0 s"), (1.44, "1.4 s"), (9.96, "10 s"),
     (59.4, "59 s"), (60, "1 min"), (200, "3 min 20 s"), (3600, "1 h"), (7500, "2 h 5 min"),
     (356_400, "4 d 3 h"), (-1, "0 ms")],
)  # fmt: skip
def test_durations_are_read_at_a_glance(seconds, text):
    assert units.seconds_text(seconds) == text


@pytest.mark.parametrize(
    ("most", "texts"),
    [(512 << 20, ["0", "128 MiB", "256 MiB", "384 MiB", "512 MiB"]),
     (2 << 20, ["0", "0.5 MiB", "1 MiB", "1.5 MiB", "2 MiB"]),
     (4, ["0", "1 B", "2 B", "3 B", "4 B"])],
)  # fmt: skip
def test_an_axis_has_one_unit(most, texts):
    assert [units.tick_text(most * i // 4, most) for i in range(5)] == texts


def test_shares_never_say_all_or_nothing_where_it_is_not_so():
    assert [units.percent_text(share) for share in (0, 0.004, 0.5, 0.996, 1)] == [
        "0 %", "< 1 %", "50 %", "> 99 %", "100 %",
    ]  # fmt: skip
