"""Opening a store in a bucket, and making one."""

from __future__ import annotations

from kvpack.store.opening import FORMAT, check_format
from node.config import aws_environment
from node.s3.client import Client
from node.s3.place import S3Place
from node.s3.settings import settings_from
from node.s3.store import S3Store


def open_s3(url: str, create: bool = False) -> S3Store:
    """The store at ``s3://BUCKET/PREFIX``. What kvpack's entry point ``s3`` gives.

    Args:
        url: Where.
        create: Make a store where there is none yet; the bucket must be there.

    Raises:
        StoreUnsafeError: The service lets two creates of one name win. Asked before the first byte
            is written.
        StoreDeniedError: No credentials, or not for this.
        StoreAwayError: The service does not answer.
        FormatError: There is no store here, or the URL is none; also VersionError, StoreError.
    """
    store = place_at(url)
    try:
        if create:
            store.make(FORMAT)
        check_format(store.read_format(len(FORMAT)))
    except BaseException:
        store.close()
        raise
    return store


def place_at(url: str) -> S3Store:
    """A place that need not be a store yet: to ask what its service does.

    Raises:
        StoreError: The URL or the settings are no good; also StoreDeniedError.
    """
    place = S3Place.parse(url)
    environment, home = aws_environment()
    return S3Store(Client(place, settings_from(environment, home)))
