"""The directory of an embedded cell: one process owns it, and everything the cell must remember lies in it.

It decides where each file is, who may open the directory, and how the few real secrets are made and kept (mode 0600, replaced
by rename, on the disk before anyone uses them). It must never hand its lock to a child, nor show a secret in an error.
"""

import fcntl
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import msgspec

from weir import errors
from weir.ports import Entropy
from weir.units import Bytes

DATABASE_FILE = "weir.sqlite3"
SECRET_BYTES: Bytes = 32
BODY_DIGEST_SECRET = "body_digest"
CACHE_SALT_SECRET = "cache_salt"
DEVELOPMENT_KEY_SECRET = "development_key"


class _Secrets(msgspec.Struct, forbid_unknown_fields=True):
    """What the secrets file holds: random secrets by name, and the keys of the bootstrap by names of their owner's choice."""

    secrets: dict[str, bytes] = {}
    bootstrap_keys: dict[str, str] = {}


class StateDirectory:
    """An owned state directory: made (mode 0700) if it is absent, locked until `close` or the end of the process.

    Raises StateLocked while another process owns it, StateUnreadable when it is no directory, cannot be written or is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.database = self.path / DATABASE_FILE
        self.ready_file = self.path / "ready.json"
        self._secrets_file = self.path / "secrets.json"
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as fault:
            self._refuse(fault)
        try:
            self._take_lock()
            self._secrets = self._load_secrets()
        except OSError as fault:
            self.close()
            self._refuse(fault)
        except errors.StoreFault:
            self.close()
            raise

    def _refuse(self, fault: OSError) -> NoReturn:
        reason = os.strerror(fault.errno) if fault.errno else "unknown fault"
        raise errors.StateUnreadable(f"The state directory {self.path} cannot be used: {reason}.") from fault

    def _take_lock(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as held:
            holder = os.pread(self._lock, 32, 0).decode("ascii", "replace").strip() or "unknown"
            raise errors.StateLocked(f"The state directory {self.path} is owned by process {holder}.") from held
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, f"{os.getpid()}\n".encode(), 0)

    def _load_secrets(self) -> _Secrets:
        try:
            return msgspec.json.decode(self._secrets_file.read_bytes(), type=_Secrets)
        except FileNotFoundError:
            return _Secrets()
        except msgspec.DecodeError:
            # The decoder's message may quote the file, so it is not chained.
            raise errors.StateUnreadable(f"The secrets file {self._secrets_file} is damaged.") from None

    def secret(self, name: str, entropy: Entropy) -> bytes:
        """The named secret, 32 bytes; made at its first use, and durable on return. Raises StateUnreadable."""
        if name not in self._secrets.secrets:
            self._secrets.secrets[name] = entropy.token(SECRET_BYTES)
            self._save_secrets()
        return self._secrets.secrets[name]

    @property
    def bootstrap_keys(self) -> Mapping[str, str]:
        """The keys that the bootstrap made, in clear, by name: what a second start shows again."""
        return dict(self._secrets.bootstrap_keys)

    def keep_bootstrap_keys(self, keys: Mapping[str, str]) -> None:
        """Keep these keys, durable on return; a name that is absent is forgotten. Raises StateUnreadable."""
        self._secrets.bootstrap_keys = dict(keys)
        self._save_secrets()

    def _save_secrets(self) -> None:
        try:
            write_private_file(self._secrets_file, msgspec.json.encode(self._secrets))
        except OSError as fault:
            self._refuse(fault)

    def close(self) -> None:
        """Give the directory up. Idempotent."""
        lock, self._lock = self._lock, -1
        if lock >= 0:
            os.close(lock)


def write_private_file(path: Path, content: bytes) -> None:
    """Replace a file at once and durably, mode 0600: a reader sees the old or the new one, whole. Raises OSError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(descriptor, 0o600)
            file.write(content)
            file.flush()
            os.fsync(descriptor)
        temporary.replace(path)
    except OSError:
        with suppress(OSError):
            temporary.unlink()
        raise
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
