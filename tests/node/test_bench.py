"""``kvnode bench move``: its arithmetic, its made rows, and one small run over the real path."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import node_support
import numpy as np
import pytest
from click.testing import CliRunner

from kvpack.errors import KvpackError, LimitError
from kvpack.snapshot import cut_tile_specs
from node import cli
from node.bench.geometry import cut_bytes, muse_glimmer, read_layout, window_bytes
from node.bench.held import MadeTier
from node.bench.measure import measure
from node.bench.model import MadeModel
from node.bench.order import BenchOrder, Kind, OtherEnd, bench_config
from node.bench.report import as_page, as_values, exposed_tail_bytes
from node.bench.rows import RowSource, SampleRows
from node.bench.serve import bench_fitting
from node.config import Address
from node.errors import UsageError
from node.server import running

#: Two kinds, odd row sizes, a window that the prompt goes round several times.
SMALL = {
    "encoding": "f16le",
    "max_context_tokens": 4096,
    "repeat": 2,
    "layers": [
        {"window_tokens": 300, "kv_heads": 1, "key_dim": 16, "value_dim": 16},
        {"window_tokens": 300, "kv_heads": 1, "key_dim": 10, "value_dim": 6},
        {"window_tokens": None, "kv_heads": 2, "key_dim": 16, "value_dim": 8},
    ],
}


@pytest.fixture
def small(tmp_path):
    """A layout file."""
    path = tmp_path / "layout.json"
    path.write_text(json.dumps(SMALL))
    return str(path)


@pytest.mark.parametrize(
    ("tokens", "held", "nope", "swa"),
    [
        (65_536, 0, 872_401_920, 81_788_928),
        (65_536, 32_768, 436_194_304, 81_788_928),
        (2_048, 1_024, 1_023 * 13_312, 1_023 * 39_936),
        (130_815, 0, 1_823_184_896 - 81_788_928, 81_788_928),
        (32_769, 0, 436_207_616, 81_788_928),
    ],
)
def test_bytes_of_the_reference_geometry_are_the_published_ones(tokens, held, nope, swa):
    sizes = cut_bytes(muse_glimmer(), tokens, held)
    assert (sizes.nope_bytes, sizes.swa_bytes, sizes.kv_bytes) == (nope, swa, nope + swa)


def test_half_of_one_window_held_is_just_less_than_half_of_the_bytes():
    layout = muse_glimmer()
    share = cut_bytes(layout, 2_048, 1_024).kv_bytes / cut_bytes(layout, 2_048).kv_bytes
    assert round(100 * share, 2) == 49.98
    full = cut_bytes(layout, 65_536)
    assert full.kv_bytes == 954_190_848
    assert round(100 * cut_bytes(layout, 65_536, 32_768).kv_bytes / full.kv_bytes, 4) == 54.2851


def test_what_no_overlap_hides_of_the_reference_geometry():
    assert window_bytes(muse_glimmer()) == 81_788_928
    prompt, live = (BenchOrder.of(130_815, 0, kind, "muse-glimmer", 0.0) for kind in Kind)
    assert exposed_tail_bytes(prompt) == 27_262_976
    assert exposed_tail_bytes(live) == 81_788_928 + 27_262_976


@pytest.mark.parametrize("held", [0, 256, 1024])
def test_the_arithmetic_agrees_with_the_tiles_that_a_cut_is_made_of(held):
    layout = muse_glimmer()
    for tokens in (1_500, 2_049, 5_000):
        whole = [spec for spec in cut_tile_specs(layout, tokens - 1) if spec.end_position > held]
        assert sum(spec.data_bytes(layout) for spec in whole) == (
            cut_bytes(layout, tokens, held).kv_bytes
        )


@pytest.mark.parametrize(("tokens", "held"), [(1, 0), (2048, 100), (2048, 2048), (200_000, 0)])
def test_numbers_that_make_no_cut_are_refused(tokens, held):
    with pytest.raises(LimitError):
        cut_bytes(muse_glimmer(), tokens, held)
    with pytest.raises(UsageError):
        BenchOrder.of(tokens, held, Kind.PROMPT, "muse-glimmer", 0.0)


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"layers": 3}', json.dumps(SMALL | {"encoding": "f8"})]
)
def test_a_file_that_is_no_layout_is_refused_by_name(tmp_path, text):
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(KvpackError, match=r"other\.json"):
        read_layout(str(path))


def test_made_rows_differ_by_position_layer_and_role(small):
    layout = read_layout(small)
    source = RowSource(layout, 1)
    rows = np.empty((600, layout.key_row_bytes(1)), np.uint8)
    source.fill(1, 0, 40, rows)
    assert source.count_equal(1, 0, 40, rows) == 600
    assert source.count_equal(1, 0, 41, rows) == 0
    assert source.count_equal(4, 0, 40, rows) == 0
    rows[[7, 8]] = rows[[8, 7]]
    rows[300, 3] ^= 1
    assert source.count_equal(1, 0, 40, rows) == 597


def test_a_plane_hands_out_only_rows_that_are_live(small):
    layout = read_layout(small)
    model = MadeModel("small", layout)
    model.made_tokens = 700
    generation = model.new_generation()
    specs = cut_tile_specs(layout, 700)
    with pytest.raises(KvpackError, match="are live"):
        generation.read_tile(specs[0])
    generation.prefill([0] * 700)
    for spec in specs:
        assert len(generation.read_tile(spec).data) == spec.data_bytes(layout)


@pytest.mark.parametrize(
    ("kind", "tokens", "held", "spools"),
    [
        (Kind.PROMPT, 1_500, 0, False),
        (Kind.SESSION, 1_500, 0, False),
        (Kind.PROMPT, 1_500, 512, False),
        # As long as the context: there is no room for what a round might leave behind.
        (Kind.PROMPT, 4_096, 0, False),
        (Kind.SESSION, 1_500, 0, True),
    ],
)
def test_a_small_run_moves_every_row_and_counts_every_byte(
    world, small, kind, tokens, held, spools, monkeypatch
):
    flushed = []
    keep = MadeTier.keep_later
    monkeypatch.setattr(
        MadeTier,
        "keep_later",
        lambda tier, name, path, *, own: [
            flushed.append(path.stat().st_size),
            keep(tier, name, path, own=own),
        ],
    )
    config = bench_config(
        Address("127.0.0.1", 0), world.credentials("target"), world.root / "target-data",
        f"sqlite:{world.root / 'directory.sqlite'}", shares=True,
    )  # fmt: skip
    taking = MadeModel("small", read_layout(small))
    order = BenchOrder.of(tokens, held, kind, small, 0.0)

    async def run():
        async with running(
            config, bench_fitting(taking, config, takes=True, spools=spools)
        ) as target:
            other = OtherEnd(
                str(target.address), "target", world.credentials("source"),
                world.root / "source-data",
            )  # fmt: skip
            return as_values(await measure(order, other))

    values = node_support.run(run())
    # A live session goes on while it is sent.
    moved = values["moved_tokens"]
    assert moved == tokens if kind is Kind.PROMPT else tokens < moved < tokens + 1000
    sizes = cut_bytes(order.layout, moved, held)
    assert values["kv_bytes"] == sizes.kv_bytes == values["kv_bytes_expected"]
    assert (values["nope_bytes"], values["swa_bytes"]) == (sizes.nope_bytes, sizes.swa_bytes)
    assert values["installed_equal"] is True
    rows = sum(layer.held_rows(moved - 1) + 1 for layer in order.layout.layers)
    assert values["rows_compared"] == values["rows_equal"] == 2 * rows
    assert (values["held_bytes"] > 0) == bool(held)
    assert values["payload_bytes"] > values["kv_bytes"]
    assert values["wire_bytes"] <= 1.002 * values["payload_bytes"] + (64 << 10)
    assert 0.0 < values["hidden_fraction"] < 1.0
    assert values["prefill_simulated"] is True
    assert 0.0 < values["exposed_handover_s"] < 5.0
    assert values["push_gbytes_per_s"] > 0 and values["tls_baseline_gbytes_per_s"] > 0
    assert values["push_over_tcp"] > 0 and values["data_plane"] == "mtls"
    for name in ("push", "sealing_push"):
        assert values[f"{name}_s"] > 0 and values[f"{name}_over_tls"] > 0
    for way in ("", "tls_", "sealing_"):
        for end in ("source", "target"):
            assert values[f"{way}{end}_cpu_s_per_gbyte"] > 0
    # A spool is whole and on disk when its session is taken over, and goes with it.
    assert [size > values["payload_bytes"] for size in flushed] == [True] * spools
    assert world.spool("target") == []
    assert "hidden_fraction" in as_page(values)


def test_a_target_that_stops_reading_stops_the_source_and_not_its_memory(tmp_path):
    """Both ends are processes of their own; 82 MB wait while the target reads nothing for 2 s."""
    wide = {"window_tokens": None, "kv_heads": 8, "key_dim": 128, "value_dim": 128}
    layout = {"encoding": "f16le", "max_context_tokens": 8192, "layers": [wide], "repeat": 4}
    path = tmp_path / "wide.json"
    path.write_text(json.dumps(layout))
    arguments = ["--tokens", "5000", "--layout", str(path), "--stall", "2", "--loopback", "--json"]
    result = CliRunner().invoke(cli.main, ["bench", "move", *arguments])
    assert result.exit_code == 0, result.output
    values = json.loads(result.stdout)
    assert values["kv_bytes"] == 4_999 * 4 * 4096 > 64 << 20
    assert values["installed_equal"] is True
    assert values["prefill_s"] + values["exposed_handover_s"] > 2
    if sys.platform == "linux":
        # Records of TLS and frames of HTTP/2; what came after the last look is missing.
        wire = values["wire_bytes"]
        assert wire - (64 << 10) < values["socket_bytes"] < 1.01 * wire + (64 << 10)
    else:
        assert values["socket_bytes"] is None
    for end in ("source", "target"):
        growth = values[f"{end}_peak_over_kv_bytes"]
        assert growth is None or growth < 64 << 20


@pytest.mark.parametrize("plane", ["grpc-plain", "socket"])
def test_rows_that_travelled_beside_mtls_between_two_processes_are_equal(small, plane):
    arguments = ["--tokens", "1500", "--layout", small, "--loopback", "--json"]
    result = CliRunner().invoke(cli.main, ["bench", "move", *arguments, "--data-plane", plane])
    assert result.exit_code == 0, result.output
    values = json.loads(result.stdout)
    assert (values["data_plane"], values["plane_fallback"]) == (plane, "")
    assert values["installed_equal"] is True and values["rows_compared"] > 0
    assert values["tcp_baseline_s"] > 0 and values["push_over_tcp"] > 0


def test_a_row_that_is_not_the_one_sent_is_counted(small):
    """The comparison is the target's own: it must see what the tags cannot."""
    layout = read_layout(small)
    model = MadeModel("small", layout)
    model.made_tokens = 499
    generation = model.new_generation()
    generation.prefill([0] * 499)
    generation.step(0)
    compared, equal = generation.planes.count_equal(model.rows, 500)
    assert compared == equal == 2 * sum(layer.held_rows(499) + 1 for layer in layout.layers)
    generation.planes.planes[2].roles[1][250, 0] ^= 1
    assert generation.planes.count_equal(model.rows, 500) == (compared, compared - 1)


