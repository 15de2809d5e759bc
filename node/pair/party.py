"""What a side brings to a pairing, what it makes of the other's offer, and what it will write."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec

from kvpack.keys import load_key_file
from node import certificates, enroll
from node.certificates import Authority
from node.credentials import PinnedPeer, Role, plan_pin
from node.errors import CredentialsError, PairError, PairRefusedError
from node.files import read_private, read_public
from node.pair.agreement import Agreement
from node.pair.messages import Grant, Offer, TenantName
from node.pair.writing import NewFile


@dataclass(frozen=True, slots=True)
class Wish:
    """What the person at this terminal asked for.

    Attributes:
        folder: The credentials folder.
        name: Name to be enrolled by; needed where the folder is not enrolled yet.
        role: What this side is for the other one.
        authority: Folder of an authority that may sign here, or ``None``.
        gives_key: Whether the tenant's key goes to the other side.
        renewed: Whether the other side may be pinned beside an older leaf of its name.
    """

    folder: Path
    name: str | None
    role: Role
    authority: Path | None = None
    gives_key: bool = False
    renewed: bool = False


@dataclass(frozen=True, slots=True)
class Party:
    """This side, ready to pair. Nothing of it is written yet.

    Attributes:
        wish: What was asked for.
        name: Its name.
        certificate_pem: Its leaf, or empty: it asks the other side for one.
        authority_pem: The authority of the leaf, or empty.
        tenant: Whose key it gives, or ``None``.
        key_pem: Its private key.
        signer: The authority if it lies here.
        files: What makes it what it is, as far as that is not on disk yet.
    """

    wish: Wish
    name: str
    certificate_pem: bytes
    authority_pem: bytes
    tenant: TenantName | None
    key_pem: bytes = field(repr=False)
    signer: Authority | None = field(repr=False)
    files: tuple[NewFile, ...] = field(repr=False)

    def offer(self, agreement: Agreement, *, joiner: bool) -> Offer:
        """What it says of itself."""
        key = certificates.load_key(self.key_pem, "key")
        request = b"" if self.certificate_pem else certificates.request_for(key, self.name)
        return Offer(
            name=self.name,
            role=self.wish.role,
            certificate_pem=self.certificate_pem,
            request_pem=request,
            authority_pem=self.authority_pem,
            proof=key.sign(agreement.proof_input(joiner=joiner), ec.ECDSA(hashes.SHA256())),
            tenant=self.tenant,
        )


@dataclass(frozen=True, slots=True)
class Deal:
    """Both offers, checked against each other: what happens once both people agree.

    Attributes:
        party: This side.
        offer: The other side's.
        authority_pem: The authority of both from then on.
        peer_pem: The other side's leaf, its own or the one that is made for it here.
    """

    party: Party
    offer: Offer
    authority_pem: bytes
    peer_pem: bytes

    @property
    def peer(self) -> PinnedPeer:
        """The other side as it will be pinned here."""
        return PinnedPeer.of(self.peer_pem, self.offer.role)

    def describe(self) -> list[str]:
        """For the person: who is there, and what will happen. Holds no secret."""
        key = certificates.key_fingerprint(_holder(self.offer))
        lines = [f"other side   {self.offer.name}, a {self.offer.role.value[:-1]}, key {key[:16]}"]
        if self.offer.request_pem:
            lines.append("it gets      a certificate of the authority here")
        if not self.party.certificate_pem:
            lines.append("you get      a certificate of its authority")
        if self.party.tenant is not None:
            lines.append(f"it gets      {_words(self.party.tenant)}")
        if self.offer.tenant is not None:
            lines.append(f"you get      {_words(self.offer.tenant)}")
        return lines

    def key_question(self) -> str | None:
        """What must be asked apart before the tenant's key is given away."""
        if self.party.tenant is None:
            return None
        return f"Hand {_words(self.party.tenant)} to {self.offer.name}? It opens all its packs."

    def grant(self) -> Grant:
        """What this side hands over. Read at the last moment."""
        wants = bool(self.offer.request_pem)
        key = b""
        if self.party.tenant is not None:
            key = read_private(self.party.wish.folder / enroll.TENANT_KEY)
        return Grant(self.peer_pem if wants else b"", key)

    def files(self, granted: Grant) -> list[NewFile]:
        """What this side writes, in an order in which every beginning is usable or repeatable.

        Raises:
            PairError: The grant is not what was agreed.
            CredentialsError: Its certificate is not for this side's key.
        """
        folder, files = self.party.wish.folder, list(self.party.files)
        if bool(granted.key_file) != (self.offer.tenant is not None):
            raise PairError("grant.key: not what was agreed")
        if granted.key_file:
            files.append(NewFile(folder / enroll.TENANT_KEY, granted.key_file))
        if bool(granted.certificate_pem) == bool(self.party.certificate_pem):
            raise PairError("grant.certificate: not what was agreed")
        if granted.certificate_pem:
            self._check_granted(granted.certificate_pem)
            files.append(NewFile(folder / enroll.AUTHORITY_CERTIFICATE, self.authority_pem))
            files.append(NewFile(folder / enroll.NODE_CERTIFICATE, granted.certificate_pem))
        pin = plan_pin(folder, self.peer, beside_old=self.party.wish.renewed)
        if pin is not None:
            files.append(NewFile(pin, self.peer_pem))
        return files

    def check_written(self) -> None:
        """Read back the key that came.

        Raises:
            PairError: It is not the key that was announced.
            KeyFileError: It is no key file.
        """
        if self.offer.tenant is not None:
            key = load_key_file(self.party.wish.folder / enroll.TENANT_KEY)
            if TenantName(key.tenant, key.epoch) != self.offer.tenant:
                raise PairError("grant.key: of another tenant or epoch than announced")

    def _check_granted(self, certificate_pem: bytes) -> None:
        leaf = certificates.load_leaf(certificate_pem, self.authority_pem, "granted certificate")
        own = certificates.load_key(self.party.key_pem, "key").public_key()
        if leaf.public_key() != own or certificates.common_name(leaf.subject) != self.party.name:
            raise PairError("granted certificate: not for this side's key and name")


