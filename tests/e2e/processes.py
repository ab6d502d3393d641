"""What tests read about processes, from /proc: children, memory, open descriptors, and whether they are gone."""

import os
import select
from contextlib import suppress
from pathlib import Path


def children_of(pid: int) -> list[int]:
    """Process ids of the children of every thread of a process."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += [int(child) for child in (task / "children").read_text().split()]
    return found


def wait_process_gone(pid: int, bound_s: float) -> bool:
    """Whether a process, of whatever parent, ends within the bound."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], bound_s)[0])
    finally:
        os.close(descriptor)


def resident_bytes(pid: int) -> int:
    """Memory that a process holds now."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def open_descriptors(pid: int) -> int:
    """Number of a process's open files and sockets."""
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def open_files(pid: int) -> set[str]:
    """What a process has open, by its links; it goes on opening and closing meanwhile."""
    found = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            found.add(str(entry.readlink()))
    return found