def _sample(path, elements=16):
    """Few rows, whose high bytes are alike as a cache's are."""
    random = np.random.default_rng(3)
    arrays = {
        name: random.integers(0, 1 << 10, (2, count, elements), np.uint16)
        for name, count in (("full", 700), ("swa", 90))
    }
    np.savez(path, **arrays)
    return arrays


def test_rows_of_a_sample_are_repeated_and_told_apart(tmp_path):
    arrays = _sample(tmp_path / "rows.npz")
    layer = {"kv_heads": 1, "key_dim": 16, "value_dim": 16}
    layers = [{"window_tokens": kind, **layer} for kind in (300, None, None)]
    (tmp_path / "layout.json").write_text(
        json.dumps({"encoding": "f16le", "max_context_tokens": 4096, "layers": layers})
    )
    layout = read_layout(str(tmp_path / "layout.json"))
    source = SampleRows(layout, tmp_path / "rows.npz")
    rows = np.empty((1500, 32), np.uint8)
    source.fill(0, 1, 50, rows)
    assert np.array_equal(rows.view(np.uint16), arrays["swa"][1][np.arange(50, 1550) % 90])
    assert source.count_equal(0, 1, 50, rows) == 1500 and source.count_equal(0, 1, 51, rows) == 0
    source.fill(2, 0, 0, rows)
    assert np.array_equal(rows[:700].view(np.uint16), np.roll(arrays["full"][0], -263, axis=0))
    assert np.array_equal(rows[:700], rows[700:1400]) and source.name != RowSource(layout).name


