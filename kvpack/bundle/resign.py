"""Signing a bundle that is there already: the same objects and manifest, another tail."""

from __future__ import annotations

from collections.abc import Callable

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from kvpack.bundle.footer import Footer
from kvpack.bundle.reader import BundleReader
from kvpack.bundle.writer import BundleWriter, Sink
from kvpack.chunk import open_chunk, parse_chunk
from kvpack.keys import Keyring


def sign_bundle(
    reader: BundleReader,
    keyring: Keyring,
    signer: Ed25519PrivateKey,
    sink: Sink,
    progress: Callable[[int], None] | None = None,
) -> Footer:
    """Write the bundle of ``reader`` again, with a signature block; an earlier one is left out.

    Header, objects and manifest keep their bytes. Every tag is checked before its object is
    signed: a signer vouches for nothing that does not open.

    Args:
        reader: The bundle.
        keyring: The tenant's keys.
        signer: Who signs.
        sink: Where the bytes go; no seek is needed. What was written before an error is worthless.
        progress: Told the bytes of every object that is done.

    Raises:
        AuthenticationError: Something was changed. And everything that reading a bundle raises.
    """
    index = reader.index
    tenant = index.header.tenant
    writer = BundleWriter(sink, keyring.get(tenant, index.header.epoch), index.header_bytes, signer)
    for number, data in enumerate(reader.objects()):
        reference = parse_chunk(data)
        context = index.bindings.require(reference).context(keyring.get(tenant, reference.epoch))
        open_chunk(context, data, f"chunks[{number}]")
        writer.add(data)
        if progress is not None:
            progress(len(data))
    return writer.finish(index.manifest_blob)
