"""What can stand between us and a service: a proxy in front of the real one, and one that lies.

The proxy hands requests on to the real server and, where it is told, answers something else, late,
or half. The liar is the one server here that is not real: no real one lets two creates win now.
"""

from __future__ import annotations

import contextlib
import http.client
import re
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

#: What is to be done with a request, instead of handing it on: it gets the handler, and says
#: whether it has answered.
Fault = Callable[["Handler"], bool]


class Handler(BaseHTTPRequestHandler):
    """One connection to the proxy."""

    protocol_version = "HTTP/1.1"
    server: Proxy

    def handle_any(self) -> None:
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        with self.server.lock:
            self.server.seen.append((self.command, self.path))
            fault = self.server.fault
        if fault is not None and fault(self):
            return
        self.pass_on()

    def pass_on(self, most: int | None = None, *, says_less: bool = False) -> int:
        """Let the real server answer; ``most`` bytes of its body are handed back, then the end.

        With ``says_less`` the head claims that these are all.
        """
        upstream = http.client.HTTPConnection(*self.server.upstream, timeout=30)
        with contextlib.closing(upstream):
            # The Host stays as it was signed.
            upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                upstream.putheader(name, value)
            upstream.endheaders(self.body)
            answer = upstream.getresponse()
            data = answer.read()
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("content-length", "transfer-encoding", "connection", "date"):
                self.send_header(name, value)
        length = answer.getheader("Content-Length") if self.command == "HEAD" else str(len(data))
        self.send_header("Content-Length", str(most) if says_less else length or "0")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data if most is None else data[:most])
        if most is not None:
            self.wfile.flush()
            self.close_connection = True
        return answer.status

    def refuse(self, status: int, code: str = "") -> bool:
        """Answer ``status`` with a body as S3 writes it, which repeats whom we speak for."""
        body = (
            f"<Error><Code>{code}</Code><AWSAccessKeyId>OWNERKEY</AWSAccessKeyId>"
            "<StringToSign>STRING-TO-SIGN</StringToSign></Error>"
        ).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
        return True

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = handle_any

    def log_message(self, *arguments: object) -> None:
        """Nothing on stderr."""


class Proxy(ThreadingHTTPServer):
    """In front of the real server at ``upstream``."""

    daemon_threads = True

    def __init__(self, upstream: tuple[str, int]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.upstream = upstream
        self.fault: Fault | None = None
        self.seen: list[tuple[str, str]] = []
        self.lock = threading.Lock()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that left is what some tests are about."""


@contextlib.contextmanager
def serving(server: ThreadingHTTPServer) -> Iterator[None]:
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


def first(count: int, fault: Fault, command: str = "") -> Fault:
    """``fault`` for the first ``count`` requests (of ``command``), then the real server."""
    left = [count]
    lock = threading.Lock()

    def once(handler: Handler) -> bool:
        if command and handler.command != command:
            return False
        with lock:
            left[0] -= 1
            going = left[0] >= 0
        return going and fault(handler)

    return once


def late(seconds: float) -> Fault:
    """The answer comes that much later."""

    def wait(handler: Handler) -> bool:
        time.sleep(seconds)
        return False

    return wait


def short(handler: Handler) -> bool:
    """The body breaks off in the middle."""
    handler.pass_on(most=7)
    return True


def clipped(handler: Handler) -> bool:
    """A part of what was asked for, sent as if it were all of it."""
    handler.pass_on(most=7, says_less=True)
    return True


def lost(handler: Handler) -> bool:
    """The real server does it; we never hear that it did."""
    upstream = http.client.HTTPConnection(*handler.server.upstream, timeout=30)
    with contextlib.closing(upstream):
        upstream.putrequest(
            handler.command, handler.path, skip_host=True, skip_accept_encoding=True
        )
        for name, value in handler.headers.items():
            upstream.putheader(name, value)
        upstream.endheaders(handler.body)
        upstream.getresponse().read()
    handler.close_connection = True
    return True


class LiarHandler(BaseHTTPRequestHandler):
    """As much of S3 as a trial asks for. Conditions are read by nobody."""

    protocol_version = "HTTP/1.1"
    server: Liar

    def _answer(self, status: int, body: bytes = b"", length: int | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.send_header("ETag", '"x"')
        self.send_header("Last-Modified", self.date_time_string())
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_PUT(self) -> None:
        self.server.objects[urlsplit(self.path).path] = self.rfile.read(
            int(self.headers["Content-Length"])
        )
        self._answer(200)

    def do_HEAD(self) -> None:
        data = self.server.objects.get(urlsplit(self.path).path)
        self._answer(404 if data is None else 200, b"", 0 if data is None else len(data))

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if "list-type" in self.path:
            body = "<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>"
            self._answer(200, body.encode())
        elif path in self.server.objects:
            self._answer(200, self.server.objects[path])
        else:
            self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>")

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        gone = "".join(f"<Deleted>{key}</Deleted>" for key in re.findall("<Key>.*?</Key>", body))
        self._answer(200, f"<DeleteResult>{gone}</DeleteResult>".encode())

    def log_message(self, *arguments: object) -> None:
        """Nothing on stderr."""


class Liar(ThreadingHTTPServer):
    """Lets every create win."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), LiarHandler)
        self.objects: dict[str, bytes] = {}

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"
