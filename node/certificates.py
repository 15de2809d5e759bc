"""Certificates as values: keys, signing requests, and what an authority makes of them.

No file is read or written here. Every key is ECDSA P-256, which is also what shuts TLS 1.2 off
(:func:`node.config.prepare_process`).
"""

from __future__ import annotations

import datetime
import functools
import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from node.errors import CredentialsError

#: A pinned leaf says who a peer is; the authority only says that somebody enrolled it.
AUTHORITY_DAYS: Final = 3650
LEAF_DAYS: Final = 365

#: Clocks of two machines may differ by this much.
_CLOCK_SKEW: Final = datetime.timedelta(minutes=10)

_NAME: Final = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")

Holder = x509.CertificateSigningRequest | x509.Certificate
Now = Callable[[], datetime.datetime]


@dataclass(frozen=True, slots=True)
class Authority:
    """An authority that can sign: its own certificate and its key, both PEM."""

    certificate_pem: bytes
    key_pem: bytes = field(repr=False)


def utc_now() -> datetime.datetime:
    """The present moment, in UTC."""
    return datetime.datetime.now(datetime.UTC)


def check_name(name: str) -> str:
    """Return ``name`` if it can stand in a certificate: one DNS label, lower case.

    Raises:
        CredentialsError: It cannot.
    """
    if not _NAME.fullmatch(name):
        raise CredentialsError(f"name {name!r}: expected 1 to 63 of a-z, 0-9 and inner hyphens")
    return name


def new_authority(now: Now = utc_now, pem: bytes | None = None) -> Authority:
    """A new authority: its key (or the one given as PEM) and its own certificate."""
    key = load_key(new_key() if pem is None else pem, "authority's key")
    name = _common_name("kvpack authority")
    certificate = (
        _builder(name, name, key.public_key(), AUTHORITY_DAYS, now)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(signs_certificates=True), critical=True)
        .sign(key, hashes.SHA256())
    )
    return Authority(_pem(certificate), key_pem(key))


def new_key() -> bytes:
    """A new private key, PEM."""
    return key_pem(ec.generate_private_key(ec.SECP256R1()))


def request_for(key: ec.EllipticCurvePrivateKey, name: str) -> bytes:
    """The signing request (PEM) by which the holder of ``key`` asks to be called ``name``."""
    request = x509.CertificateSigningRequestBuilder().subject_name(_common_name(check_name(name)))
    return request.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def issue(authority: Authority, request_pem: bytes, now: Now = utc_now) -> bytes:
    """The certificate (PEM) that the authority gives for a request.

    Raises:
        CredentialsError: The request is broken, or the authority's key is.
    """
    request = load_request(request_pem)
    key = load_key(authority.key_pem, "authority's key")
    issuer = load_certificate(authority.certificate_pem, "authority")
    if issuer.public_key() != key.public_key():
        raise CredentialsError("authority: the certificate is not for the key beside it")
    name = request_name(request)
    usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    certificate = (
        _builder(_common_name(name), issuer.subject, _public_key(request), LEAF_DAYS, now)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .sign(key, hashes.SHA256())
    )
    return _pem(certificate)


def load_request(pem: bytes) -> x509.CertificateSigningRequest:
    """Parse one PEM signing request, and check that whoever made it holds its key.

    Raises:
        CredentialsError: It is not one, or its signature is not by its key.
    """
    try:
        request = x509.load_pem_x509_csr(pem)
        signed = request.is_signature_valid
    except ValueError as error:
        raise CredentialsError("signing request: not one in PEM, or with a broken key") from error
    if not signed:
        raise CredentialsError("signing request: its signature does not match its key")
    return request


def request_name(request: x509.CertificateSigningRequest) -> str:
    """The name that a request asks for."""
    return check_name(common_name(request.subject))


@functools.lru_cache(maxsize=256)
def load_certificate(pem: bytes, where: str) -> x509.Certificate:
    """Parse one PEM certificate.

    Raises:
        CredentialsError: It is not one.
    """
    try:
        return x509.load_pem_x509_certificate(pem)
    except ValueError as error:
        raise CredentialsError(f"{where}: not a certificate in PEM") from error


def load_leaf(pem: bytes, authority_pem: bytes, where: str, now: Now = utc_now) -> x509.Certificate:
    """Parse a leaf, and check that this authority made it and that it is valid now.

    Raises:
        CredentialsError: Not a certificate, of another authority, expired, or not yet valid.
    """
    leaf = load_certificate(pem, where)
    try:
        leaf.verify_directly_issued_by(load_certificate(authority_pem, "authority"))
    except (ValueError, TypeError, InvalidSignature) as error:
        raise CredentialsError(f"{where}: not made by that authority") from error
    check_name(common_name(leaf.subject))
    why = not_valid_because(leaf, now())
    if why is not None:
        raise CredentialsError(f"{where}: {why}")
    return leaf


def not_valid_because(certificate: x509.Certificate, moment: datetime.datetime) -> str | None:
    """Why the certificate is not valid at ``moment``, or ``None`` if it is."""
    if moment > certificate.not_valid_after_utc:
        return f"expired on {certificate.not_valid_after_utc:%Y-%m-%d %H:%M} UTC"
    if moment < certificate.not_valid_before_utc:
        return f"not valid before {certificate.not_valid_before_utc:%Y-%m-%d %H:%M} UTC"
    return None


def load_key(pem: bytes, where: Path | str) -> ec.EllipticCurvePrivateKey:
    """Parse one PEM private key.

    Raises:
        CredentialsError: It is not an unencrypted ECDSA key.
    """
    try:
        key = serialization.load_pem_private_key(pem, password=None)
    except (ValueError, TypeError) as error:
        raise CredentialsError(f"{where}: not an unencrypted private key in PEM") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise CredentialsError(f"{where}: expected an ECDSA key")
    return key


def common_name(subject: x509.Name) -> str:
    """The one common name of ``subject``.

    Raises:
        CredentialsError: It has none, or several.
    """
    values = subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    if len(values) != 1 or not isinstance(values[0].value, str):
        raise CredentialsError("certificate: expected exactly one common name")
    return values[0].value


@functools.lru_cache(maxsize=256)
def leaf_digest(certificate_pem: bytes) -> bytes:
    """SHA-256 of the certificate's DER.

    Raises:
        CredentialsError: Not a certificate.
    """
    certificate = load_certificate(certificate_pem, "certificate")
    return hashlib.sha256(certificate.public_bytes(serialization.Encoding.DER)).digest()


def key_fingerprint(key: Holder) -> str:
    """SHA-256 of the public key (DER), in hexadecimal: two people can compare it by voice."""
    der = _public_key(key).public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return hashlib.sha256(der).hexdigest()


def key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    """The private key as PEM, unencrypted: its file is 0600 and never leaves the machine."""
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def _public_key(holder: Holder) -> ec.EllipticCurvePublicKey:
    key = holder.public_key()
    if not isinstance(key, ec.EllipticCurvePublicKey) or key.curve.name != "secp256r1":
        raise CredentialsError("signing request or certificate: expected an ECDSA P-256 key")
    return key


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    public_key: ec.EllipticCurvePublicKey,
    days: int,
    now: Now,
) -> x509.CertificateBuilder:
    start = now()
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(start - _CLOCK_SKEW)
        .not_valid_after(start + datetime.timedelta(days=days))
    )


def _key_usage(signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _common_name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)
