"""Certificates: an authority, and one key and certificate for each node or client.

Keys are made where they stay. What travels is a signing request out and a certificate in; both are
public. Every certificate is ECDSA P-256, which is also what shuts TLS 1.2 off
(:func:`node.config.prepare_process`).
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from node.errors import CredentialsError
from node.files import make_private_folder, read_private, read_public, write_private

AUTHORITY_KEY: Final = "ca-key.pem"
AUTHORITY_CERTIFICATE: Final = "ca-cert.pem"
NODE_KEY: Final = "node-key.pem"
NODE_CERTIFICATE: Final = "node-cert.pem"

#: A pinned leaf says who a peer is; the authority only says that somebody enrolled it.
AUTHORITY_DAYS: Final = 3650
LEAF_DAYS: Final = 365

#: Clocks of two machines may differ by this much.
_CLOCK_SKEW: Final = datetime.timedelta(minutes=10)

_NAME: Final = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")

Now = Callable[[], datetime.datetime]


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


def make_authority(folder: Path, now: Now = utc_now) -> None:
    """Make a new certificate authority in ``folder``: its key and its own certificate.

    Raises:
        CredentialsError: One is there already, or the folder is not private.
    """
    make_private_folder(folder)
    key = ec.generate_private_key(ec.SECP256R1())
    name = _common_name("kvpack authority")
    certificate = (
        _builder(name, name, key.public_key(), AUTHORITY_DAYS, now)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(signs_certificates=True), critical=True)
        .sign(key, hashes.SHA256())
    )
    write_private(folder / AUTHORITY_KEY, _key_pem(key))
    write_private(folder / AUTHORITY_CERTIFICATE, _pem(certificate))


def make_request(folder: Path, name: str) -> bytes:
    """Make a key in ``folder``, where it stays, and return the signing request (PEM) for it.

    Raises:
        CredentialsError: A key is there already, or the folder is not private.
    """
    check_name(name)
    make_private_folder(folder)
    key = ec.generate_private_key(ec.SECP256R1())
    write_private(folder / NODE_KEY, _key_pem(key))
    request = x509.CertificateSigningRequestBuilder().subject_name(_common_name(name))
    return request.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def sign_request(authority: Path, request_pem: bytes, now: Now = utc_now) -> bytes:
    """Return the certificate (PEM) that the authority in ``authority`` gives for a request.

    Raises:
        CredentialsError: The request is broken, or the authority's files are not usable.
    """
    request = _load_request(request_pem)
    key = load_key(read_private(authority / AUTHORITY_KEY), authority / AUTHORITY_KEY)
    issuer = load_certificate(read_public(authority / AUTHORITY_CERTIFICATE), "authority")
    name = check_name(common_name(request.subject))
    public_key = request.public_key()
    if not isinstance(public_key, ec.EllipticCurvePublicKey):
        raise CredentialsError("signing request: expected an ECDSA key")
    usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    certificate = (
        _builder(request.subject, issuer.subject, public_key, LEAF_DAYS, now)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .sign(key, hashes.SHA256())
    )
    return _pem(certificate)


def enroll(authority: Path, folder: Path, name: str, now: Now = utc_now) -> None:
    """Both sides of an enrollment on one machine. Makes the authority where there is none yet.

    Raises:
        CredentialsError: ``folder`` is enrolled already, or a folder or file is not usable.
    """
    check_name(name)
    if not (authority / AUTHORITY_KEY).exists():
        make_authority(authority, now)
    request = make_request(folder, name)
    write_private(folder / NODE_CERTIFICATE, sign_request(authority, request, now))
    certificate = read_public(authority / AUTHORITY_CERTIFICATE)
    write_private(folder / AUTHORITY_CERTIFICATE, certificate)


def load_certificate(pem: bytes, where: str) -> x509.Certificate:
    """Parse one PEM certificate.

    Raises:
        CredentialsError: It is not one.
    """
    try:
        return x509.load_pem_x509_certificate(pem)
    except ValueError as error:
        raise CredentialsError(f"{where}: not a certificate in PEM") from error


def load_key(pem: bytes, where: Path) -> ec.EllipticCurvePrivateKey:
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


def _load_request(pem: bytes) -> x509.CertificateSigningRequest:
    try:
        request = x509.load_pem_x509_csr(pem)
        # The signature shows that whoever asks holds the private key.
        signed = request.is_signature_valid
    except ValueError as error:
        raise CredentialsError("signing request: not one in PEM, or with a broken key") from error
    if not signed:
        raise CredentialsError("signing request: its signature does not match its key")
    return request


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


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
