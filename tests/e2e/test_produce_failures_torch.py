"""torch itself where memory is short or a call fails, in real processes (slow: needs torch)."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from e2e_support import environment
from produce_support import AS_EVER, WITHOUT_MLX, child, require_torch, set_stage
from test_processes import run
from test_produce import copied, model_folder, tokens_of

from engine import tiny_model_files
from node.client import NodeClient
from node.demo.stage import CLIENT, SOURCE, TARGET
from node.errors import PeerAnswerError

#: Loads a folder, fills a session, lets the process have little more memory than that, and asks on.
SHORT_OF_MEMORY = """
import gc, json, resource, sys
from pathlib import Path
from kvpack.errors import KvpackError
from kvpack.snapshot import cut_tile_specs
from node.produce.model import load
from node.produce.network import Placing
import torch
torch.set_num_threads(1)
model = load(Path(sys.argv[1]), Placing("cpu"))
def cut(one):
    return [bytes(tile.data) for tile in one.read_tiles(cut_tile_specs(one.layout, one.position))]
generation, twin = model.new_generation(), model.new_generation()
tokens = [(17 * i + i * i) % 251 for i in range(2048)]
for one in (generation, twin):
    for first in range(0, 2048, 512):
        one.prefill(tokens[first : first + 512])
before, rows = cut(generation), generation._rows.capacities
def used():
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
most = resource.getrlimit(resource.RLIMIT_AS)
def limited(work):
    gc.collect()
    resource.setrlimit(resource.RLIMIT_AS, (used() + (24 << 20), most[1]))
    try:
        work()
    except KvpackError as error:
        return {"reason": error.reason, "said": str(error), "context": error.__context__ is None}
    finally:
        resource.setrlimit(resource.RLIMIT_AS, most)
said = {"long": limited(lambda: generation.prefill(tokens))}
said["rows"] = generation._rows.capacities == rows
said["position"] = generation.position
said["equal"] = cut(generation) == before
def many():
    for _ in range(1000):
        kept.append(model.new_generation())
kept = []
said["many"] = limited(many)
kept.clear()
for one in (generation, twin):
    one.prefill(tokens[:512])
said["after"] = generation.position
said["equal_after"] = cut(generation) == cut(twin)
print(json.dumps(said))
"""

#: ``kvnode produce`` whose logits fail the first time that somebody asks for them.
LOGITS_FAIL_ONCE = WITHOUT_MLX.replace(
    "main()\n",
    """from node.produce.network import Network
plain = Network.logits
def failing(self, activations):
    Network.logits = plain
    raise RuntimeError("device-side assert triggered by what somebody wrote")
Network.logits = failing
main()
""",
)


def folder(path, **options):
    path.mkdir()
    for name, data in tiny_model_files("muse_glimmer", seed=5, **options).items():
        (path / name).write_bytes(data)
    return path


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs RLIMIT_AS and /proc")
def test_too_little_memory_is_an_error_with_a_name_and_nothing_is_kept(tmp_path):
    require_torch()
    model = folder(tmp_path / "m", window=64, layers=8)
    ran = subprocess.run(
        [sys.executable, "-P", "-c", SHORT_OF_MEMORY, str(model)],
        check=True, capture_output=True, text=True, env=environment(), timeout=240,
    )  # fmt: skip
    said = json.loads(ran.stdout.splitlines()[-1])
    assert said["long"]["reason"] == said["many"]["reason"] == "out_of_memory", said
    assert said["long"]["said"].startswith("a call of 2048 tokens at position 2,048: out of memory")
    assert "bytes more were asked for" in said["long"]["said"]
    assert said["many"]["said"].startswith("a new session's rows: out of memory")
    assert said["long"]["context"] and said["rows"] and said["equal"]
    assert said["position"] == 2048
    assert said["after"] == 2560 and said["equal_after"]


@pytest.mark.slow
def test_logits_that_fail_end_one_copy_and_the_next_comes_about(tmp_path):
    require_torch()
    stage = set_stage(tmp_path, model_folder(tmp_path / "m", "cohere2"))
    tokens = tokens_of("cohere2", 300)

    async def work():
        arguments = [*stage.serve_arguments(SOURCE, "127.0.0.1:0"), "--device", "cpu"]
        taking = stage.serve_arguments(TARGET, "127.0.0.1:0")
        async with (
            child(LOGITS_FAIL_ONCE, "produce", arguments, stage.log(SOURCE)) as source,
            child(AS_EVER, "serve", taking, stage.log(TARGET)) as target,
            NodeClient(stage.credentials(CLIENT), SOURCE, source.address) as giving,
            NodeClient(stage.credentials(CLIENT), TARGET, target.address) as getting,
        ):
            with pytest.raises(PeerAnswerError) as refused:
                await copied(giving, target, tokens)
            assert refused.value.peer_reason == "transfer_failed"
            assert refused.value.hints["kvpack-cause"] == "backend_failed"
            session = await giving.get("s")
            assert (session.position, session.next_index) == (299, 300)
            again = [event.token_id async for event in giving.generate(session, 300, 4)]
            await giving.close_session(session)
            result = await copied(giving, target, tokens)
            assert result.state_verdict == "exact"
            theirs = await getting.get("copy")
            return again, [event.token_id async for event in getting.generate(theirs, 300, 4)]

    ours, theirs = run(work(), 240)
    assert len(ours) == len(theirs) == 4 and ours[0] == theirs[0]
    assert "somebody wrote" not in stage.log(SOURCE).read_text()


@pytest.mark.slow
def test_sliding_layers_of_two_rotations_are_refused_when_the_network_is_loaded(tmp_path):
    require_torch()
    model = folder(tmp_path / "m", window=64, layers=4)
    config = json.loads((model / "config.json").read_text())
    inner = config.get("text_config", config)
    theta = inner.get("rope_theta") or inner["rope_parameters"]["rope_theta"]
    inner["layer_rope_theta"] = [theta, 0, theta, 0]
    (model / "config.json").write_text(json.dumps(config))
    code = (
        "import sys; from pathlib import Path; from node.produce.model import load;"
        "from node.produce.network import Placing; load(Path(sys.argv[1]), Placing('cpu'))"
    )
    ran = subprocess.run(
        [sys.executable, "-P", "-c", code, str(model)],
        check=False, capture_output=True, text=True, env=environment(), timeout=120,
    )  # fmt: skip
    line = ran.stderr.strip().splitlines()[-1]
    assert line.startswith("engine.errors.ModelFolderError: layers[1].rope: expected theta "), line
    assert line.endswith("found none"), line
