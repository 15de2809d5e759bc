"""Whose keys this node has: one root for each tenant, made when the tenant first comes."""

from __future__ import annotations

import asyncio
import logging
import re
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvpack.errors import LimitError
from kvpack.keys import EpochKey, Keyring, generate_key, load_key_file, write_key_file
from node.binding import PackBinding
from node.files import make_private_folder

if TYPE_CHECKING:
    from engine import Model

log = logging.getLogger(__name__)

#: The tenant of a node that nobody needs a key for.
LOCAL_TENANT: Final = "local"

#: Inside a data folder: one key file for each tenant.
KEYS: Final = "keys"

#: Tenants of one node. Each costs a file and a binding.
TENANTS_MAX: Final = 1024

#: A name that is one path component everywhere, and never a hidden one.
_NAME: Final = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")


class TenantKeys:
    """Key files of a folder, by tenant.

    Args:
        folder: Where they are; made private if it is not there.
        given: The key that this node was enrolled with: its tenant's, whatever lies in the folder.

    Raises:
        CredentialsError: The folder is not private.
        KeyFileError: A file of it cannot be used.
    """

    def __init__(self, folder: Path, given: EpochKey | None = None) -> None:
        make_private_folder(folder)
        self._folder = folder
        self._keys: dict[str, EpochKey] = {}
        if given is not None:
            self._keys[given.tenant] = given
        self.default = given.tenant if given is not None else LOCAL_TENANT
        self.key(self.default)

    def key(self, tenant: str) -> EpochKey:
        """The root of ``tenant``; drawn and written down where there is none yet.

        Raises:
            LimitError: No name of a tenant, or too many tenants.
            KeyFileError: Its file cannot be used.
            PublishError: Its file cannot be written.
        """
        found = self._keys.get(tenant)
        if found is None:
            found = self._keys[tenant] = self._load(tenant)
        return found

    def keyring(self) -> Keyring:
        """Of the tenants that came so far."""
        return Keyring(self._keys.values())

    def _load(self, tenant: str) -> EpochKey:
        if not _NAME.fullmatch(tenant):
            raise LimitError("tenant", "a-z, 0-9, dot, hyphen, underscore", "another name")
        if len(self._keys) >= TENANTS_MAX:
            raise LimitError("tenants", f"at most {TENANTS_MAX}", len(self._keys) + 1)
        path = self._folder / f"{tenant}.key"
        if not path.exists():
            write_key_file(path, generate_key(tenant))
            log.info("tenant %s: a key was made; losing %s loses its packs", tenant, path)
        return load_key_file(path)


class Tenants:
    """What packs of each tenant are bound to, for one model."""

    def __init__(self, model: Model, keys: TenantKeys) -> None:
        self._model = model
        self._keys = keys
        self._bindings: dict[str, PackBinding] = {}
        self._making = threading.Lock()

    @property
    def default(self) -> str:
        """The tenant of calls that need no key."""
        return self._keys.default

    def binding(self, tenant: str) -> PackBinding:
        """That of ``tenant``. Any thread may ask; the first time waits for a disk.

        Raises:
            KvpackError: It has no usable key.
        """
        found = self._bindings.get(tenant)
        if found is None:
            with self._making:
                found = self._bindings.get(tenant)
                if found is None:
                    found = PackBinding.of(self._model, self._keys.key(tenant))
                    self._bindings[tenant] = found
        return found

    async def prepare(self, tenant: str) -> None:
        """Have the binding of ``tenant`` at hand, so that asking for it waits for nothing.

        A new tenant's key is made durable meanwhile: not on the event loop, where a slow disk
        would hold every answer and the lease.

        Raises:
            KvpackError: It has no usable key.
        """
        if tenant not in self._bindings:
            await asyncio.to_thread(self.binding, tenant)

    def keyring(self) -> Keyring:
        """Of the tenants that came so far."""
        return self._keys.keyring()
