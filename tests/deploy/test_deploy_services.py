"""systemd, launchd and Homebrew: read by their own tools where those are here, and by ours."""

from __future__ import annotations

import configparser
import hashlib
import importlib.util
import plistlib
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from deploy_support import DEPLOY, STOP_MARGIN_S, served

UNIT = DEPLOY / "systemd" / "kvnode.service"
AGENT = DEPLOY / "launchd" / "dev.kvpack.kvnode.plist"
PROGRAM = "/opt/kvpack/bin/kvnode"


def unit() -> configparser.ConfigParser:
    read = configparser.ConfigParser(strict=False, interpolation=None)
    read.optionxform = str
    read.read_string(UNIT.read_text().replace("\\\n", " "))
    return read


@pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed here"
)
def test_systemd_finds_nothing_to_say_about_the_unit(tmp_path):
    # The program is not installed here, which is all that may be another: an unknown key only
    # warns, so any output is a failure.
    copy = tmp_path / UNIT.name
    copy.write_text(UNIT.read_text().replace(PROGRAM, "/bin/true"))
    ran = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(copy)],
        capture_output=True, text=True, timeout=30,
    )  # fmt: skip
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")
    copy.write_text(copy.read_text() + "Nonsense=yes\n")
    spoilt = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(copy)],
        capture_output=True, text=True, timeout=30,
    )  # fmt: skip
    assert "Nonsense" in spoilt.stderr


def test_the_unit_starts_a_node_and_waits_for_its_drain():
    service = unit()["Service"]
    program, *words = shlex.split(service["ExecStart"])
    assert program == PROGRAM
    config = served(words)
    assert float(service["TimeoutStopSec"]) >= config.http.drain_s + STOP_MARGIN_S
    state = Path("/var/lib") / service["StateDirectory"]
    directory = Path(config.directory_url.removeprefix("sqlite:"))
    for path in (config.data_dir, config.credentials_dir, directory):
        assert path.is_relative_to(state), f"{path} cannot be written"
    assert not config.model_dir.is_relative_to("/home")
    assert service["Type"] == "notify"
    assert service["RestartPreventExitStatus"] == "2"


def test_the_unit_is_hardened():
    service = unit()["Service"]
    for key in ("DynamicUser", "NoNewPrivileges", "ProtectHome", "PrivateTmp", "PrivateDevices"):
        assert service[key] == "yes", key
    assert service["ProtectSystem"] == "strict"
    assert service["CapabilityBoundingSet"] == ""
    # Without the first one nothing could be notified.
    assert "AF_UNIX" in service["RestrictAddressFamilies"].split()


def test_the_agent_starts_a_node_and_leaves_one_alone_that_was_told_to_stop(tmp_path):
    with AGENT.open("rb") as source:
        agent = plistlib.load(source)
    assert f"{agent['Label']}.plist" == AGENT.name
    assert agent["KeepAlive"] == {"SuccessfulExit": False}
    assert agent["Umask"] == 0o077
    shell, option, text = agent["ProgramArguments"]
    assert (shell, option) == ("/bin/sh", "-c")
    told = tmp_path / "kvnode"
    told.write_text('#!/bin/sh\nprintf "%s\\n" "$@" > "$HOME/words"\n')
    told.chmod(0o755)
    (tmp_path / "Library" / "Logs").mkdir(parents=True)
    home = {"HOME": str(tmp_path), "KVNODE": str(told), "PATH": "/usr/bin:/bin"}
    ran = subprocess.run(
        [shell, option, text], env=home, capture_output=True, text=True, timeout=10
    )
    assert ran.returncode == 0, ran.stderr
    config = served((tmp_path / "words").read_text().splitlines())
    assert config.data_dir == tmp_path / "Library" / "Application Support" / "kvpack" / "node"
    assert agent["ExitTimeOut"] >= config.http.drain_s + STOP_MARGIN_S


def renderer():
    path = DEPLOY / "homebrew" / "render.py"
    spec = importlib.util.spec_from_file_location("homebrew_render", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_formula_is_of_its_sdist_and_its_service_is_a_node(tmp_path):
    sdist = tmp_path / "kvpack-1.2.3.tar.gz"
    sdist.write_bytes(b"an sdist")
    made = renderer().render(
        sdist, "https://example.org/kvpack-1.2.3.tar.gz", "https://example.org"
    )
    assert not re.search(r"@[A-Z0-9]+@", made)
    assert f'sha256 "{hashlib.sha256(b"an sdist").hexdigest()}"' in made
    assert 'version "1.2.3"' in made
    run = re.search(r"run \[(.*?)\]", made, re.DOTALL)[1]
    words = [
        f"/opt/homebrew/var/{path}" if path else word
        for path, word in re.findall(r'var/"([^"]+)"|"([^"]+)"', run.split(",", 1)[1])
    ]
    config = served(words)
    assert config.http.address.port == 8080
    if shutil.which("ruby"):
        formula = tmp_path / "kvpack.rb"
        formula.write_text(made)
        subprocess.run(["ruby", "-c", str(formula)], check=True, timeout=20)


@pytest.mark.parametrize(
    ("name", "url"),
    [("other-1.2.3.tar.gz", "https://a.org"), ("kvpack-1.2.3.tar.gz", 'https://a.org/"; evil')],
)
def test_no_formula_is_made_of_another_file_or_a_url_that_ends_its_quotes(tmp_path, name, url):
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(ValueError, match="expected"):
        renderer().render(tmp_path / name, url, "https://example.org")