def test_a_sample_that_is_none_or_does_not_fit_is_refused_by_name(small, tmp_path):
    layout, path = read_layout(small), tmp_path / "rows.npz"
    with pytest.raises(UsageError, match=r"--rows .*rows\.npz"):
        SampleRows(layout, path)
    for arrays in ({"full": np.ones((2, 9, 4), "<u2")}, {"full": np.ones(9), "swa": np.ones(9)}):
        np.savez(path, **arrays)
        with pytest.raises(UsageError, match="expected arrays full and swa"):
            SampleRows(layout, path)
    _sample(path)
    with pytest.raises(KvpackError, match=r"layers\[1\]\.row_bytes"):
        SampleRows(layout, path)


def test_a_compressed_move_alone_carries_less_and_arrives_whole(world, tmp_path):
    """Rows of a sample; no push before the move."""
    layer = {"kv_heads": 1, "key_dim": 16, "value_dim": 16}
    layers = [{"window_tokens": 300, **layer}, {"window_tokens": None, **layer}]
    shape = tmp_path / "layout.json"
    shape.write_text(
        json.dumps({"encoding": "f16le", "max_context_tokens": 8192, "repeat": 8, "layers": layers})
    )
    _sample(tmp_path / "rows.npz")
    config = bench_config(
        Address("127.0.0.1", 0), world.credentials("target"), world.root / "target-data",
        f"sqlite:{world.root / 'directory.sqlite'}", shares=True,
    )  # fmt: skip
    order = replace(
        BenchOrder.of(1_500, 0, Kind.SESSION, str(shape), 0.0),
        rows=tmp_path / "rows.npz", compress=True, pushes=False,
    )  # fmt: skip
    taking = MadeModel(str(shape), order.layout, order.row_source())

    async def run():
        async with running(config, bench_fitting(taking, config, takes=True)) as target:
            other = OtherEnd(
                str(target.address), "target", world.credentials("source"),
                world.root / "source-data",
            )  # fmt: skip
            return as_values(await measure(order, other))

    values = node_support.run(run())
    assert values["installed_equal"] is True and values["rows_compared"] > 0
    assert (values["rows"], values["compressed"]) == ("sample", True)
    assert values["wire_bytes"] < 0.9 * values["payload_bytes"]
    assert "push_s" not in values and "exposed_bound_s" not in values
    assert "wire_bytes" in as_page(values)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--tokens", "600", "--loopback", "--without-pushes"],
        ["--tokens", "600", "--loopback", "--link-gbits", "1"],
        ["--tokens", "600", "--loopback", "--rows", "nowhere.npz"],
        ["--tokens", "600"],
        ["--tokens", "600", "--loopback", "--to", "127.0.0.1:1"],
        ["--tokens", "600", "--to", "127.0.0.1:1"],
        ["--tokens", "600", "--held", "599", "--loopback"],
    ],
)
def test_a_command_that_cannot_be_run_is_a_usage_error(arguments):
    result = CliRunner().invoke(cli.main, ["bench", "move", *arguments])
    assert result.exit_code == 2
