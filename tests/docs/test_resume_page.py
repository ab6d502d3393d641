"""The page about retained streams: its commands run as they stand; its client loses and repeats nothing, wherever it is cut."""

import importlib.util
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from types import ModuleType
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import pytest
from tests.docs.pages import ROOT, blocks_of
from tests.docs.test_snippets import SESSION_S, environment, expected_after, matches, run_session
from tests.e2e.http_client import Admin
from tests.e2e.running_cell import RunningCell, running_cell

PAGE, CLIENT = "docs/howto/resume-streams.md", ROOT / "docs/howto/resume_stream.py"
BODY = {"model_alias": "assistant", "input": "Tell of rivers.", "max_output_tokens": 200}
WAIT_S = 30


@pytest.fixture(scope="module")
def keeping(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCell]:
    """A cell of its own: others' pages show what a tenant gets that keeps nothing."""
    with running_cell(tmp_path_factory.mktemp("retained") / "state") as running:
        Admin(running.ready["admin"], running.ready["admin_key"]).done(
            "PATCH", "/tenants/acme", {"retention": {"seconds": 600, "bytes": 2**30}}
        )
        yield running


def test_the_page_runs_as_it_stands(keeping: RunningCell) -> None:
    """Protects whoever copies: policy, resuming, replay, deletion and keys, with curl, the command line and OpenAI's SDK."""
    variables = {"WEIR_API_URL": keeping.api, "WEIR_API_KEY": keeping.key()}
    session = expected_after(blocks_of(PAGE))
    printed = run_session(keeping.state.parent, [block for block, _ in session], **variables)
    for (block, shown), output in zip(session, printed, strict=True):
        assert shown is None or matches(shown, output), f"{block.text}\nprinted\n{output}"
    for block, shown in expected_after(blocks_of(PAGE), "python"):
        output = _run(["-c", block.text], variables)
        assert shown is not None and matches(shown, output), output


def test_the_client_runs_by_itself(keeping: RunningCell) -> None:
    """Protects whoever starts it as the page says."""
    printed = _run([str(CLIENT), "What is a weir?"], {"WEIR_API_URL": keeping.api, "WEIR_API_KEY": keeping.key()})
    assert printed.endswith("completed, 64 tokens, connections: 1\n")


def test_what_the_client_gives_out_is_the_stream_byte_by_byte(keeping: RunningCell) -> None:
    """Protects resuming clients: cut in headers, in an event, between events and before anything, they see each event once."""
    cuts = [0, 60, 400, 1_000, 1_001, 1_500, 0, 0, 2_222, 3_000]
    with cut_after(keeping.api, cuts) as url:
        stream = client().ResumedStream(url, keeping.key(), BODY, pause=lambda _: None)
        seen = list(stream.events())
    headers = {"Authorization": f"Bearer {keeping.key()}"}
    asked = Request(f"{keeping.api}/v1/generations/{stream.request_id}/events", headers=headers)
    with urlopen(asked, timeout=WAIT_S) as answer:
        assert b"".join(event.raw for event in seen) == answer.read()
    assert [event.number for event in seen] == list(range(len(seen)))
    assert seen[-1].name == "done" and stream.connections == len(cuts) + 1


def test_the_client_gives_up_after_a_bound_and_at_once_where_nothing_will_change(keeping: RunningCell) -> None:
    """Protects callers from a client that tries for ever."""
    waits: list[float] = []
    with cut_after(keeping.api, [0] * 50) as url:
        stream = client().ResumedStream(url, keeping.key(), BODY, pause=waits.append)
        with pytest.raises(OSError):
            list(stream.events())
    assert len(waits) == client().TRIES_MAX and sum(waits) < 60
    refused = client().ResumedStream(keeping.api, keeping.key("globex"), BODY, pause=waits.append)
    with pytest.raises(Exception, match="unsupported_field"):
        list(refused.events())
    assert refused.connections == 1


def client() -> ModuleType:
    """The example, as a module."""
    spec = importlib.util.spec_from_file_location("resume_stream", CLIENT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _run(arguments: Sequence[str], variables: dict[str, str]) -> str:
    command = [sys.executable, "-W", "error", *arguments]
    ended = subprocess.run(command, env=environment(**variables), capture_output=True, timeout=SESSION_S, text=True)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


# ── a way on which connections are cut ───────────────────────────────────────────────────────────────────────────────


@contextmanager
def cut_after(url: str, cuts: Sequence[int]) -> Iterator[str]:
    """An address that leads to this one; each connection is closed after so many bytes of its answer, until no cut is left."""
    address = urlsplit(url)
    assert address.hostname is not None and address.port is not None
    target = (address.hostname, address.port)
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        left = iter(cuts)
        way = threading.Thread(target=_serve, args=(listener, target, left), daemon=True)
        way.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
        way.join(WAIT_S)
        assert not way.is_alive()


def _serve(listener: socket.socket, target: tuple[str, int], cuts: Iterator[int]) -> None:
    """One connection after the other, until the listener is shut."""
    while True:
        try:
            inner, _ = listener.accept()
        except OSError:
            return
        with inner, socket.create_connection(target, WAIT_S) as outer:
            inner.settimeout(WAIT_S)
            outer.sendall(_request(inner))
            _pass_on(outer, inner, next(cuts, None))


def _request(inner: socket.socket) -> bytes:
    """All of a request, after whose answer the connection ends."""
    got = b""
    while b"\r\n\r\n" not in got:
        got += inner.recv(65_536)
    head, _, body = got.partition(b"\r\n\r\n")
    sizes = [int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")]
    while len(body) < sum(sizes):
        body += inner.recv(65_536)
    return head + b"\r\nconnection: close\r\n\r\n" + body


def _pass_on(outer: socket.socket, inner: socket.socket, most: int | None) -> None:
    """Up to so many bytes of the answer, else all of it."""
    passed = 0
    while most is None or passed < most:
        some = outer.recv(65_536 if most is None else most - passed)
        if not some:
            return
        try:
            inner.sendall(some)
        except OSError:
            return
        passed += len(some)
