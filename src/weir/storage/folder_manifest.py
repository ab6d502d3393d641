"""The manifest of a folder as it is now, for whoever signs it.

It refuses what a registration would refuse, before anybody vouches for it: links, pipes, kinds that may run code, files that
change while they are read. It never writes.
"""

import hashlib
from pathlib import Path

from weir.core.registry.artifact_kinds import bytes_to_check, check_allowed, check_content
from weir.core.registry.manifest import FileDigest, Manifest, manifest_of
from weir.storage.plain_folder import FileIdentity, PlainFolder


def manifest_of_folder(path: Path, signature_name: str | None = None) -> Manifest:
    """Every file of a folder by name and content. signature_name: of a file in it that is none of the artifact's.

    Raises ArtifactRefused with the reason and the file, ArtifactsUnavailable when the disk fails.
    """
    with PlainFolder(path) as folder:
        survey = folder.survey()
        files = {name: identity for name, identity in survey.items() if name != signature_name}
        check_allowed(list(files))
        manifest = manifest_of([_digest(folder, name, identity) for name, identity in files.items()])
        folder.check_unchanged(survey)
        return manifest


def _digest(folder: PlainFolder, name: str, identity: FileIdentity) -> FileDigest:
    digest, head = hashlib.sha256(), bytearray()
    for block in folder.blocks(name, identity):
        digest.update(block)
        head += block[: bytes_to_check(name) - len(head)]
    check_content(name, identity.size_bytes, bytes(head))
    return FileDigest(name, digest.hexdigest())
