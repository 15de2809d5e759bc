"""Enrollment: an authority's folder, and one credentials folder for each node or client.

Keys are made where they stay. What travels is a signing request out and a certificate in; both are
public. Renewing takes the same two steps. The new key waits as ``next-key.pem``; replacing the
certificate, one rename, is the moment at which the new pair counts, since a folder's key is
whichever of the two the certificate is for.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from cryptography.hazmat.primitives.asymmetric import ec

from node import certificates
from node.certificates import (
    Authority,
    Now,
    check_name,
    common_name,
    load_certificate,
    load_key,
    utc_now,
)
from node.errors import CredentialsError
from node.files import (
    make_private_folder,
    read_private,
    read_public,
    remove_private,
    rename_private,
    replace_private,
    write_private,
)

AUTHORITY_KEY: Final = "ca-key.pem"
AUTHORITY_CERTIFICATE: Final = "ca-cert.pem"
NODE_KEY: Final = "node-key.pem"
NODE_CERTIFICATE: Final = "node-cert.pem"

#: The tenant's key inside a credentials folder: handed over as a file, by an explicit step.
TENANT_KEY: Final = "tenant.key"

#: A key that waits for its certificate while the present one is still in use.
NEXT_KEY: Final = "next-key.pem"

#: The signing request that was last made here.
REQUEST: Final = "request.pem"


def make_authority(folder: Path, now: Now = utc_now) -> None:
    """Make a new certificate authority in ``folder``: its key and its own certificate.

    Raises:
        CredentialsError: One is there already, or the folder is not private.
    """
    make_private_folder(folder)
    authority = certificates.new_authority(now)
    write_private(folder / AUTHORITY_KEY, authority.key_pem)
    write_private(folder / AUTHORITY_CERTIFICATE, authority.certificate_pem)


def load_authority(folder: Path) -> Authority:
    """Read an authority's folder.

    Raises:
        CredentialsError: None is there, or its files are not usable.
    """
    return Authority(
        certificate_pem=read_public(folder / AUTHORITY_CERTIFICATE),
        key_pem=read_private(folder / AUTHORITY_KEY),
    )


def make_request(folder: Path, name: str) -> bytes:
    """Make a key in ``folder``, where it stays, and return the signing request (PEM) for it.

    A folder whose first key still waits for its certificate gives a request for that key again.

    Raises:
        CredentialsError: It is enrolled already, or the folder is not private.
    """
    check_name(name)
    make_private_folder(folder)
    if (folder / NODE_CERTIFICATE).exists():
        raise CredentialsError(f"{folder / NODE_CERTIFICATE}: exists already; renew it instead")
    return certificates.request_for(_key_or_new(folder / NODE_KEY), name)


def renew_request(folder: Path) -> bytes:
    """Make the next key beside the present one, and return the signing request (PEM) for it.

    Asked again before the certificate came, it gives a request for the same next key.

    Raises:
        CredentialsError: The folder is not enrolled, or its files are not usable.
    """
    certificate_pem, _ = load_pair(folder)
    finish_renewal(folder)
    name = check_name(common_name(load_certificate(certificate_pem, NODE_CERTIFICATE).subject))
    return certificates.request_for(_key_or_new(folder / NEXT_KEY), name)


def sign_request(authority: Path, request_pem: bytes, now: Now = utc_now) -> bytes:
    """Return the certificate (PEM) that the authority in ``authority`` gives for a request.

    Raises:
        CredentialsError: The request is broken, or the authority's files are not usable.
    """
    return certificates.issue(load_authority(authority), request_pem, now)


def accept(folder: Path, certificate_pem: bytes, authority_pem: bytes, now: Now = utc_now) -> str:
    """Take the certificate that an authority made for this folder's key; returns the name.

    Everything is checked before anything is written. From the write of the certificate on the
    new pair is the folder's; repeating the call after a crash finishes it.

    Raises:
        CredentialsError: The certificate is for another key or name, of another authority than
            before, or not valid now.
    """
    leaf = certificates.load_leaf(certificate_pem, authority_pem, "certificate", now)
    _check_key(folder, leaf.public_key())
    known = folder / AUTHORITY_CERTIFICATE
    if not known.exists():
        write_private(known, authority_pem)
    elif read_public(known) != authority_pem:
        raise CredentialsError(f"{known}: another authority than the one given")
    _check_same_name(folder, common_name(leaf.subject))
    replace_private(folder / NODE_CERTIFICATE, certificate_pem)
    finish_renewal(folder)
    return common_name(leaf.subject)


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
    if not (folder / AUTHORITY_CERTIFICATE).exists():
        write_private(folder / AUTHORITY_CERTIFICATE, certificate)


def load_pair(folder: Path) -> tuple[bytes, bytes]:
    """Certificate and the key it is for, both PEM: the present key, or the next one.

    Raises:
        CredentialsError: A file is missing, too open, a link, or neither key is the right one.
    """
    # Twice: a renewal may move both files between two of these reads.
    for _ in range(2):
        present = read_private(folder / NODE_KEY)
        certificate_pem = read_public(folder / NODE_CERTIFICATE)
        public_key = load_certificate(certificate_pem, NODE_CERTIFICATE).public_key()
        if load_key(present, folder / NODE_KEY).public_key() == public_key:
            return certificate_pem, present
        # A renewal that was cut between its two renames.
        if (folder / NEXT_KEY).exists():
            following = read_private(folder / NEXT_KEY)
            if load_key(following, folder / NEXT_KEY).public_key() == public_key:
                return certificate_pem, following
    raise CredentialsError(f"{folder}: the certificate is not for the key beside it")


def finish_renewal(folder: Path) -> None:
    """Give the next key its place if the certificate is for it already; else change nothing."""
    following = folder / NEXT_KEY
    if not following.exists():
        return
    certificate = load_certificate(read_public(folder / NODE_CERTIFICATE), NODE_CERTIFICATE)
    if load_key(read_private(following), following).public_key() == certificate.public_key():
        rename_private(following, folder / NODE_KEY)
        if (folder / REQUEST).exists():
            remove_private(folder / REQUEST)


def _key_or_new(path: Path) -> ec.EllipticCurvePrivateKey:
    if not path.exists():
        write_private(path, certificates.new_key())
    return load_key(read_private(path), path)


def _check_key(folder: Path, public_key: object) -> None:
    waiting = [path for path in (folder / NODE_KEY, folder / NEXT_KEY) if path.exists()]
    if not waiting:
        raise CredentialsError(f"{folder / NODE_KEY}: no key is there; ask for a certificate first")
    for path in waiting:
        if load_key(read_private(path), path).public_key() == public_key:
            return
    raise CredentialsError(f"{folder}: the certificate is not for the key beside it")


def _check_same_name(folder: Path, name: str) -> None:
    present = folder / NODE_CERTIFICATE
    if not present.exists():
        return
    before = common_name(load_certificate(read_public(present), NODE_CERTIFICATE).subject)
    if before != name:
        raise CredentialsError(f"certificate: for {name!r}, expected {before!r}")
