"""Which files an artifact consists of, by path and content, and how a folder differs from that.

Pure. An artifact is a folder of plain files; its manifest names every one of them with its SHA-256, and the manifest's digest
is the artifact's name. No file is exempt: what is in the folder and not in the manifest is a reason to refuse, also `.git`.
A path is refused that another machine, tool or reader could take for something else.
"""

import hashlib
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from weir import errors
from weir.units import Bytes

FILES_MAX = 10_000
PATH_BYTES_MAX: Bytes = 512
_SHOWN_CHARACTERS = 120


class ArtifactFlaw(StrEnum):
    """Why an artifact is refused: the member `reason` of the refusal."""

    EMPTY = "empty"
    TOO_MANY_FILES = "too_many_files"
    TOO_LARGE = "too_large"
    UNSAFE_PATH = "unsafe_path"
    DUPLICATE_PATH = "duplicate_path"
    SYMBOLIC_LINK = "symbolic_link"
    SPECIAL_FILE = "special_file"
    UNREADABLE = "unreadable"
    RUNS_CODE = "runs_code"
    UNKNOWN_KIND = "unknown_kind"
    MALFORMED_FILE = "malformed_file"
    MISSING_FILE = "missing_file"
    ADDED_FILE = "added_file"
    RENAMED_FILE = "renamed_file"
    CHANGED_FILE = "changed_file"
    CHANGED_MEANWHILE = "changed_meanwhile"
    NOT_KEPT = "not_kept"


def artifact_refused(flaw: ArtifactFlaw, detail: str, path: str | None = None) -> errors.ArtifactRefused:
    """The refusal of an artifact. detail: a sentence that names the file by `shown`."""
    members = {"field": "artifact", "reason": flaw.value}
    return errors.ArtifactRefused(detail, members=members if path is None else members | {"file": shown(path)})


def shown(path: str) -> str:
    """A path for people, on one line: what is not plain is escaped, and a long one is cut."""
    text = path if path.isprintable() else ascii(path)[1:-1]
    return text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "…"


@dataclass(frozen=True, slots=True)
class FileDigest:
    """One file. path: relative, with slashes, as `check_path` accepts it. sha256: of its content, 64 lower-case hex digits."""

    path: str
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """Every file of an artifact, ordered by the bytes of their paths; made by `manifest_of` only."""

    files: tuple[FileDigest, ...]

    @property
    def digest(self) -> str:
        """`sha256:` and the hex SHA-256 of one line per file, `<sha256>  <path>` and a newline, in the manifest's order.

        Those are the lines of `sha256sum` for the files in the order of `LC_ALL=C sort`, so that anybody can recompute it.
        """
        lines = "".join(f"{file.sha256}  {file.path}\n" for file in self.files)
        return f"sha256:{hashlib.sha256(lines.encode()).hexdigest()}"


def manifest_of(files: Iterable[FileDigest]) -> Manifest:
    """The manifest of these files, whose digests are well-formed. Raises ArtifactRefused as `check_paths` does."""
    ordered = sorted(files, key=lambda file: file.path.encode(errors="surrogatepass"))
    check_paths([file.path for file in ordered])
    return Manifest(tuple(ordered))


def check_paths(paths: Sequence[str]) -> None:
    """Raises ArtifactRefused unless these may be the files of one artifact: 1 … FILES_MAX, each fine, no two of them alike."""
    if not paths:
        raise artifact_refused(ArtifactFlaw.EMPTY, "The artifact has no files.")
    if len(paths) > FILES_MAX:
        raise artifact_refused(
            ArtifactFlaw.TOO_MANY_FILES, f"An artifact may have {FILES_MAX} files; this one has {len(paths)}."
        )
    seen: dict[str, str] = {}
    for path in paths:
        check_path(path)
        folded = unicodedata.normalize("NFC", path.casefold())
        if folded in seen:
            detail = f"Two files have one name where case does not count: {shown(seen[folded])} and {shown(path)}."
            raise artifact_refused(ArtifactFlaw.DUPLICATE_PATH, detail, path)
        seen[folded] = path


def check_path(path: str) -> None:
    """Raises ArtifactRefused with the reason unless a path is relative, plain, and means the same everywhere."""
    if (why := _path_flaw(path)) is not None:
        raise artifact_refused(ArtifactFlaw.UNSAFE_PATH, f"The path {shown(path) or '(empty)'} is refused: {why}.", path)


def _path_flaw(path: str) -> str | None:
    if not path.isprintable():
        return "it has characters that cannot be seen, or is not UTF-8"
    if len(path.encode()) > PATH_BYTES_MAX:
        return f"it is longer than {PATH_BYTES_MAX} bytes"
    if not unicodedata.is_normalized("NFC", path):
        return "its Unicode is not in the composed form (NFC)"
    if "\\" in path:
        return "it has a backslash"
    if path.startswith("/"):
        return "it is absolute"
    if not {"", ".", ".."}.isdisjoint(path.split("/")):
        return "it has an empty part, `.` or `..`"
    return None


def check_files(manifest: Manifest, found: Iterable[FileDigest]) -> None:
    """Raises ArtifactRefused with the gravest difference, and how many more there are, unless exactly these files are found.

    A file whose content lies under another name is renamed, neither missing nor added.
    """
    wanted = {file.path: file.sha256 for file in manifest.files}
    there = {file.path: file.sha256 for file in found}
    differences = sorted(_differences(wanted, there), key=lambda difference: _GRAVEST_FIRST.index(difference[0]))
    if differences:
        flaw, path, detail = differences[0]
        more = len(differences) - 1
        raise artifact_refused(flaw, f"{detail}{f', and {more} more' if more else ''}.", path)


_GRAVEST_FIRST = (ArtifactFlaw.CHANGED_FILE, ArtifactFlaw.RENAMED_FILE, ArtifactFlaw.MISSING_FILE, ArtifactFlaw.ADDED_FILE)


def _differences(wanted: Mapping[str, str], there: Mapping[str, str]) -> Iterator[tuple[ArtifactFlaw, str, str]]:
    """Flaw, path and half a sentence for each file that differs, in the order of paths."""
    added = {path: digest for path, digest in there.items() if path not in wanted}
    name_of = {digest: path for path, digest in added.items()}
    for path, digest in wanted.items():
        if path in there:
            if there[path] != digest:
                yield ArtifactFlaw.CHANGED_FILE, path, f"The file {shown(path)} is not what was signed"
        elif (name := name_of.pop(digest, None)) is not None:
            del added[name]
            yield ArtifactFlaw.RENAMED_FILE, path, f"The file {shown(path)} was renamed to {shown(name)}"
        else:
            yield ArtifactFlaw.MISSING_FILE, path, f"The file {shown(path)} is missing"
    for path in added:
        yield ArtifactFlaw.ADDED_FILE, path, f"The file {shown(path)} was not signed"
