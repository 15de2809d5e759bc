"""Real ``kvnode serve`` processes: killed, refused, stopped, restarted."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time

import pytest
from e2e_support import at_once, bound, command, environment, failed_cleanly

from kvpack.keys import generate_key, write_key_file
from node.client import NodeClient
from node.demo.processes import serving
from node.demo.stage import CLIENT, SOURCE, TARGET, Stage, _enroll_all
from node.errors import PeerAnswerError
from node.pb.v1 import session_pb2 as pb


def run(work, seconds=120.0):
    async def bounded():
        async with asyncio.timeout(seconds):
            return await work

    return asyncio.run(bounded())


@pytest.fixture
def stage(tmp_path, model_dir):
    """Keys and certificates of two nodes and a client."""
    work = tmp_path / "work"
    work.mkdir(mode=0o700)
    made = Stage(tmp_path, work, model_dir)
    write_key_file(made.key, generate_key("tests"))
    _enroll_all(made)
    return made


@contextlib.asynccontextmanager
async def node(stage, name, *options):
    """A real node and a client of it."""
    arguments = [*stage.serve_arguments(name, "127.0.0.1:0"), *options]
    async with (
        serving(arguments, stage.log(name)) as process,
        NodeClient(stage.credentials(CLIENT), name, process.address) as client,
    ):
        yield process, client


def prompt(length):
    return [(17 * i + i * i) % 251 for i in range(length)]


def order(session, target, tokens):
    return pb.MigrateRequest(
        session_id=session.session_id,
        token=session.token,
        target_node=TARGET,
        target_address=str(target.address),
        token_ids=tokens,
    )


async def steps(client, session, index, count):
    return [
        (event.index, event.token_id, event.logits)
        async for event in client.generate(session, index, count)
    ]


def test_a_target_killed_in_mid_transfer_leaves_the_session_serving_on_the_source(stage):
    tokens = prompt(2500)

    async def work():
        # The source tries to go on for three quarters of a transfer's lease.
        lease = ("--transfer-lease", "4")
        async with node(stage, SOURCE, *lease) as (_, giving), node(stage, TARGET) as (target, _):
            session = await giving.open("s")
            seen, killed_at = 0, 0.0
            with pytest.raises(PeerAnswerError) as refused:
                async for event in giving.migrate(order(session, target, tokens)):
                    seen = event.progress.computed_tokens
                    if not killed_at and 0 < seen < len(tokens) - 1:
                        os.kill(target.pid, signal.SIGKILL)
                        killed_at = time.monotonic()
            assert killed_at and time.monotonic() - killed_at < bound(10)
            assert seen < len(tokens)
            here = await giving.get("s")
            assert here.token == session.token and here.phase == pb.SESSION_PHASE_ACTIVE
            twin = await giving.append(await giving.open("twin"), tokens)
            index = len(tokens)
            ours = await steps(giving, here, index, 16)
            assert ours == await steps(giving, twin, index, 16) and len(ours) == 16
            return refused.value

    error = run(work())
    assert error.peer_reason == "transfer_failed"
    assert "the session stays on this node" in str(error)


def test_a_target_killed_after_the_move_serves_it_again_when_it_is_restarted(stage):
    tokens = prompt(700)

    async def work():
        async with node(stage, SOURCE) as (_, giving):
            async with node(stage, TARGET) as (target, _):
                async for _ in giving.migrate(order(await giving.open("s"), target, tokens)):
                    pass
                os.kill(target.pid, signal.SIGKILL)
            async with node(stage, TARGET) as (_, taking):
                there = await taking.get("s")
                twin = await giving.append(await giving.open("twin"), tokens)
                ours = await steps(taking, there, 700, 8)
                assert ours == await steps(giving, twin, 700, 8) and len(ours) == 8

    run(work())


def serve(stage, name, *changes):
    arguments = [*stage.serve_arguments(name, "127.0.0.1:0"), *changes]
    return command("node", "serve", *arguments, seconds=bound(20))


def test_a_node_that_cannot_start_says_why_in_one_line(stage, tmp_path):
    (tmp_path / "empty").mkdir()
    cases = {
        "config.json": ("--model", str(tmp_path / "empty")),
        "no-such-model": ("--model", str(tmp_path / "no-such-model")),
        "node-key.pem": ("--credentials", str(tmp_path / "empty")),
        "sqlite:PATH": ("--directory", "redis://x"),
        "HOST:PORT": ("--grpc", "7411"),
        "directory": ("--directory", f"sqlite:{tmp_path / 'no' / 'folder'}"),
    }
    arguments = stage.serve_arguments(SOURCE, "127.0.0.1:0")
    for expected, changes in cases.items():
        assert expected in failed_cleanly(at_once("serve", *arguments, *changes))
    # And one by which everything was imported before.
    start = time.monotonic()
    assert expected in failed_cleanly(serve(stage, SOURCE, *changes))
    assert time.monotonic() - start < bound(10)


def test_a_port_in_use_is_refused_and_the_first_node_serves_on(stage):
    async def work():
        async with node(stage, SOURCE) as (process, client):
            address = str(process.address)
            ran = await asyncio.to_thread(serve, stage, TARGET, "--grpc", address)
            line = failed_cleanly(ran, 1)
            assert address in line and "cannot listen" in line
            assert (await client.describe()).pid == process.pid

    run(work())


def test_a_node_that_was_given_no_model_serves_the_trained_one_and_says_so(stage):
    arguments = stage.serve_arguments(SOURCE, "127.0.0.1:0")
    place = arguments.index("--model")
    process = subprocess.Popen(
        [sys.executable, "-m", "node", "serve", *arguments[:place], *arguments[place + 2 :]],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    said = json.loads(process.stdout.readline())
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=bound(20))
    assert said["model"] == "muse-novels-6m" and "serves muse-novels-6m on" in stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_node_stops_cleanly_on_a_signal(stage, number):
    process = subprocess.Popen(
        [sys.executable, "-m", "node", "serve", *stage.serve_arguments(SOURCE, "127.0.0.1:0")],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    said = json.loads(process.stdout.readline())
    assert said["node"] == SOURCE and said["pid"] == process.pid
    assert said["model"] == stage.model.name
    start = time.monotonic()
    process.send_signal(number)
    _, stderr = process.communicate(timeout=bound(20))
    assert process.returncode == 0 and time.monotonic() - start < bound(5)
    assert "stopped" in stderr and "Traceback" not in stderr


def test_reflection_and_health_answer_those_who_are_pinned(stage):
    from grpc_health.v1 import health_pb2, health_pb2_grpc
    from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

    async def work():
        async with node(stage, SOURCE) as (_, client):
            channel = client._channel
            health = health_pb2_grpc.HealthStub(channel)
            status = await health.Check(health_pb2.HealthCheckRequest(), timeout=5)
            stub = reflection_pb2_grpc.ServerReflectionStub(channel)
            ask = reflection_pb2.ServerReflectionRequest(list_services="")
            names = []
            async for reply in stub.ServerReflectionInfo(iter([ask]), timeout=5):
                names = [one.name for one in reply.list_services_response.service]
            return status.status, names

    status, names = run(work())
    assert status == health_pb2.HealthCheckResponse.SERVING
    assert {"node.v1.Session", "node.v1.Migration"} <= set(names)


def test_enrolling_pinning_and_making_models_are_commands(tmp_path):
    write_key_file(tmp_path / "k.key", generate_key("tests"))
    for name in ("a", "b"):
        ran = command(
            "node", "enroll", "--authority", "ca", "--credentials", name, "--name", name,
            "--tenant-key", "k.key", cwd=tmp_path,
        )  # fmt: skip
        assert ran.returncode == 0 and ran.stdout.strip() == f"{name}/node-cert.pem"
    pinned = command("node", "pin", "--credentials", "a", "--node", "b/node-cert.pem", cwd=tmp_path)
    assert pinned.returncode == 0 and pinned.stdout.startswith("b ")
    again = command("node", "enroll", "--authority", "ca", "--credentials", "a", "--name", "a",
                    cwd=tmp_path)  # fmt: skip
    assert "exists already" in failed_cleanly(again)
    for options, expected in (
        (("--arch", "gpt"), "arch"),
        (("--arch", "cohere2", "--layers", "2"), "layers"),
    ):
        ran = command("node", "model", "tiny", "--out", "m", "--seed", "1", *options, cwd=tmp_path)
        assert expected in failed_cleanly(ran, 2)
