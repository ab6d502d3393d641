"""The process beside one vLLM replica: `python -m weir.engines.vllm_child`.

It reads one JSON line (`VllmSpec`) from standard input, starts vLLM, which says nowhere that it listens, and asks it until it
does; then it writes {"url": ...} as one JSON line. vLLM ends with this process's standard input, or at SIGTERM: it is told to,
and after a grace everything in the process group is killed, so that nothing outlives the parent and keeps a GPU. What vLLM
prints goes with the errors.
"""

import http.client
import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress

import msgspec

from weir.engines.vllm_arguments import HOST, VllmSpec, command_line, environment

SPEC_BYTES_MAX = 1024 * 1024  # an environment may be long
_ASK_S = 0.2
_ANSWER_S = 5.0
_END_S = 20.0
_LAST_WORDS_S = 1.0
_MODELS_BYTES_MAX = 1024 * 1024
_SIGNALLED = 128


class _Card(msgspec.Struct):
    id: str


class _Cards(msgspec.Struct):
    data: list[_Card]


def serve(spec: VllmSpec, ending: threading.Event, answer: int) -> int:
    """Run vLLM until it ends; its exit status. ending: it is to end. answer: a descriptor for the URL. Raises OSError."""
    port = _free_port()
    command, found = command_line(spec, port), dict(environment(spec))
    vllm = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=found)
    printed = threading.Thread(target=_pass_on, args=(vllm,), daemon=True)
    printed.start()
    threading.Thread(target=_set_at_exit, args=(vllm, ending), daemon=True).start()
    while not ending.wait(_ASK_S):
        if _listens(spec, port):
            os.write(answer, msgspec.json.encode({"url": f"http://{HOST}:{port}"}) + b"\n")
            ending.wait()
    if vllm.poll() is None:
        _end(vllm)
    printed.join(_LAST_WORDS_S)
    return vllm.returncode if vllm.returncode >= 0 else _SIGNALLED - vllm.returncode


def _free_port() -> int:
    with socket.create_server((HOST, 0)) as listener:
        return int(listener.getsockname()[1])


def _listens(spec: VllmSpec, port: int) -> bool:
    """Whether it is vLLM that answers there: it takes our key and has our model."""
    connection = http.client.HTTPConnection(HOST, port, timeout=_ANSWER_S)
    try:
        connection.request("GET", "/v1/models", headers={"Authorization": f"Bearer {spec.api_key}"})
        content = connection.getresponse().read(_MODELS_BYTES_MAX)
        return any(card.id == spec.model for card in msgspec.json.decode(content, type=_Cards).data)
    except (OSError, http.client.HTTPException, msgspec.MsgspecError, UnicodeDecodeError):
        return False
    finally:
        connection.close()


def _end(vllm: subprocess.Popen[bytes]) -> None:
    """End it and everything that it started, and this process with them."""
    vllm.terminate()
    with suppress(subprocess.TimeoutExpired):
        vllm.wait(_END_S)
    os.killpg(0, signal.SIGKILL)


def _pass_on(vllm: subprocess.Popen[bytes]) -> None:
    """Print what it prints; it has not our own errors' pipe, whose end tells the parent that we are gone."""
    assert vllm.stdout is not None
    while piece := os.read(vllm.stdout.fileno(), 65_536):
        os.write(2, piece)


def _set_at_exit(vllm: subprocess.Popen[bytes], ending: threading.Event) -> None:
    vllm.wait()
    ending.set()


def _set_at_end_of_input(ending: threading.Event) -> None:
    while os.read(0, 4_096):
        pass
    ending.set()


def main() -> int:
    """Serve until told to end; 2 for a spec that makes no sense, else vLLM's own exit status."""
    try:
        spec = msgspec.json.decode(sys.stdin.buffer.readline(SPEC_BYTES_MAX), type=VllmSpec)
    except msgspec.MsgspecError as error:
        sys.stderr.write(f"vLLM child: {error}\n")
        return 2
    if os.getpgrp() != os.getpid():
        os.setpgrp()
    ending = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ending.set())
    threading.Thread(target=_set_at_end_of_input, args=(ending,), daemon=True).start()
    try:
        return serve(spec, ending, sys.stdout.fileno())
    except OSError as error:
        sys.stderr.write(f"vLLM child: {spec.python} cannot be started: {error.strerror}\n")
        return 1


if __name__ == "__main__":
    sys.stdout.flush()
    os._exit(main())
