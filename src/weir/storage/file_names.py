"""Which keys and folders a store of files takes: no name that this lets through can leave the place that it is joined to.

A file cannot have the key of a folder: a directory would refuse it, a bucket would not see it. The stores do not look for such
a key, since `weir.batches.file_keys` has none.
"""

import re

from weir.units import Bytes

UNFINISHED = ".unfinished-"
"""What is no file yet is called this and a number that nobody else has; a name that no key has, and no listing shows."""

UNFINISHED_MS_MAX = 86_400_000
"""A process that wrote nothing more for a day was killed: what it left is removed by the next listing of the folder."""

_NAME = re.compile(r"[a-z0-9_][a-z0-9._-]{0,99}")
_KEY_NAMES = range(2, 5)
_FOLDER_NAMES = range(1, 4)


def is_name(word: str) -> bool:
    """Whether it may be a part of a key."""
    return _NAME.fullmatch(word) is not None


def check_key(key: str) -> None:
    """Raises ValueError unless it is two to four names joined by `/`: keys are ours, so another one is a bug."""
    _check(key, _KEY_NAMES, "a key is two to four names joined by /")


def check_folder(folder: str) -> None:
    """Raises ValueError unless it is one to three names joined by `/`."""
    _check(folder, _FOLDER_NAMES, "a folder is one to three names joined by /")


def check_range(start: Bytes, size: Bytes | None) -> None:
    """Raises ValueError where a part of a file begins before it, or is smaller than nothing."""
    if start < 0 or (size is not None and size < 0):
        raise ValueError("a part of a file begins at 0 or later and has 0 bytes or more")


def folder_and_name(key: str) -> tuple[str, str]:
    """The folder that a file lies in, and its name there. Raises ValueError as `check_key` does."""
    check_key(key)
    folder, _, name = key.rpartition("/")
    return folder, name


def _check(path: str, lengths: range, rule: str) -> None:
    names = path.split("/")
    if len(names) not in lengths or not all(map(is_name, names)):
        raise ValueError(f"{rule}, each of a-z 0-9 . _ -, at most 100, neither . nor - first")
