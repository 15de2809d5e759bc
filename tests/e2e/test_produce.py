"""Prompts that PyTorch computes in one process and MLX goes on with in another."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import urllib.request

import pytest
from e2e_support import bound, command, failed_cleanly
from produce_support import AS_EVER, IN_FLOAT32, child, producing, require_torch, set_stage
from test_processes import run

from engine import tiny_model_files
from node.client import NodeClient
from node.demo.stage import CLIENT, SOURCE, TARGET
from node.pb.v1 import session_pb2 as pb
from node.shipped import find_shipped
from node.trust import Role, pin

SECONDS = 540.0

STEPS = 256


def model_folder(path, arch):
    """The trained model for ``muse_glimmer``, else a tiny one with seeded weights."""
    if arch == "muse_glimmer":
        return find_shipped("models", "muse-novels-6m")
    path.mkdir()
    for name, data in tiny_model_files(arch, seed=5, window=64, layers=8).items():
        (path / name).write_bytes(data)
    return path


def text_tokens():
    from tokenizers import Tokenizer

    from engine import find_folder  # noqa: F401 - the engine's switches, before MLX

    text = find_shipped("prompt.txt").read_text()
    folder = find_shipped("models", "muse-novels-6m")
    return Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids


def tokens_of(arch, count):
    if arch == "muse_glimmer":
        return text_tokens()[:count]
    return [(17 * i + i * i) % 251 for i in range(count)]


async def copied(giving, target, tokens, name="copy"):
    """Have the producer compute ``tokens`` and copy them to ``target``; the result."""
    session = await giving.open("s")
    order = pb.MigrateRequest(
        session_id="s",
        token=session.token,
        target_node=TARGET,
        target_address=str(target.address),
        copy_as=name,
        token_ids=tokens,
        accept_compatible=True,
    )
    async for event in giving.migrate(order):
        if event.WhichOneof("event") == "result":
            return event.result
    raise AssertionError("no result")


async def greedy(client, name, index):
    session = await client.get(name)
    events = client.generate(session, index, STEPS)
    return [event.token_id async for event in events]


async def both(stage, taking, tokens, options):
    """The move's result, and what torch and MLX go on with after the same prompt."""
    async with (
        producing(stage, *options) as source,
        taking as target,
        NodeClient(stage.credentials(CLIENT), SOURCE, source.address) as giving,
        NodeClient(stage.credentials(CLIENT), TARGET, target.address) as getting,
    ):
        result = await copied(giving, target, tokens)
        ours = await greedy(getting, "copy", len(tokens))
        theirs = await greedy(giving, "s", len(tokens))
        return result, ours, theirs


@pytest.mark.slow
@pytest.mark.timeout(SECONDS)
@pytest.mark.parametrize("arch", ["muse_glimmer", "cohere2"])
def test_in_float32_mlx_goes_on_with_every_token_that_transformers_would(tmp_path, arch):
    require_torch()
    stage = set_stage(tmp_path, model_folder(tmp_path / "m", arch))
    arguments = stage.serve_arguments(TARGET, "127.0.0.1:0")
    taking = child(IN_FLOAT32, "serve", arguments, stage.log(TARGET))
    work = both(stage, taking, tokens_of(arch, 700), ["--dtype", "float32"])
    result, ours, theirs = run(work, SECONDS)
    assert (result.state_verdict, result.continuation_verdict) == ("exact", "compatible")
    assert result.drift < 1e-3
    assert len(ours) == STEPS and ours == theirs


@pytest.mark.slow
@pytest.mark.timeout(SECONDS)
def test_half_precision_goes_on_as_compatible_and_most_tokens_agree(tmp_path):
    require_torch()
    stage = set_stage(tmp_path, model_folder(tmp_path / "m", "muse_glimmer"))
    taking = child(
        AS_EVER, "serve", stage.serve_arguments(TARGET, "127.0.0.1:0"), stage.log(TARGET)
    )
    result, ours, theirs = run(both(stage, taking, tokens_of("muse_glimmer", 700), []), SECONDS)
    assert (result.state_verdict, result.continuation_verdict) == ("exact", "compatible")
    assert 0 < result.drift < 0.5
    # Rows leave while the prompt is computed: the last call's alone are left at its end.
    assert result.hidden_fraction > 0.1
    assert len(ours) == STEPS and ours[:8] == theirs[:8]


def complete(http, tokens, count=16):
    body = json.dumps({"prompt": tokens, "max_tokens": count}).encode()
    request = urllib.request.Request(  # noqa: S310 - our own node
        f"{http}/v1/completions", body, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=SECONDS) as answer:  # noqa: S310
        return json.loads(answer.read())


@contextlib.asynccontextmanager
async def consuming(stage, producer):
    """A node that has long prompts computed by ``producer``, and its HTTP address."""
    pin(stage.credentials(SOURCE), certificate_of(stage, TARGET), Role.CLIENT)
    arguments = [
        *stage.serve_arguments(TARGET, "127.0.0.1:0"),
        *("--port", "0", "--prefill", "remote", "--remote-min-tokens", "256"),
        *("--producer", f"{SOURCE}@{producer.address}"),
    ]
    async with child(AS_EVER, "serve", arguments, stage.log(TARGET)) as node:
        yield node


def certificate_of(stage, name):
    return (stage.credentials(name) / "node-cert.pem").read_bytes()


@pytest.mark.slow
@pytest.mark.timeout(SECONDS)
def test_a_server_has_a_prompt_computed_and_computes_itself_when_the_producer_dies(tmp_path):
    require_torch()
    stage = set_stage(tmp_path, model_folder(tmp_path / "m", "muse_glimmer"))
    tokens = (text_tokens() * 20)[:6000]

    async def killed_in_the_middle(source):
        """Kill the producer as soon as a prompt is on its way there."""
        async with NodeClient(stage.credentials(CLIENT), SOURCE, source.address) as client:
            async with asyncio.timeout(bound(60)):
                while not any(s.position for s in await client.list_sessions()):
                    await asyncio.sleep(0.01)
        os.kill(source.pid, signal.SIGKILL)

    async def work():
        async with producing(stage) as source, consuming(stage, source) as node:
            first = await asyncio.to_thread(complete, node.http, tokens[:1500])
            asked = asyncio.create_task(asyncio.to_thread(complete, node.http, tokens))
            await killed_in_the_middle(source)
            return first, await asked

    first, second = run(work(), SECONDS)
    assert first["kvpack"]["rung"] == "remote" and "prefill_fallback" not in first["kvpack"]
    assert len(first["choices"][0]["text"]) > 8
    assert second["kvpack"]["rung"] != "remote"
    assert second["kvpack"]["prefill_fallback"] in ("broken", "away")
    assert len(second["choices"][0]["text"]) > 8


@pytest.mark.skipif(
    __import__("importlib.util").util.find_spec("torch") is not None, reason="torch is installed"
)
def test_without_torch_the_command_names_the_extra(tmp_path, model_dir):
    stage = set_stage(tmp_path, model_dir)
    ran = command("node", "produce", *stage.serve_arguments(SOURCE, "127.0.0.1:0"), seconds=60)
    line = failed_cleanly(ran, 2)
    assert "needs torch" in line and "pip install 'kvpack[torch]'" in line
