"""Artifacts and evaluation sets on this machine, each under the digest of its content.

It decides what is kept: a folder is hashed and copied in one pass, so that what was hashed is what is kept, and appears whole
or not at all. It decides nothing of trust: whoever asks brings the judgement of a signature, which is asked again at each load.
It must never hand out a file that it did not hash through the very descriptor it hands out.

    <hex>/…                        the files of an artifact, read-only
    signatures/<hex>/<key>         what vouches for it: one signature file per key, by its fingerprint
    files/<hex>                    single files
    .unfinished-…                  what is being copied, or was when the last process ended

Every call may take as long as reading the whole from a disk: not for an event loop. One object owns the directory.
"""

import hashlib
import os
import re
import shutil
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from weir import errors
from weir.core.registry.artifact_kinds import bytes_to_check, check_allowed, check_content
from weir.core.registry.manifest import ArtifactFlaw, FileDigest, Manifest, artifact_refused, check_files, shown
from weir.core.registry.signed_manifest import BUNDLE_BYTES_MAX, SignatureFlaw, SignedManifest, read_bundle, signature_refused
from weir.ports import KeptArtifact, Verify
from weir.storage.plain_folder import FileIdentity, PlainFolder, blocks_of, check_identity
from weir.units import Bytes

ARTIFACT_BYTES_MAX: Bytes = 1024**4
FILE_BYTES_MAX: Bytes = 64 * 1024**2
_UNFINISHED = ".unfinished-"


class OpenArtifact:
    """A verified artifact. Some of its files are open for as long as its context: who inherits the descriptors reads those."""

    def __init__(
        self,
        path: Path,
        folder: FileIdentity,
        survey: Mapping[str, FileIdentity],
        files: Mapping[str, tuple[int, FileIdentity]],
    ) -> None:
        self._path = path
        self._folder = folder
        self._survey = survey
        self._files = files

    @property
    def folder(self) -> str:
        """Where a process opens all files by their names; `check_unchanged` says afterwards whether those were verified."""
        return str(self._path)

    @property
    def descriptors(self) -> tuple[int, ...]:
        """What a process must inherit to open the paths."""
        return tuple(descriptor for descriptor, _ in self._files.values())

    def path_of(self, name: str) -> str:
        """Where a process that inherited the descriptors opens a file. name: one of those the artifact was opened for."""
        return f"/proc/self/fd/{self._files[name][0]}"

    def check_unchanged(self) -> None:
        """Raises ArtifactRefused, naming the file, unless all is what was verified: the same files, not touched since.

        In the same folder, which nobody moved meanwhile.
        """
        for name, (descriptor, identity) in self._files.items():
            check_identity(name, descriptor, identity)
        with PlainFolder(self._path) as folder:
            folder.check_unchanged(self._survey)
            if folder.identity() != self._folder:
                detail = "The artifact's folder was moved, or changed, while it was read."
                raise artifact_refused(ArtifactFlaw.CHANGED_MEANWHILE, detail)


