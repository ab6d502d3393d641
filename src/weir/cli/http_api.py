"""How a command reaches a running cell: which address and key, one HTTP request, failures as one sentence.

Only the standard library is used, so that a command starts quickly. Every wait and every body is bounded; a key is sent in a
header and never shown.
"""

import http.client
import inspect
import json
import re
import secrets
import select
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar
from urllib.parse import quote, urlencode, urlsplit

import typer

from weir.cli.tables import plain

ANSWER_BYTES_MAX = 64 * 1024 * 1024
"""A usage report of as many groups as are allowed fits; more is a mistake."""

PIECE_BYTES = 256 * 1024
"""What is held of a file at a time, either way."""

DEFAULT_WAIT_S = 30.0
"""An administrative write answers within seconds; half a minute covers a loaded machine."""

_REFUSED = "The request was refused."
_PRINTABLE = re.compile(r"[!-~]+")
_HOST_CHARS_MAX = 253
_LABEL_CHARS_MAX = 63

P = ParamSpec("P")
C = TypeVar("C")


class CommandFailed(Exception):
    """The command cannot go on; its text is one sentence for the person at the terminal."""


class Refused(CommandFailed):
    """The other side answered, and the answer is no. status: of HTTP."""

    def __init__(self, sentence: str, status: int) -> None:
        super().__init__(sentence)
        self.status = status


@dataclass(frozen=True, slots=True)
class Streamed:
    """A request's body that is sent as it is read. size: of all pieces together, in bytes."""

    pieces: Iterable[bytes]
    size: int
    content_type: str


@dataclass(frozen=True, slots=True)
class Connection:
    """An HTTP API and the key for it, stripped. wait_s: bound of each wait for the other side, in seconds.

    Raises CommandFailed, which shows neither, for an address or a key that cannot be one.
    """

    url: str
    key: str
    wait_s: float = DEFAULT_WAIT_S

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", self.key.strip())
        if not _PRINTABLE.fullmatch(self.key):
            raise CommandFailed("The key is not one: a key is a word of printable ASCII characters.")
        if not _is_address(self.url):
            raise CommandFailed("The address is not one: it is of the form http://HOST:PORT.")

    def call(self, method: str, path: str, body: Any = None, query: dict[str, str | None] | None = None) -> Any:
        """One request; the parsed JSON of a 2xx answer. Raises CommandFailed, and of it Refused where that is the answer."""
        with self.exchange(method, _with_query(path, query), body) as answer:
            return _parsed(answer)

    def download(self, path: str, query: dict[str, str | None] | None = None) -> bytes:
        """The body of a 2xx answer to a GET, as it is. Raises CommandFailed."""
        with self.exchange("GET", _with_query(path, query)) as answer:
            return _body(answer) if answer.status < http.client.MULTIPLE_CHOICES else _parsed(answer)

    def pieces(self, path: str) -> Iterator[bytes]:
        """The same, piece by piece; of any size. Raises CommandFailed, also where the body is cut off."""
        with self.exchange("GET", path) as answer:
            if answer.status >= http.client.MULTIPLE_CHOICES:
                _parsed(answer)
            while piece := answer.read(PIECE_BYTES):
                yield piece
            if answer.length:
                raise http.client.IncompleteRead(b"", answer.length)

    @contextmanager
    def exchange(self, method: str, path: str, body: Any = None) -> Iterator[http.client.HTTPResponse]:
        """One request and its open answer, closed at the end. Raises CommandFailed when nobody answers.

        body: a document for JSON, or a Streamed.
        """
        parts = urlsplit(self.url)
        assert parts.hostname is not None
        opener = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        headers = {"authorization": f"Bearer {self.key}", "accept": "application/json, text/event-stream"}
        link = opener(parts.hostname, parts.port, timeout=self.wait_s)
        target = parts.path.rstrip("/") + path
        try:
            if isinstance(body, Streamed):
                _send_streamed(link, method, target, headers, body)
            else:
                more = {} if body is None else {"content-type": "application/json"}
                link.request(method, target, None if body is None else json.dumps(body), headers | more)
            yield link.getresponse()
        except (OSError, http.client.HTTPException) as fault:
            reason = getattr(fault, "strerror", None) or type(fault).__name__
            raise CommandFailed(f"No usable answer from {self.url} ({reason}); is the cell running?") from fault
        finally:
            link.close()


def _send_streamed(link: http.client.HTTPConnection, method: str, target: str, headers: dict[str, str], body: Streamed) -> None:
    """Sends until an answer begins: who refuses a body need not read it to its end."""
    more = {"content-type": body.content_type, "content-length": str(body.size)}
    try:
        link.request(method, target, _until_answered(link, body.pieces), headers | more)
    except TimeoutError:
        raise
    except OSError:
        if link.sock is None:  # nobody was there
            raise


