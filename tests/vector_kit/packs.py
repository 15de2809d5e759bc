"""A whole pack, with a place for a defect at every step."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable
from dataclasses import dataclass, field

from blake3 import blake3
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from tests.vector_kit import wire
from tests.vector_kit.chunks import TENANT, Chunk, Sealed, subkey, u16, u32

SIGNER = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
ROPE = [
    wire.fixed64(1, 0x411E848000000000), wire.number(2, 2), wire.number(3, 2),
    wire.data(4, "none"),
]  # fmt: skip
#: A window of 5, full, a window of 5; one head, keys of 2, values of 3 elements of f16.
SWA = [*(wire.number(n, v) for n, v in enumerate((1, 5, 1, 2, 3), 1)), wire.data(6, b"".join(ROPE))]
FULL = [wire.number(1, 2), wire.number(3, 1), wire.number(4, 2), wire.number(5, 3)]
ROW = 10


def layout(layers: list[list[bytes]] | None = None, encoding: int = 1, tokens: int = 4096) -> bytes:
    """A CacheLayout."""
    found = [SWA, FULL, SWA] if layers is None else layers
    parts = [wire.number(1, encoding), wire.number(2, tokens)]
    return b"".join(parts + [wire.data(3, b"".join(layer)) for layer in found])


def identity(shape: bytes | None = None, tenant: str = TENANT) -> list[bytes]:
    """The fields of an Identity, one by one."""
    constants = [wire.data(1, "scale") + wire.fixed64(2, 0x3FF0000000000000), wire.data(1, "zero")]
    texts = [tenant, b"\x01" * 32, "none", bytes(32), b"\x02" * 32, bytes(32), "abi/1"]
    fields = [wire.data(n, content) for n, content in enumerate(texts, 1)]
    fields.append(wire.data(8, layout() if shape is None else shape))
    return fields + [wire.data(9, constant) for constant in constants]


def noise(name: str, size: int) -> bytes:
    """Rows that no codec shortens."""
    return blake3(name.encode()).digest(length=size)


def chunks(position: int = 9, first: int = 0) -> list[Chunk]:
    """Whole rows and token ids of ``[first, position)``, fewer than 256 tokens."""
    begin, count = max(first, position - 5), position - first
    if count == 0:
        return []
    ids = b"".join(u32(7 * at % 1000) for at in range(first, position))
    held = position - begin
    return [
        Chunk(2, [0, 2], begin, held, noise(f"swa {begin}", 2 * ROW * held)),
        Chunk(1, [1], first, count, noise(f"full {first}", ROW * count)),
        Chunk(3, [], first, count, ids),
    ]


@dataclass
class Pack:
    """A good pack of 9 tokens, unless told otherwise."""

    chunks: list[Chunk] = field(default_factory=chunks)
    position: int = 9
    tenant: str = TENANT
    epoch: int = 1
    identity: list[bytes] = field(default_factory=identity)
    shape: bytes | None = None
    #: Replaced or inserted fields of the manifest: number to its bytes; 0 goes to the end.
    manifest: dict[int, bytes] = field(default_factory=dict)
    order: Callable[[list[bytes]], list[bytes]] = list
    header_edit: Callable[[bytes], bytes] = bytes
    blob_edit: Callable[[bytes], bytes] = bytes  # before the MAC
    blob_after: Callable[[bytes], bytes] = bytes  # after it, under a true footer
    objects_edit: Callable[[list[bytes]], list[bytes]] = list
    references_edit: Callable[[list[bytes]], list[bytes]] = list
    footer_edit: Callable[[bytes], bytes] = bytes  # before the MAC
    file_edit: Callable[[bytes], bytes] = bytes
    signer: Ed25519PrivateKey | None = None
    block_edit: Callable[[bytes], bytes] = bytes

    def build(self) -> tuple[bytes, list[bytes]]:
        """The file, and the plaintext of each chunk in file order."""
        raw = b"".join(self.identity)
        shape = layout() if self.shape is None else self.shape
        model = blake3(b"kvpack/v1/identity\0" + raw).digest()
        sealed = [
            chunk.seal_with(model, blake3(b"kvpack/v1/layout\0" + shape).digest())
            for chunk in self.chunks
        ]
        header = self.header_edit(self._header(raw))
        objects = self.objects_edit([one.stored for one in sealed])
        blob = self._blob(header, sealed, model)
        block = self.block_edit(self._block(header, objects, blob)) if self.signer else b""
        footer = self._footer(header, objects, blob, block)
        whole = b"".join([header, *objects, blob, block, footer])
        return self.file_edit(whole), [one.plain for one in sealed]

    def _header(self, raw: bytes) -> bytes:
        name = self.tenant.encode()
        fixed = bytes.fromhex("894B56500D0A1A0A") + u16(1) + u16(0) + u32(len(raw))
        return fixed + u32(self.epoch) + u16(len(name)) + u16(0) + name + raw

    def _blob(self, header: bytes, sealed: list[Sealed], model: bytes) -> bytes:
        run = wire.number(1, self.position) + wire.number(2, 1)
        numerics = wire.data(1, wire.data(1, "backend") + wire.data(2, "cpu"))
        fields = {
            1: wire.number(1, 1), 2: wire.number(2, 1), 3: wire.number(3, self.position),
            4: wire.data(4, numerics),
            5: wire.data(5, wire.data(1, run) if self.position else b""),
            6: wire.data(6, wire.number(1, 1) + wire.data(2, model)),
        } | self.manifest  # fmt: skip
        last = fields.pop(0, b"")
        references = self.references_edit([one.reference for one in sealed])
        parts = [fields[n] for n in sorted(fields)] + [wire.data(9, one) for one in references]
        message = b"".join([*self.order(parts), last])
        blob = self.blob_edit(b"KVPM\x01\0\0\0" + u32(len(message)) + message)
        key = subkey(self.tenant, self.epoch, "manifest")
        return self.blob_after(blob + hmac.digest(key, header + blob, hashlib.sha256))

    def _block(self, header: bytes, objects: list[bytes], blob: bytes) -> bytes:
        if self.signer is None:
            return b""
        fed = b"kvpack/v1/sig" + blake3(header).digest()
        for one in objects:
            fed += len(one).to_bytes(8, "little") + blake3(one).digest()
        signature = self.signer.sign(fed + blake3(blob).digest())
        return self.signer.public_key().public_bytes_raw() + signature

    def _footer(self, header: bytes, objects: list[bytes], blob: bytes, block: bytes) -> bytes:
        size = sum(map(len, objects))
        total = len(header) + size + len(blob) + len(block) + 72
        footer = b"KVPF" + u16(1) + u16(0) + total.to_bytes(8, "little")
        footer += size.to_bytes(8, "little") + u32(len(objects)) + u32(len(header))
        footer = self.footer_edit(footer + u32(len(blob)) + u32(len(block)))
        key = subkey(self.tenant, self.epoch, "footer")
        return footer + hmac.digest(key, footer + blob[-32:] + block, hashlib.sha256)


def at(offset: int, value: bytes) -> Callable[[bytes], bytes]:
    """An edit that overwrites bytes."""

    def edit(data: bytes) -> bytes:
        place = offset if offset >= 0 else len(data) + offset
        return data[:place] + value + data[place + len(value) :]

    return edit
