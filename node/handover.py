"""The tenant's key on its way into a credentials folder: an explicit step, with a file."""

from __future__ import annotations

from pathlib import Path

from kvpack.keys import load_key_file, write_key_file
from node.enroll import TENANT_KEY


def copy_tenant_key(source: Path, credentials: Path) -> None:
    """Copy a tenant key file into a credentials folder, 0600 from birth, never over another.

    Raises:
        KeyFileError: ``source`` is not a key file that only we can read.
        PublishError: A key is there already.
    """
    write_key_file(credentials / TENANT_KEY, load_key_file(source))