class ArtifactStore:
    """The store in a directory, which is made (mode 0700) if it is absent; what an earlier process left unfinished is removed.

    bytes_max: of one artifact. Raises ArtifactsUnavailable when the disk fails it, here and from each method.
    """

    def __init__(self, directory: Path, *, bytes_max: Bytes = ARTIFACT_BYTES_MAX) -> None:
        self._directory = directory.absolute()
        self._signatures, self._files = self._directory / "signatures", self._directory / "files"
        self._bytes_max = bytes_max
        self._placing = threading.Lock()
        with _disk_faults():
            for folder in (self._directory, self._signatures, self._files):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            for left in self._directory.glob(f"{_UNFINISHED}*"):
                _remove(left)

    def keep(self, folder: Path, bundle: bytes, verify: Verify, signature_name: str | None = None) -> KeptArtifact:
        """Keep a copy of a signed folder. Raises SignatureRefused or ArtifactRefused, with the reason, unless all is right.

        bundle: the signature file's content. signature_name: that file's path in the folder, if it lies there; it is not kept.
        What is kept already stays, if it is whole; another key's signature is kept beside the others.
        """
        signed = read_bundle(bundle)
        key = verify(signed)
        with _disk_faults(), self._unfinished() as place, PlainFolder(folder) as source:
            copy = place / "artifact"
            survey = source.survey()
            files = {path: identity for path, identity in survey.items() if path != signature_name}
            size_bytes = self._check_survey(files)
            found = [_copied(source, path, identity, copy) for path, identity in files.items()]
            source.check_unchanged(survey)
            check_files(signed.manifest, found)
            _seal(copy)
            with self._placing:
                self._place(copy, signed.manifest)
                self._keep_signature(signed, bundle, place)
        return KeptArtifact(signed.manifest, size_bytes, key)

    def _check_survey(self, files: Mapping[str, FileIdentity]) -> Bytes:
        """The size of all. Raises ArtifactRefused, before anything is read, where kinds or sizes refuse it."""
        check_allowed(list(files))
        size_bytes = sum(identity.size_bytes for identity in files.values())
        if size_bytes > self._bytes_max:
            detail = f"An artifact may have {self._bytes_max} bytes; this one has {size_bytes}."
            raise artifact_refused(ArtifactFlaw.TOO_LARGE, detail)
        return size_bytes

    def _place(self, copy: Path, manifest: Manifest) -> None:
        """Put a copy where loads find it, unless a whole one is there; a damaged one makes room."""
        target = self._directory / _hex_of(manifest.digest)
        if os.path.lexists(target):
            try:
                with ExitStack() as held:
                    self._read(manifest, (), held)
                return
            except errors.ArtifactRefused:
                _allow_changes(target)
                target.rename(copy.with_name("damaged"))
        copy.rename(target)
        target.chmod(0o555)
        _sync(target)
        _sync(self._directory)

    def _keep_signature(self, signed: SignedManifest, bundle: bytes, place: Path) -> None:
        folder = self._signatures / _hex_of(signed.manifest.digest)
        folder.mkdir(mode=0o700, exist_ok=True)
        _sync(self._signatures)
        _write_whole(folder / signed.key_hint, bundle, place)

    @contextmanager
    def opened(self, digest: str, names: Sequence[str], verify: Verify) -> Iterator[OpenArtifact]:
        """A kept artifact, verified anew: its signature as it is trusted now, and the content of all its files.

        names: of the files that stay open.

        Raises SignatureRefused or ArtifactRefused with what is wrong, and with which file.
        """
        with ExitStack() as held:
            with _disk_faults():
                artifact = self._read(self._vouched(digest, verify), names, held)
            yield artifact

    def _vouched(self, digest: str, verify: Verify) -> Manifest:
        """The artifact's manifest by the newest signature that is good; else the newest one's refusal."""
        kept = self._signatures / _hex_of(digest)
        if not kept.exists():
            raise _not_kept(digest)
        refusals: list[errors.CallerFault] = []
        with PlainFolder(kept) as folder:
            newest_first = sorted(folder.survey().items(), key=lambda entry: entry[1].modified_ns, reverse=True)
            for name, identity in newest_first:
                try:
                    signed = read_bundle(_whole(folder, name, identity, BUNDLE_BYTES_MAX))
                    if signed.manifest.digest != digest:
                        raise signature_refused(SignatureFlaw.MISMATCH, "The signature that is kept is another artifact's.")
                    verify(signed)
                    return signed.manifest
                except errors.CallerFault as refused:
                    refusals.append(refused)
        raise refusals[0] if refusals else signature_refused(SignatureFlaw.UNSIGNED, "Nothing vouches for the artifact.")

    def _read(self, manifest: Manifest, names: Sequence[str], held: ExitStack) -> OpenArtifact:
        """Check all kept files of an artifact; the named ones stay open. Raises ArtifactRefused."""
        for name in set(names) - {file.path for file in manifest.files}:
            raise artifact_refused(ArtifactFlaw.MISSING_FILE, f"The artifact has no file {shown(name)}.", name)
        opened: dict[str, tuple[int, FileIdentity]] = {}
        place = self._directory / _hex_of(manifest.digest)
        with PlainFolder(place) as folder:
            found: list[FileDigest] = []
            itself, survey = folder.identity(), folder.survey()
            for path, identity in survey.items():
                with ExitStack() as closing:
                    descriptor = folder.open_file(path, identity)
                    (held if path in names else closing).callback(os.close, descriptor)
                    opened[path] = descriptor, identity
                    digest = hashlib.sha256()
                    for block in blocks_of(path, descriptor, identity):
                        digest.update(block)
                    found.append(FileDigest(path, digest.hexdigest()))
            check_files(manifest, found)
        return OpenArtifact(place, itself, survey, {name: opened[name] for name in names})

    def keep_file(self, content: bytes) -> str:
        """Keep a single file, durable on return; its digest, `sha256:` and hex. Raises ArtifactRefused when it is too large."""
        if len(content) > FILE_BYTES_MAX:
            detail = f"A file may have {FILE_BYTES_MAX} bytes; this one has {len(content)}."
            raise artifact_refused(ArtifactFlaw.TOO_LARGE, detail)
        digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
        with _disk_faults(), self._unfinished() as place:
            _write_whole(self._files / _hex_of(digest), content, place)
        return digest

    def read_file(self, digest: str) -> bytes:
        """A kept file's content. Raises ArtifactRefused when it is not there, or is not what was kept."""
        name = _hex_of(digest)
        with _disk_faults(), PlainFolder(self._files) as folder:
            identity = folder.find(name)
            if identity is None:
                raise _not_kept(digest)
            content = _whole(folder, name, identity, FILE_BYTES_MAX)
        if hashlib.sha256(content).hexdigest() != name:
            raise artifact_refused(ArtifactFlaw.CHANGED_FILE, f"The file {digest} is not what was kept.", name)
        return content

    @contextmanager
    def _unfinished(self) -> Iterator[Path]:
        """A place to work in, that is gone afterwards."""
        place = Path(tempfile.mkdtemp(prefix=_UNFINISHED, dir=self._directory))
        try:
            yield place
        finally:
            _remove(place)


