"""Starts engine processes on this machine, and ends them.

It decides how a replica's process is started, when it listens and how it stops; it never talks to the engine in it. A child
gets its spec as the first line of its standard input and ends when that pipe closes, so it does not outlive us however we end.
It has a session of its own, so that an interrupt from the terminal reaches it only through us, and none of our secrets. A
registered artifact is read by descriptors that were verified before, or by vLLM in its folder, and must not have been touched
once the child listens.
"""

import asyncio
import os
import secrets
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from pathlib import Path
from typing import Protocol

import msgspec

import weir
from weir import errors
from weir.core.registry.model import EMBEDDINGS, FROM_ARTIFACTS, EngineKind, Pool, Revision
from weir.engines.llamacpp_child import ChildSpec
from weir.engines.simulated_api import ServerSpec
from weir.engines.simulated_faults import Faults
from weir.engines.vllm_arguments import ADAPTER_CONFIG, VllmAdapter, VllmSpec, rank_of
from weir.ports import ReplicaProcess
from weir.units import Bytes, Millis

START_MS = 120_000
ERROR_TAIL_BYTES: Bytes = 4_096
_KILLED_WAIT_MS = 5_000
_API_KEY_BYTES = 32
_ADAPTER_CONFIG_BYTES_MAX: Bytes = 1024 * 1024


class ModelFiles(Protocol):
    """Files that a child loads, open for as long as the context that they came from."""

    @property
    def model(self) -> str:
        """The model's path, as a child with the descriptors sees it: a file, or for vLLM a folder."""
        ...

    @property
    def adapters(self) -> tuple[str, ...]:
        """The paths of adapters that change it, likewise."""
        ...

    @property
    def descriptors(self) -> tuple[int, ...]:
        """What the child must inherit."""
        ...

    def check_unchanged(self) -> None:
        """Raises ArtifactRefused unless what the child loaded is what was verified."""
        ...


class ApprovedFiles(Protocol):
    """The files of registered artifacts."""

    def opened(self, revision: Revision) -> AbstractAsyncContextManager[ModelFiles]:
        """What a revision with an artifact loads, verified. Raises SignatureRefused, ArtifactRefused, ArtifactsUnavailable."""
        ...


class _PlainFiles:
    """A model that was never registered: nothing is known of its file but the path."""

    adapters: tuple[str, ...] = ()
    descriptors: tuple[int, ...] = ()

    def __init__(self, model: str) -> None:
        self.model = model

    def check_unchanged(self) -> None:
        """There is nothing to compare with."""


class _Listening(msgspec.Struct):
    url: str


