"""A pack that is written straight into a bucket: in parts, forwards, and visible only when whole.

An upload in parts cannot be told not to replace. So it goes under a private name, and then the
service itself gives it its own name by a copy that is conditional.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Iterator
from typing import Final

from kvpack.errors import KvpackError, PublishError
from kvpack.publish import private_name
from node.s3.client import PART_BYTES, Client

#: Parts that wait for the service while the next one is sealed.
_WAITING_MAX: Final = 2


class Upload:
    """A sink (:class:`kvpack.bundle.writer.Sink`) whose bytes go out on a thread of its own."""

    def __init__(self, client: Client, key: str) -> None:
        self._part = bytearray()
        self._parts: queue.Queue[bytes | None] = queue.Queue(_WAITING_MAX)
        self._failure: BaseException | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(client, key), name="s3-upload", daemon=True
        )
        self._thread.start()

    def write(self, data: bytes | memoryview, /) -> int:
        """Take all of ``data``.

        Raises:
            StoreError: The service refused an earlier part.
        """
        self._part += data
        while len(self._part) >= PART_BYTES:
            self._hand_over(bytes(self._part[:PART_BYTES]))
            del self._part[:PART_BYTES]
        return len(data)

    def finish(self) -> None:
        """Send the rest; on return the object is whole and durable.

        Raises:
            StoreError: The service refuses.
        """
        if self._part:
            self._hand_over(bytes(self._part))
        self._hand_over(None)
        self._thread.join()
        self._require_going()

    def abandon(self) -> None:
        """Let the upload fail, so that nothing becomes visible."""
        self._failure = self._failure or PublishError("given up")
        while not self._ended.is_set():
            with contextlib.suppress(queue.Full):
                self._parts.put(None, timeout=0.1)
        self._thread.join()

    def _hand_over(self, part: bytes | None) -> None:
        while True:
            self._require_going()
            with contextlib.suppress(queue.Full):
                self._parts.put(part, timeout=0.1)
                return

    def _require_going(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _pieces(self) -> Iterator[bytes]:
        while (part := self._parts.get()) is not None:
            yield part
        if self._failure is not None:
            # Ending in silence would publish the first half.
            raise self._failure

    def _run(self, client: Client, key: str) -> None:
        try:
            client.upload(key, self._pieces())
        except BaseException as error:  # noqa: BLE001 - raised again by whoever writes
            self._failure = self._failure or error
        finally:
            self._ended.set()


@contextlib.contextmanager
def publish_new(client: Client, key: str) -> Iterator[Upload]:
    """Yield a sink that becomes the object ``key`` when the block ends without an error.

    Raises:
        PublishError: The name exists; nothing is ever replaced.
        StoreError: The service refuses.
    """
    taken = PublishError(
        f"{client.place.url}/{key}: the name exists already, and nothing is ever replaced"
    )
    # Found here, a taken name costs no byte sent. The copy below is what decides.
    if client.head(key) is not None:
        raise taken
    private = private_name()
    upload = Upload(client, private)
    try:
        try:
            yield upload
        except BaseException:
            upload.abandon()
            raise
        upload.finish()
        if not client.copy_new(private, key):
            raise taken
    finally:
        with contextlib.suppress(KvpackError):
            client.delete([private])