def prepare(wish: Wish) -> Party:
    """Read, or make in memory, what this side brings.

    Raises:
        CredentialsError: The folders are not usable.
        KeyFileError: The tenant's key is to be given, and is not usable.
        PairError: There is no name to be enrolled by, or folders contradict what was asked for.
    """
    signer, files = _signer(wish)
    tenant = _tenant(wish) if wish.gives_key else None
    if (wish.folder / enroll.NODE_CERTIFICATE).exists():
        return _enrolled(wish, signer, files, tenant)
    if wish.name is None:
        raise PairError(f"{wish.folder}: not enrolled yet; give the --name that it should have")
    name, key_file = certificates.check_name(wish.name), wish.folder / enroll.NODE_KEY
    # A key that was made by "enroll request" waits for its certificate and is used.
    key_pem = read_private(key_file) if key_file.exists() else certificates.new_key()
    files.append(NewFile(key_file, key_pem))
    certificate_pem, authority_pem = b"", b""
    if signer is not None:
        request = certificates.request_for(certificates.load_key(key_pem, key_file), name)
        certificate_pem = certificates.issue(signer, request)
        authority_pem = signer.certificate_pem
        files.append(NewFile(wish.folder / enroll.AUTHORITY_CERTIFICATE, authority_pem))
        files.append(NewFile(wish.folder / enroll.NODE_CERTIFICATE, certificate_pem))
    return Party(wish, name, certificate_pem, authority_pem, tenant, key_pem, signer, tuple(files))


def settle(party: Party, offer: Offer, agreement: Agreement, *, joiner: bool) -> Deal:
    """Check the other side's offer against what this side is. Writes nothing.

    Args:
        party: This side.
        offer: The other side's.
        agreement: What both hold.
        joiner: Whether this side is the joiner.

    Raises:
        PairError: They do not fit together; the message says how.
        PairRefusedError: The offer's proof is not by its key.
        CredentialsError: A certificate is not usable, or its name is pinned here already.
    """
    _check_proof(offer, agreement.proof_input(joiner=not joiner))
    if offer.name == party.name:
        raise PairError(f"both sides are called {party.name!r}")
    if offer.role is Role.CLIENT and party.wish.role is Role.CLIENT:
        raise PairError("both sides are clients: one of them must be a node")
    if party.tenant is not None and offer.tenant is not None:
        raise PairError("both sides give a tenant key: only one can")
    if offer.tenant is not None and (party.wish.folder / enroll.TENANT_KEY).exists():
        _require_same_tenant(_tenant(party.wish), offer.tenant)
    authority_pem = _common_authority(party, offer)
    peer_pem = _peer_leaf(party, offer, authority_pem)
    plan_pin(party.wish.folder, PinnedPeer.of(peer_pem, offer.role), beside_old=party.wish.renewed)
    return Deal(party, offer, authority_pem, peer_pem)


