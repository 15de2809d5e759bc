"""What deploy files may name, asked of the commands and routes themselves."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import click
import yaml

from kvpack.cli.commands import kvpack
from node.cli import main as kvnode
from node.cli_serve import serve_config
from node.config import ServeConfig
from node.http.access import Access
from node.http.routes import ENDPOINTS

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"

PUBLIC = {one.path for one in ENDPOINTS if one.access is Access.PUBLIC and one.method == "GET"}

#: Seconds that a stop may take beside the drain: calls, and cuts that become durable.
STOP_MARGIN_S = 25.0

_PROGRAMS = {"kvpack": kvpack, "kvnode": kvnode}


def documents(path: Path) -> list[dict[str, Any]]:
    """All documents of a YAML file."""
    return [one for one in yaml.safe_load_all(path.read_text()) if one is not None]


def parse(words: list[str]) -> tuple[str, dict[str, Any]]:
    """Let the command itself read ``words``; ``(its name, its parameters)``.

    Fails as the command would: an unknown command, option or value raises a usage error.
    """
    program, *rest = words
    command: click.Command = _PROGRAMS[program.rsplit("/", 1)[-1]]
    context = None
    while isinstance(command, click.Group):
        context = context or click.Context(command, info_name=program)
        name, found, rest = command.resolve_command(context, rest)
        if found is None or (rest and isinstance(found, click.Group) and not rest[0]):
            raise AssertionError(f"{name}: no such command")
        if isinstance(found, click.Group) and (not rest or rest[0].startswith("-")):
            command = found
            break
        command = found
        context = click.Context(command, info_name=name)
    made = command.make_context(command.name, list(rest), resilient_parsing="--help" in rest)
    return made.command_path, made.params


def served(words: list[str]) -> ServeConfig:
    """What ``kvnode serve`` makes of ``words``: options that contradict each other are refused."""
    _, given = parse(["kvnode", *words])
    return serve_config(given, Path(given["model"]))


def commands_in(text: str) -> list[list[str]]:
    """Every ``kvnode …`` and ``kvpack …`` of a shell text, as words."""
    joined = text.replace("\\\n", " ")
    found = []
    for line in joined.splitlines():
        bare = line.strip()
        if bare.startswith("#"):
            continue
        for part in re.split(r"\|+|&&|;|\bthen\b|\bdo\b", bare):
            match = re.search(r"(?:^|[\s\"/(])(kvnode|kvpack)\s+([a-z].*)", part.strip())
            if match:
                words = shlex.split(re.sub(r"[0-9]?>+\s*\S+", "", match[2]), comments=True)
                found.append([match[1], *[word for word in words if word != "&"]])
    return found
