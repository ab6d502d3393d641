"""A signature holds for exactly what was signed: any change of any byte of statement, signature or file is refused."""

import hashlib
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.signing_keys import private_key

from weir.core.registry.key_ring import KeyRole, SigningKey
from weir.core.registry.manifest import FileDigest, Manifest, check_files, check_path, manifest_of
from weir.core.registry.signatures import public_key_of, sign, verify
from weir.core.registry.signed_manifest import SignedManifest, read_bundle, write_bundle
from weir.errors import ArtifactRefused, SignatureRefused

PRIVATE = private_key(1)
KEY = SigningKey("k", public_key_of(PRIVATE), frozenset(KeyRole), None, 0)
PARTS = st.text(st.sampled_from("abAB.-_ é模1"), min_size=1, max_size=6).filter(lambda part: part not in (".", ".."))
PATHS = st.lists(PARTS, min_size=1, max_size=3).map("/".join)
CONTENTS = st.dictionaries(PATHS, st.binary(max_size=40), min_size=1, max_size=6).filter(
    lambda contents: len({path.casefold() for path in contents}) == len(contents)
)


def files_of(contents: dict[str, bytes]) -> list[FileDigest]:
    return [FileDigest(path, hashlib.sha256(content).hexdigest()) for path, content in contents.items()]


def accepted(bundle: bytes, contents: dict[str, bytes]) -> Manifest:
    """What registration does: read, verify, compare."""
    signed = read_bundle(bundle)
    verify(signed, [KEY], KeyRole.MODEL, None, 0)
    check_files(signed.manifest, files_of(contents))
    return signed.manifest


def flipped(content: bytes, place: int, bits: int) -> bytes:
    """The content with one byte changed."""
    place %= len(content)
    return content[:place] + bytes([content[place] ^ bits]) + content[place + 1 :]


@given(CONTENTS)
def test_what_was_signed_is_accepted(contents: dict[str, bytes]) -> None:
    """Protects the round trip: any files with fine names are signed, written, read and verified as themselves."""
    manifest = manifest_of(files_of(contents))
    assert accepted(sign(manifest, "name", PRIVATE), contents) == manifest
    assert [file.path.encode() for file in manifest.files] == sorted(path.encode() for path in contents)


@given(CONTENTS, st.integers(0, 2**16), st.integers(1, 255), st.data())
def test_any_changed_byte_of_a_file_is_refused(contents: dict[str, bytes], place: int, bits: int, data: st.DataObject) -> None:
    """Protects what is loaded: one byte changed, added or removed in any file, or a file renamed, added or removed."""
    bundle = sign(manifest_of(files_of(contents)), "name", PRIVATE)
    path = data.draw(st.sampled_from(sorted(contents)))
    content, without = contents[path], {name: kept for name, kept in contents.items() if name != path}
    changes = [contents | {path: content + b"\0"}, without, without | {f"{path}~": content}, contents | {f"{path}~": content}]
    if content:
        changes += [contents | {path: flipped(content, place, bits)}, contents | {path: content[:-1]}]
    for changed in changes:
        with pytest.raises(ArtifactRefused):
            accepted(bundle, changed)


@given(CONTENTS, st.integers(0, 2**16), st.integers(1, 255))
def test_any_changed_byte_of_what_was_signed_is_refused(contents: dict[str, bytes], place: int, bits: int) -> None:
    """Protects from an edited statement, signature or hint, whether or not it is still well-formed."""
    signed = read_bundle(sign(manifest_of(files_of(contents)), "name", PRIVATE))
    changes: list[SignedManifest] = [
        replace(signed, payload=flipped(signed.payload, place, bits)),
        replace(signed, signature=flipped(signed.signature, place, bits)),
        replace(signed, payload=signed.payload[: place % len(signed.payload)]),
        replace(signed, signature=signed.signature[: place % len(signed.signature)]),
    ]
    for changed in changes:
        with pytest.raises(SignatureRefused):
            verify(changed, [KEY], KeyRole.MODEL, None, 0)
        with pytest.raises((SignatureRefused, ArtifactRefused)):
            accepted(write_bundle(changed.payload, changed.signature, changed.key_hint), contents)


@given(CONTENTS, st.integers(0, 2**20), st.integers(1, 255))
def test_a_changed_byte_of_the_file_changes_no_meaning(contents: dict[str, bytes], place: int, bits: int) -> None:
    """Protects the reader: a bundle with any byte changed is refused, or says what the signer said."""
    manifest = manifest_of(files_of(contents))
    bundle = sign(manifest, "name", PRIVATE)
    try:
        assert accepted(flipped(bundle, place, bits), contents) == manifest
    except (SignatureRefused, ArtifactRefused):
        return


@given(st.text(max_size=20))
def test_a_path_that_is_accepted_stays_below_its_folder(path: str) -> None:
    """Protects the file system: no accepted path is absolute, leaves its folder or has a part without a name."""
    try:
        check_path(path)
    except ArtifactRefused:
        return
    assert path.isprintable() and not path.startswith("/")
    assert all(part not in ("", ".", "..") for part in path.split("/"))
