"""An S3 server of the tests' own (moto): one per test process, on loopback, a prefix of its only bucket for whoever asks.

It starts with the first question and stops with the session (`stop_s3_server`, called by conftest).
"""

import http.client
import re
import subprocess
import sys
import threading
from collections import deque
from functools import cache
from itertools import count
from typing import Any

START_S = 60.0
BUCKET = "streams"
OPTIONS: dict[str, Any] = {
    "access_key_id": "test",
    "secret_access_key": "test",
    "region": "us-east-1",
    "client_options": {"allow_http": True},
}
"""What a client of it needs beside `endpoint`."""

_LISTENS = re.compile(r"Running on http://127\.0\.0\.1:(\d+)")
_PREFIXES = count()
_STARTED: list[tuple[subprocess.Popen[str], threading.Thread]] = []


@cache
def _port() -> int:
    """The port of the running server, which has the bucket."""
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    patience = threading.Timer(START_S, process.kill)
    patience.start()
    said = ""
    for line in process.stderr:
        said += line
        if listens := _LISTENS.search(line):
            break
    else:
        process.wait()
        raise AssertionError(f"The S3 server of the tests did not start: {said}")
    patience.cancel()
    # Nobody may leave the pipe full: the server writes a line per request.
    drain = threading.Thread(target=deque, args=(process.stderr, 0), daemon=True)
    drain.start()
    _STARTED.append((process, drain))
    port = int(listens[1])
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=START_S)
    connection.request("PUT", f"/{BUCKET}")
    assert connection.getresponse().status == 200
    connection.close()
    return port


def s3_endpoint() -> str:
    """Where the server is."""
    return f"http://127.0.0.1:{_port()}"


def s3_url() -> str:
    """The address of a place in its bucket that nobody else has."""
    return f"s3://{BUCKET}/place-{next(_PREFIXES)}/streams"


def stop_s3_server() -> None:
    """Stop it, if it was started."""
    while _STARTED:
        process, drain = _STARTED.pop()
        process.kill()
        process.wait()
        drain.join()
        if process.stderr is not None:
            process.stderr.close()
    _port.cache_clear()
