"""Everything the demo needs on disk: model, keys, certificates, folders."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvpack.keys import generate_key, write_key_file
from node import enroll
from node.errors import UsageError
from node.files import make_private_folder
from node.handover import copy_tenant_key
from node.tiny import make_tiny_model
from node.trust import Role, pin

SOURCE: Final = "source"
TARGET: Final = "target"
CLIENT: Final = "demo"
TENANT: Final = "demo"

ARCHITECTURE: Final = "muse_glimmer"
LAYERS: Final = 8
#: Window of the tiny model, unless another was asked for.
TINY_WINDOW_TOKENS: Final = 64
SEED: Final = 1

#: What a run leaves in the output folder, so that a later one may replace it.
PACK_NAME: Final = "session.kvpack"
KEY_NAME: Final = "tenant.key"


@dataclass(frozen=True, slots=True)
class Stage:
    """Folders of one run.

    Attributes:
        out: Where pack and key are left.
        work: Everything else; removed at the end unless asked to keep it.
        model: The model folder that both nodes load.
    """

    out: Path
    work: Path
    model: Path

    @property
    def key(self) -> Path:
        """The tenant's key file."""
        return self.out / KEY_NAME

    @property
    def pack(self) -> Path:
        """The saved session."""
        return self.out / PACK_NAME

    def credentials(self, name: str) -> Path:
        """Credentials folder of a node or the client."""
        return self.work / f"{name}-credentials"

    def log(self, name: str) -> Path:
        """Log of a node."""
        return self.work / f"{name}.log"

    def serve_arguments(self, name: str, address: str) -> list[str]:
        """Arguments of ``kvnode serve`` for a node."""
        return [
            "--grpc", address,
            "--model", str(self.model),
            "--data-dir", str(self.work / f"{name}-data"),
            "--credentials", str(self.credentials(name)),
            "--directory", f"sqlite:{self.work / 'directory.sqlite'}",
            # A demonstration may run on any disk, and beside anything.
            "--volume-worst", "5",
        ]  # fmt: skip

    def remove_work(self) -> None:
        """Remove everything but pack and key."""
        shutil.rmtree(self.work, ignore_errors=True)


def set_stage(out: Path, model: Path | None, window_tokens: int | None) -> Stage:
    """Make the folders, the tiny model where none is given, a tenant key and three identities.

    Raises:
        UsageError: ``out`` cannot be used, or the window is outside its range.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        for left in (out / PACK_NAME, out / KEY_NAME):
            left.unlink(missing_ok=True)
        shutil.rmtree(out / "work", ignore_errors=True)
    except OSError as error:
        raise UsageError(f"{out}: {error.strerror}") from error
    work = out.resolve() / "work"
    make_private_folder(work)
    folder = work / "tiny-muse-glimmer" if model is None else model
    # What is no folder is a name in the Hugging Face cache and must stay as it was spelled.
    stage = Stage(out.resolve(), work, folder.resolve() if folder.is_dir() else folder)
    if model is None:
        window = TINY_WINDOW_TOKENS if window_tokens is None else window_tokens
        make_tiny_model(stage.model, ARCHITECTURE, seed=SEED, window=window, layers=LAYERS)
    write_key_file(stage.key, generate_key(TENANT))
    _enroll_all(stage)
    return stage


def _enroll_all(stage: Stage) -> None:
    """Source, target and client, as three machines would: key, certificate, pins, tenant key."""
    authority = stage.work / "authority"
    for name in (SOURCE, TARGET, CLIENT):
        enroll.enroll(authority, stage.credentials(name), name)
    certificates = {
        name: (stage.credentials(name) / enroll.NODE_CERTIFICATE).read_bytes()
        for name in (SOURCE, TARGET, CLIENT)
    }
    for own, other in ((SOURCE, TARGET), (TARGET, SOURCE)):
        pin(stage.credentials(own), certificates[other], Role.NODE)
        pin(stage.credentials(own), certificates[CLIENT], Role.CLIENT)
        pin(stage.credentials(CLIENT), certificates[other], Role.NODE)
        copy_tenant_key(stage.key, stage.credentials(own))