def _copied(source: PlainFolder, path: str, identity: FileIdentity, copy: Path) -> FileDigest:
    """Copy one file durably, hashing what is written. Raises ArtifactRefused for content that its kind may not have."""
    target, digest, head = copy / path, hashlib.sha256(), bytearray()
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with target.open("xb", buffering=0) as file:
        for block in source.blocks(path, identity):
            file.write(block)
            digest.update(block)
            head += block[: bytes_to_check(path) - len(head)]
        os.fchmod(file.fileno(), 0o444)
        os.fsync(file.fileno())
    check_content(path, identity.size_bytes, bytes(head))
    return FileDigest(path, digest.hexdigest())


def _whole(folder: PlainFolder, name: str, identity: FileIdentity, bytes_max: Bytes) -> bytes:
    if identity.size_bytes > bytes_max:
        raise artifact_refused(ArtifactFlaw.TOO_LARGE, f"The file {shown(name)} has more than {bytes_max} bytes.", name)
    return b"".join(folder.blocks(name, identity))


def _write_whole(path: Path, content: bytes, place: Path) -> None:
    """Replace a file at once and durably, read-only."""
    draft = place / "draft"
    with draft.open("xb") as file:
        file.write(content)
        file.flush()
        os.fchmod(file.fileno(), 0o444)
        os.fsync(file.fileno())
    draft.replace(path)
    _sync(path.parent)


def _seal(copy: Path) -> None:
    """Make every folder durable, and read-only but for the outermost, which is still to be moved."""
    for folder, _, _ in os.walk(copy, topdown=False):
        _sync(Path(folder))
        if Path(folder) != copy:
            Path(folder).chmod(0o555)


def _remove(path: Path) -> None:
    """Remove what is in the way, as far as that can be: the next start tries again."""
    for folder, _, _ in os.walk(path):
        _allow_changes(Path(folder))
    shutil.rmtree(path, ignore_errors=True)


def _allow_changes(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        path.chmod(0o700)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _hex_of(digest: str) -> str:
    if not re.fullmatch(r"sha256:[0-9a-f]{64}", digest):
        raise _not_kept(digest)
    return digest.removeprefix("sha256:")


def _not_kept(digest: str) -> errors.ArtifactRefused:
    return artifact_refused(ArtifactFlaw.NOT_KEPT, f"Nothing of the digest {shown(digest)} is kept here.")


@contextmanager
def _disk_faults() -> Iterator[None]:
    try:
        yield
    except OSError as fault:
        raise errors.ArtifactsUnavailable(f"Artifacts cannot be kept or read now: {fault.strerror}.") from fault
