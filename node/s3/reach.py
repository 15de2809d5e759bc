"""What kvpack's entry point ``s3`` gives: stores and packs at ``s3://BUCKET/…``."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager

from kvpack.bundle.writer import Sink
from kvpack.store.errors import StoreError
from kvpack.store.opening import FORMAT, check_format
from kvpack.store.probe import THOROUGH, ProbeEffort, ProbeReport
from node.config import aws_environment
from node.s3.client import Client
from node.s3.place import S3Place
from node.s3.settings import settings_from
from node.s3.store import S3Store
from node.s3.upload import publish_new


class S3:
    """See :class:`kvpack.store.places.Reach`. Holds nothing: each call asks the standard chain."""

    def open(self, url: str, create: bool = False) -> S3Store:
        """The store at ``s3://BUCKET/PREFIX``.

        Args:
            url: Where.
            create: Make a store where there is none yet; the bucket must be there.

        Raises:
            StoreUnsafeError: The service lets two creates of one name win. Asked before the first
                byte is written.
            StoreDeniedError: No credentials, or not for this.
            StoreAwayError: The service does not answer.
            FormatError: There is no store here; also VersionError, StoreError.
        """
        store = S3Store(_client(S3Place.parse(url)))
        try:
            if create:
                store.make(FORMAT)
            check_format(store.read_format(len(FORMAT)))
        except BaseException:
            store.close()
            raise
        return store

    def probe(self, url: str, effort: ProbeEffort = THOROUGH) -> ProbeReport:
        """Try whether the service can keep packs below ``url``. There need not be a store.

        Raises:
            StoreUnsafeError: It cannot; says why. StoreError: It cannot be asked.
        """
        with contextlib.closing(S3Store(_client(S3Place.parse(url)))) as store:
            return store.probe(effort)

    def publish_new(self, url: str) -> AbstractContextManager[Sink]:
        """A sink that becomes the object ``url``, which must not be there."""
        client, key = _object(url)
        return publish_new(client, key)

    def link(self, url: str, lifetime_s: int) -> str:
        """A URL by which anybody can read the object at ``url`` for so long.

        Raises:
            StoreError: No such object.
        """
        client, key = _object(url)
        if client.head(key) is None:
            raise StoreError(f"{client.place.url}/{key}: no such object")
        return client.signed_url(key, lifetime_s)


def _client(place: S3Place) -> Client:
    environment, home = aws_environment()
    return Client(place, settings_from(environment, home))


def _object(url: str) -> tuple[Client, str]:
    """The client of the folder that an object lies in, and its name there.

    Raises:
        StoreError: The URL names a bucket and nothing in it.
    """
    place = S3Place.parse(url)
    folder, _, key = place.prefix.rpartition("/")
    if not key:
        raise StoreError(f"{place.url}: expected s3://BUCKET/KEY")
    return _client(S3Place(place.bucket, folder)), key