class LocalProcess:
    """A child process with an engine in it."""

    def __init__(self, process: Process, api_key: str) -> None:
        self._process = process
        self._api_key = api_key
        self._url = ""
        self._error_tail = b""
        self._supervision = asyncio.get_running_loop().create_task(self._supervise())

    @property
    def url(self) -> str:
        """Base URL, known once the process listens."""
        return self._url

    @property
    def api_key(self) -> str | None:
        """The random key of this process."""
        return self._api_key

    async def wait(self) -> int:
        """The exit status, negative for a signal, once it exited for whatever reason."""
        return await asyncio.shield(self._supervision)

    async def stop(self, grace_ms: Millis) -> None:
        """Close its input and send SIGTERM, then kill it after the grace; returns when it is gone. Idempotent."""
        self._close_input()
        self._signal(signal.SIGTERM)
        with suppress(TimeoutError):
            async with asyncio.timeout(grace_ms / 1_000):
                await self.wait()
                return
        self._signal(signal.SIGKILL)
        await self.wait()

    async def wait_listening(self, spec: bytes) -> None:
        """Hand over the spec and wait for the URL. Raises EngineError with the end of what the child complained of."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        with suppress(ConnectionError):  # an exit before the spec was read shows as the end of its output
            stdin.write(spec + b"\n")
            await stdin.drain()
        try:
            self._url = msgspec.json.decode(await stdout.readline(), type=_Listening).url
        except (msgspec.MsgspecError, ValueError):
            status = await self.wait()
            tail = self._error_tail.decode(errors="replace").strip()
            raise errors.EngineError(f"The engine process exited with status {status} before it listened: {tail}") from None

    async def _supervise(self) -> int:
        """Keep the end of its errors until it exits, end what it left behind, and release its pipes."""
        stderr = self._process.stderr
        assert stderr is not None
        while piece := await stderr.read(ERROR_TAIL_BYTES):
            self._error_tail = (self._error_tail + piece)[-ERROR_TAIL_BYTES:]
        status = await self._process.wait()
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._close_input()
        return status

    def _signal(self, number: signal.Signals) -> None:
        """Signal it unless it ended. Not by the process object, which would reap it and lose its exit status."""
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self._process.pid, number)

    def _close_input(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()


class LocalLauncher:
    """Starts llama.cpp, vLLM and simulated replicas as children of this process.

    threads: of each llama.cpp process, None for every core. environment: variables that children need beside PATH. files: of
    registered artifacts; None where only models are run that never were. vllm_python: the interpreter that has vLLM, None for
    this one.
    """

    def __init__(
        self,
        *,
        threads: int | None = None,
        start_ms: Millis = START_MS,
        environment: Mapping[str, str] | None = None,
        files: ApprovedFiles | None = None,
        vllm_python: str | None = None,
    ) -> None:
        self._files = files
        self._vllm_python = vllm_python or sys.executable
        self._threads = threads or os.cpu_count() or 1
        self._start_ms = start_ms
        self._given = {"PATH": os.defpath, **(environment or {})}
        self._environment = {
            "PYTHONPATH": str(Path(weir.__file__).parents[1]),
            # Threads that spin on busy cores cost a hundred times the work; read once, before Python starts.
            "GOMP_SPINCOUNT": "2000",
            **self._given,
        }

    async def launch(self, revision: Revision, pool: Pool) -> ReplicaProcess:
        """Start one replica and wait until it listens. Raises EngineError with the reason when it does not.

        A registered artifact is verified before, however long that takes, and compared when the replica listens.
        """
        try:
            async with self._opened(revision) as files:
                return await self._launch(revision, pool, files)
        except (errors.CallerFault, errors.StoreFault) as refused:
            raise errors.EngineError(f"The artifact of {revision.id} cannot be loaded: {refused.detail}") from refused

    def _opened(self, revision: Revision) -> AbstractAsyncContextManager[ModelFiles]:
        if revision.artifact_digest is None and revision.engine is not EngineKind.VLLM:
            return nullcontext(_PlainFiles(revision.artifact))
        if self._files is None or revision.artifact_digest is None or revision.engine not in FROM_ARTIFACTS:
            raise errors.EngineError(f"Nothing here loads the artifact of {revision.id}, which is for {revision.engine.value}.")
        return self._files.opened(revision)

    async def _launch(self, revision: Revision, pool: Pool, files: ModelFiles) -> ReplicaProcess:
        api_key = secrets.token_hex(_API_KEY_BYTES)
        module, spec = self._program(revision, pool, api_key, files)
        process = LocalProcess(await self._spawn(module, files), api_key)
        try:
            async with asyncio.timeout(self._start_ms / 1_000):
                await process.wait_listening(msgspec.json.encode(spec))
            files.check_unchanged()
        except TimeoutError:
            await process.stop(0)
            raise errors.EngineError(f"The engine process did not listen within {self._start_ms} ms.") from None
        except BaseException:
            await process.stop(0)
            raise
        return process

    def _program(
        self, revision: Revision, pool: Pool, api_key: str, files: ModelFiles
    ) -> tuple[str, ChildSpec | ServerSpec | VllmSpec]:
        """The module that serves a revision, and what it is told. Raises EngineError for an engine without a process."""
        match revision.engine:
            case EngineKind.LLAMACPP:
                fields = {
                    "threads": self._threads,
                    **dict(revision.arguments),
                    "model": files.model,
                    "adapters": files.adapters,
                    "read_whole": revision.artifact_digest is not None,
                    "alias": revision.id,
                    "slots": pool.concurrency,
                    "context_tokens": revision.context_tokens,
                    "api_key": api_key,
                }
                return "weir.engines.llamacpp_child", msgspec.convert(fields, ChildSpec)
            case EngineKind.SIMULATED:
                return "weir.engines.simulated_server", ServerSpec(
                    model=revision.id,
                    row=revision.artifact,
                    context_tokens=revision.context_tokens,
                    concurrency=pool.concurrency,
                    api_key=api_key,
                    faults=msgspec.convert({name: value for name, value in revision.arguments if name != EMBEDDINGS}, Faults),
                    embeddings=revision.embeds,
                )
            case EngineKind.VLLM:
                return "weir.engines.vllm_child", VllmSpec(
                    python=self._vllm_python,
                    folder=files.model,
                    served=revision.adapter_of or revision.id,
                    context_tokens=revision.context_tokens,
                    sequences=pool.concurrency,
                    api_key=api_key,
                    environment=self._given,
                    arguments=revision.arguments,
                    adapter=_adapter_of(revision, files),
                )
            case EngineKind.OPENAI:
                raise errors.EngineError("An engine behind a URL is not started by the platform.")

    async def _spawn(self, module: str, files: ModelFiles) -> Process:
        try:
            return await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                module,
                stdin=PIPE,
                stdout=PIPE,
                stderr=PIPE,
                close_fds=True,
                pass_fds=files.descriptors,
                start_new_session=True,
                env=self._environment,
            )
        except OSError as error:
            raise errors.EngineError(f"The engine process cannot be started: {error.strerror}.") from None


def _adapter_of(revision: Revision, files: ModelFiles) -> VllmAdapter | None:
    """The adapter that vLLM is to load, in its folder. Raises EngineError."""
    if revision.adapter_of is None:
        return None
    [folder] = files.adapters
    try:
        with Path(folder, ADAPTER_CONFIG).open("rb") as file:
            rank = rank_of(file.read(_ADAPTER_CONFIG_BYTES_MAX))
    except OSError as error:
        raise errors.EngineError(f"The adapter's {ADAPTER_CONFIG} cannot be read: {error.strerror}.") from None
    return VllmAdapter(revision.id, folder, rank)
