"""Section 8: signatures, for who holds the public key only, and for who holds the root."""

from __future__ import annotations

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from tests.vector_kit.cases.shared import change, component, refused
from tests.vector_kit.chunks import u32
from tests.vector_kit.packs import SIGNER, Pack, at

_ok = refused("ok")
_wrong = refused("not_authentic signature")
_OTHER = Ed25519PrivateKey.from_private_bytes(bytes(range(1, 33)))
_CHANGED = at(-2, b"\xff\xff")


def _body(data: bytes) -> bytes:
    place = data.index(b"KVPC") + 170
    return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


VECTORS = [
    _ok("signature-keyed", "a signed pack, read with the root", Pack(signer=SIGNER)),
    _ok("signature-good", "a signed pack, read with the public key", Pack(signer=SIGNER),
        signed=True),
    _ok("signature-nothing", "a signed pack of position 0", Pack([], 0, signer=SIGNER),
        signed=True),
    _ok("signature-unasked", "a wrong signature, read with the root: it is not asked",
        Pack(signer=SIGNER, block_edit=_CHANGED)),
    _wrong("signature-changed", "a changed signature", Pack(signer=SIGNER, block_edit=_CHANGED),
           signed=True),
    _wrong("signature-other-signer", "another signer", Pack(signer=_OTHER), signed=True),
    _wrong("signature-other-name", "another signer under this public key", Pack(
        signer=_OTHER, block_edit=at(0, SIGNER.public_key().public_bytes_raw())), signed=True),
    _wrong("signature-none", "no signature", Pack(), signed=True),
    _wrong("signature-body", "a changed ciphertext", Pack(signer=SIGNER, file_edit=_body),
           signed=True),
    _wrong("signature-over-less", "a signature over less",
           Pack(signer=SIGNER, block_edit=lambda block: SIGNER.public_key().public_bytes_raw()
                + SIGNER.sign(b"kvpack/v1/sig")), signed=True),
    refused("malformed reference")("signature-reference", "a signed lie about an object",
        Pack(change(0, reference={"content": b"\x07" * 32}), signer=SIGNER), signed=True),
    refused("identity_mismatch chunk.7")("signature-other-model",
        "a signed object of another model", Pack(
            change(0, identity=b"\x07" * 32), signer=SIGNER), signed=True),
    refused("layout_mismatch chunk.7")("signature-other-layout",
        "a signed object of another shape", Pack(
            change(1, layout=b"\x07" * 32), signer=SIGNER), signed=True),
    _ok("signature-only-keys", "signed objects that no root opens: what a signature cannot tell",
        Pack(change(0, seal=b"\x07" * 32, content=b"\x07" * 32), signer=SIGNER,
             footer_edit=bytes, blob_after=at(-2, b"\xff\xff")), signed=True),
    refused("identity_mismatch gate.5")("signature-gate", "a signed manifest of another model",
        Pack(signer=SIGNER, manifest={6: component(1)}), signed=True),
    refused("malformed footer")("signature-short", "a block of 95 bytes, and a footer that says so",
        Pack(signer=SIGNER, block_edit=lambda block: block[:-1]), signed=True),
    refused("not_authentic footer.mac")(
        "signature-replaced", "another signature, read with the root",
        Pack(signer=SIGNER, file_edit=at(-80, u32(7)))),
]  # fmt: skip