def _until_answered(link: http.client.HTTPConnection, pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Of what is encrypted it cannot be seen whether it is an answer; there the end of the link tells."""
    answers = None if isinstance(link, http.client.HTTPSConnection) else select.poll()
    if answers is not None:
        answers.register(link.sock, select.POLLIN)
    for piece in pieces:
        if answers is not None and answers.poll(0):
            return
        yield piece


def _is_address(url: str) -> bool:
    """Whether this is an http or https URL without credentials, query or fragment."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname or "", parts.port
    except ValueError:
        return False
    plain = not (parts.username or parts.password or parts.query or parts.fragment)
    return bool(_PRINTABLE.fullmatch(url)) and parts.scheme in ("http", "https") and _is_host(host) and plain


def _is_host(name: str) -> bool:
    return 0 < len(name) <= _HOST_CHARS_MAX and all(0 < len(label) <= _LABEL_CHARS_MAX for label in name.split("."))


def _with_query(path: str, query: dict[str, str | None] | None) -> str:
    given = {name: value for name, value in (query or {}).items() if value is not None}
    return f"{path}?{urlencode(given)}" if given else path


def _body(answer: http.client.HTTPResponse) -> bytes:
    body = answer.read(ANSWER_BYTES_MAX + 1)
    if len(body) > ANSWER_BYTES_MAX:
        raise CommandFailed("The answer is too large.")
    return body


def _parsed(answer: http.client.HTTPResponse) -> Any:
    body = _body(answer)
    try:
        document = json.loads(body)
    except ValueError as unreadable:
        raise CommandFailed(f"The answer is not JSON (status {answer.status}).") from unreadable
    if answer.status < http.client.MULTIPLE_CHOICES:
        return document
    raise Refused(refusal_sentence(document, answer.status), answer.status)


def refusal_sentence(document: Any, status: int) -> str:
    """A problem document, or OpenAI's error, as one sentence with its code, its field, its line and what is accepted."""
    if isinstance(document, dict) and isinstance(document.get("error"), dict):
        document = {"detail": document["error"].get("message", _REFUSED)} | document["error"]
    if not isinstance(document, dict) or "code" not in document:
        return f"The request was refused (status {status})."
    sentence = str(document.get("detail", _REFUSED))
    named = [f"{name}: {document[name]}" for name in ("field", "line", "accepted") if name in document]
    return f"{sentence} ({'; '.join([str(document['code']), *named])})"


def segment(name: str) -> str:
    """A name as one segment of a path."""
    return quote(name, safe="")


def new_request_id() -> str:
    """A request id that nobody else chose."""
    return f"cli-{secrets.token_hex(8)}"


def read_ready_file(state: Path) -> dict[str, Any]:
    """What the running cell of a state directory says about itself. Raises CommandFailed."""
    path = state / "ready.json"
    try:
        document = json.loads(path.read_bytes())
    except FileNotFoundError as absent:
        raise CommandFailed(f"There is no {path}: start the cell with `weir up`, or name its address and key.") from absent
    except (OSError, ValueError) as unreadable:
        raise CommandFailed(f"{path} cannot be read ({type(unreadable).__name__}).") from unreadable
    if not isinstance(document, dict):
        raise CommandFailed(f"{path} is not a ready file.")
    return document


def connected(connect: Callable[..., C]) -> Callable[[Callable[Concatenate[C, P], None]], Callable[..., None]]:
    """Gives a command the options of `connect` and, as its first argument, what `connect` returns.

    A CommandFailed becomes one line on standard error and exit status 1.
    """
    connecting = list(inspect.signature(connect).parameters.values())

    def decorate(command: Callable[Concatenate[C, P], None]) -> Callable[..., None]:
        own = list(inspect.signature(command).parameters.values())[1:]

        def run(**given: Any) -> None:
            try:
                connection = connect(**{option.name: given.pop(option.name) for option in connecting})
                command(connection, **given)  # type: ignore[call-arg]
            except CommandFailed as failed:
                print(f"error: {plain(str(failed))}", file=sys.stderr)
                raise typer.Exit(1) from None

        parameters = [entry.replace(kind=inspect.Parameter.KEYWORD_ONLY) for entry in (*own, *connecting)]
        run.__name__, run.__doc__ = command.__name__, command.__doc__
        run.__annotations__ = {entry.name: entry.annotation for entry in parameters}
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return run

    return decorate
