"""A small HTTP server on loopback that answers for files and batches as the tenant API does, and remembers what it was sent."""

import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

KEY = "weir-key"
SHOWN_BYTES = 512
PIECE_BYTES = 64 * 1024
WAIT_S = 20


def batch_document(**changed: Any) -> dict[str, Any]:
    """A batch that is under way, but for what is named."""
    counts = {"total": changed.pop("total", 10), "completed": changed.pop("completed", 0), "failed": changed.pop("failed", 0)}
    document = {
        "id": "batch_1",
        "object": "batch",
        "endpoint": "/v1/chat/completions",
        "errors": None,
        "input_file_id": "file-1",
        "completion_window": "24h",
        "status": "in_progress",
        "output_file_id": None,
        "error_file_id": None,
        "created_at": 1_700_000_000,
        "in_progress_at": 1_700_000_010,
        "expires_at": 1_700_086_400,
        "request_counts": counts,
        "metadata": {},
        "paused_reason": None,
        "resumes_at": None,
    }
    return document | changed


class BatchStand:
    """What it answers next, and what it was asked. upload_refusal: the answer to an upload, once that many bytes have come."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []
        self.bodies: list[Any] = []
        self.form_size, self.form_digest, self.form_start, self.form_end = 0, "", b"", b""
        self.upload_refusal: tuple[int, int, dict[str, Any]] | None = None
        self.batch_refusal: tuple[int, dict[str, Any]] | None = None
        self.looks: list[dict[str, Any]] = [batch_document()]
        """Of a batch, one an answer; the last stays."""
        self.listed: list[dict[str, Any]] = []
        self.contents: dict[str, bytes] = {}
        self.is_cut = False
        self._server: ThreadingHTTPServer | None = None
        self._thread: threading.Thread | None = None
        self.port = 0

    @property
    def url(self) -> str:
        """Where it is."""
        return f"http://127.0.0.1:{self.port}"

    def open(self) -> None:
        """Begin to answer, at the same port as before."""
        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), type("AskedHere", (Asked,), {"stand": self}))
        self._server.daemon_threads = False
        self.port = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def close(self) -> None:
        """Nobody is there any more."""
        if self._server is not None and self._thread is not None:
            self._server.shutdown()
            self._thread.join(WAIT_S)
            self._server.server_close()
            self._server = None

    def look(self) -> dict[str, Any]:
        """The next answer about a batch."""
        return self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]


@contextmanager
def open_stand() -> Iterator[BatchStand]:
    """One that is there until the end."""
    stand = BatchStand()
    stand.open()
    try:
        yield stand
    finally:
        stand.close()


class Asked(BaseHTTPRequestHandler):
    """One request, on a thread of its own."""

    timeout = WAIT_S
    stand: BatchStand

    def do_GET(self) -> None:
        self._route()

    def do_POST(self) -> None:
        self._route()

    def do_DELETE(self) -> None:
        self._route()

    def log_message(self, *said: Any) -> None:
        """It says nothing."""

    def _route(self) -> None:
        self.stand.asked.append((self.command, self.path))
        path = self.path.partition("?")[0]
        if self.headers.get("authorization") != f"Bearer {KEY}":
            self._answer(401, openai_error("invalid_key", "The key is not valid."))
        elif (self.command, path) == ("POST", "/v1/files"):
            self._take_upload()
        elif path.endswith("/content"):
            self._send_content(self.stand.contents[path.split("/")[3]])
        elif self.command == "DELETE":
            self._answer(200, {"deleted": True})
        elif path == "/v1/batches":
            self._take_batch() if self.command == "POST" else self._list()
        else:
            self._answer(200, self.stand.look())

    def _take_upload(self) -> None:
        left, digest = int(self.headers["content-length"]), hashlib.sha256()
        self.stand.form_size, self.stand.form_start, self.stand.form_end = left, b"", b""
        while left:
            if self.stand.upload_refusal and self.stand.form_size - left >= self.stand.upload_refusal[0]:
                self._refuse_upload(*self.stand.upload_refusal[1:])
                return
            piece = self.rfile.read(min(left, PIECE_BYTES))
            if not piece:
                return
            left -= len(piece)
            digest.update(piece)
            self.stand.form_start = self.stand.form_start or piece[:SHOWN_BYTES]
            self.stand.form_end = piece[-SHOWN_BYTES:]
        self.stand.form_digest = digest.hexdigest()
        self._answer(200, {"id": "file-1", "object": "file", "bytes": self.stand.form_size})

    def _refuse_upload(self, status: int, document: dict[str, Any]) -> None:
        """Answers, and reads on until the other side stops, as a server does that wants to be heard."""
        self._answer(status, document)
        with suppress(OSError):
            while self.rfile.read1(PIECE_BYTES):
                pass

    def _take_batch(self) -> None:
        self.stand.bodies.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        if self.stand.batch_refusal:
            self._answer(*self.stand.batch_refusal)
        else:
            self._answer(200, self.stand.looks[0])

    def _list(self) -> None:
        limit = int(self.path.partition("limit=")[2].partition("&")[0])
        after = self.path.partition("after=")[2]
        ids = [each["id"] for each in self.stand.listed]
        first = ids.index(after) + 1 if after else 0
        self._answer(200, {"data": self.stand.listed[first : first + limit], "has_more": first + limit < len(ids)})

    def _send_content(self, content: bytes) -> None:
        self.send_response(200)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content[: len(content) // 2] if self.stand.is_cut else content)

    def _answer(self, status: int, document: dict[str, Any]) -> None:
        body = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        self.wfile.flush()


def openai_error(code: str, message: str, **members: Any) -> dict[str, Any]:
    """A refusal in OpenAI's shape."""
    return {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": code, **members}}


def in_turn(*acts: Callable[[], None]) -> Callable[[], None]:
    """What happens while a command rests: one act at a time; then nothing."""
    left = list(acts)
    return lambda: left.pop(0)() if left else None
