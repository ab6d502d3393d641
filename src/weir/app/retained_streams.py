"""Which store a gateway keeps retained streams in, and the keys that they are sealed with.

A bucket's driver is an extra, imported only where it is asked for. Keys are in a file that an operator may replace at any time.
"""

import asyncio
from dataclasses import replace
from pathlib import Path

from weir import errors
from weir.config import RetentionConfig
from weir.gateway.inbox import Inbox
from weir.gateway.retention import RetentionDesk
from weir.gateway.sealing import KeyRing, format_key_ring, parse_key_ring
from weir.kept_streams import StreamStore
from weir.ports import Clock, Entropy
from weir.storage.state_directory import write_private_file
from weir.storage.stream_directory import StreamDirectory

STREAMS_FOLDER = "streams"
KEY_FILE = "retention-keys"


def placed(config: RetentionConfig, state: Path, entropy: Entropy) -> RetentionConfig:
    """Where a cell keeps them: as configured, else in its state directory, with keys that are made at the first start.

    Raises StateUnreadable where they cannot be made.
    """
    if config.directory is not None or config.bucket is not None:
        return config
    keys = state / KEY_FILE if config.key_file is None else Path(config.key_file)
    if not keys.exists() and config.key_file is None:
        try:
            write_private_file(keys, format_key_ring(KeyRing.new(entropy)).encode())
        except OSError as fault:
            raise errors.StateUnreadable(f"{keys} cannot be written: {fault.strerror}.") from fault
    return replace(config, directory=str(state / STREAMS_FOLDER), key_file=str(keys))


def open_retention(config: RetentionConfig, clock: Clock, entropy: Entropy, inbox: Inbox) -> RetentionDesk | None:
    """What keeps streams; None where no place is configured. Raises InvalidRequest for a bucket that cannot be used."""
    if config.key_file is None or (store := _store_of(config)) is None:
        return None
    return RetentionDesk(store, KeyFile(Path(config.key_file)), clock, entropy, inbox, config.sweep_ms)


def _store_of(config: RetentionConfig) -> StreamStore | None:
    if config.directory is not None:
        return StreamDirectory(Path(config.directory))
    if config.bucket is None:
        return None
    try:
        from weir.storage.stream_bucket import StreamBucket
    except ImportError as missing:
        raise errors.InvalidRequest("A bucket needs its driver: install weir[objects].") from missing
    return StreamBucket.from_url(config.bucket)


class KeyFile:
    """The ring in a file, read anew where that changed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read: tuple[tuple[int, int, int], KeyRing] | None = None

    async def __call__(self) -> KeyRing:
        """The keys as they are now. Raises StreamStoreUnavailable where the file cannot be read, or is damaged.

        Each stream asks, so whether the file changed is looked up at once: a local one tells that sooner than a thread begins.
        """
        try:
            status = self._path.stat()
            version = (status.st_ino, status.st_mtime_ns, status.st_size)
            if self._read is None or self._read[0] != version:
                self._read = version, parse_key_ring(await asyncio.to_thread(self._path.read_text, "ascii"))
        except OSError as fault:
            raise errors.StreamStoreUnavailable(f"The keys of retained streams cannot be read: {fault.strerror}.") from fault
        except (ValueError, errors.InvalidRequest):  # whose messages may quote the file
            raise errors.StreamStoreUnavailable("The keys of retained streams are damaged.") from None
        return self._read[1]
