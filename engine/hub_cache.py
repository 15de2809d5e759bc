"""A repository id, looked up in the local Hugging Face cache. Nothing is ever downloaded.

The cache holds, for ``owner/name``, a folder ``models--owner--name`` with ``refs/REVISION``, a text
file with a commit, and ``snapshots/COMMIT``, a model folder of links into ``blobs``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from engine.errors import ModelFolderError

_NAME: Final = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
_ID: Final = re.compile(rf"({_NAME}/{_NAME})(?:@({_NAME}(?:/{_NAME})*))?")
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")

#: The branch that an id without a revision means.
DEFAULT_REVISION: Final = "main"


@dataclass(frozen=True, slots=True)
class FoundModel:
    """Where a model is, and what it is called.

    Attributes:
        folder: An existing folder.
        name: The folder's name or the repository's id; a label, never identity.
    """

    folder: Path
    name: str


def find_model(model: Path, cache: Path) -> FoundModel:
    """The folder that ``model`` means: a folder, else ``owner/name`` or ``owner/name@revision``.

    Args:
        model: What the user gave; a folder that exists wins over an id of the same spelling.
        cache: The Hugging Face cache's folder.

    Raises:
        ModelFolderError: One line that says where was looked.
    """
    if model.is_dir():
        return FoundModel(model, model.resolve().name)
    match = _ID.fullmatch(model.as_posix())
    if match is None:
        raise ModelFolderError(
            f"{model}: not a folder; expected one that holds a model, or OWNER/NAME of one in the "
            "local Hugging Face cache"
        )
    repository, revision = match[1], match[2] or DEFAULT_REVISION
    kept = cache / f"models--{repository.replace('/', '--')}"
    if not kept.is_dir():
        raise ModelFolderError(
            f"{model}: not a folder, and not in the local Hugging Face cache: no {kept} "
            f"(nothing is downloaded; fetch it first: hf download {repository})"
        )
    snapshot = kept / "snapshots" / _commit(model, kept, revision)
    if not snapshot.is_dir():
        raise ModelFolderError(f"{model}: the local Hugging Face cache has no {snapshot}")
    return FoundModel(snapshot, repository)


def _commit(model: Path, kept: Path, revision: str) -> str:
    """The commit that ``revision`` stands for: itself, or what its ref says."""
    if _COMMIT.fullmatch(revision):
        return revision
    reference = kept / "refs" / revision
    try:
        commit = reference.read_text("ascii").strip()
    except (OSError, ValueError) as error:
        raise ModelFolderError(
            f"{model}: revision {revision} is not in the local Hugging Face cache: no {reference}"
        ) from error
    if not _COMMIT.fullmatch(commit):
        # It becomes part of a path.
        raise ModelFolderError(f"{reference}: expected a commit of 40 hexadecimal digits")
    return commit