def _enrolled(
    wish: Wish, signer: Authority | None, files: list[NewFile], tenant: TenantName | None
) -> Party:
    certificate_pem, key_pem = enroll.load_pair(wish.folder)
    authority_pem = read_public(wish.folder / enroll.AUTHORITY_CERTIFICATE)
    leaf = certificates.load_leaf(certificate_pem, authority_pem, enroll.NODE_CERTIFICATE)
    name = certificates.common_name(leaf.subject)
    if wish.name not in (None, name):
        raise PairError(f"{wish.folder}: enrolled as {name!r}, not {wish.name!r}")
    if signer is not None and signer.certificate_pem != authority_pem:
        raise PairError(f"{wish.folder}: enrolled at another authority than {wish.authority}")
    return Party(wish, name, certificate_pem, authority_pem, tenant, key_pem, signer, tuple(files))


def _signer(wish: Wish) -> tuple[Authority | None, list[NewFile]]:
    if wish.authority is None:
        return None, []
    key_file = wish.authority / enroll.AUTHORITY_KEY
    certificate_file = wish.authority / enroll.AUTHORITY_CERTIFICATE
    if key_file.exists() and certificate_file.exists():
        return enroll.load_authority(wish.authority), []
    # A key alone is what a process leaves that was killed between the two files.
    left = read_private(key_file) if key_file.exists() else None
    made = certificates.new_authority(pem=left)
    return made, [NewFile(key_file, made.key_pem), NewFile(certificate_file, made.certificate_pem)]


def _tenant(wish: Wish) -> TenantName:
    key = load_key_file(wish.folder / enroll.TENANT_KEY)
    return TenantName(key.tenant, key.epoch)


def _require_same_tenant(present: TenantName, offered: TenantName) -> None:
    # The root itself is compared when the file would be written.
    if present != offered:
        raise PairError(f"{_words(present)} is here already, and is not replaced")


def _common_authority(party: Party, offer: Offer) -> bytes:
    if party.authority_pem and offer.authority_pem:
        if party.authority_pem != offer.authority_pem:
            raise PairError(
                f"{offer.name} is enrolled at another authority; "
                "one side needs a new credentials folder"
            )
        return party.authority_pem
    if not party.authority_pem and not offer.authority_pem:
        raise PairError("neither side has a certificate: the listener needs --authority")
    return party.authority_pem or offer.authority_pem


def _peer_leaf(party: Party, offer: Offer, authority_pem: bytes) -> bytes:
    if offer.request_pem:
        if party.signer is None:
            raise PairError(f"{offer.name} asks for a certificate, and no --authority was given")
        request = certificates.load_request(offer.request_pem)
        if certificates.request_name(request) != offer.name:
            raise PairError("offer.request: for another name than the offer's")
        return certificates.issue(party.signer, offer.request_pem)
    leaf = certificates.load_leaf(offer.certificate_pem, authority_pem, "the other certificate")
    if certificates.common_name(leaf.subject) != offer.name:
        raise PairError("offer.certificate: for another name than the offer's")
    return offer.certificate_pem


def _holder(offer: Offer) -> certificates.Holder:
    if offer.request_pem:
        return certificates.load_request(offer.request_pem)
    return certificates.load_certificate(offer.certificate_pem, "the other certificate")


def _check_proof(offer: Offer, signed: bytes) -> None:
    key = _holder(offer).public_key()
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise CredentialsError("offer: expected an ECDSA key")
    try:
        key.verify(offer.proof, signed, ec.ECDSA(hashes.SHA256()))
    except InvalidSignature as error:
        raise PairRefusedError("the other side does not hold the key it speaks for") from error


def _words(tenant: TenantName) -> str:
    return f"the tenant key of {tenant.tenant!r}, epoch {tenant.epoch}"
