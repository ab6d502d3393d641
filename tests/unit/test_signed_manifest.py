"""The signature file's format: what the published tool writes is read, what deviates is refused with the reason."""

import base64
import hashlib
import re
from typing import Any

import msgspec
import pytest

from weir.core.registry.manifest import FILES_MAX, ArtifactFlaw, FileDigest, manifest_of
from weir.core.registry.signed_manifest import (
    BUNDLE_BYTES_MAX,
    SignatureFlaw,
    read_bundle,
    signed_bytes,
    statement_of,
    write_bundle,
)
from weir.errors import ArtifactRefused, SignatureRefused

A, B, HINT = "aa" * 32, "bb" * 32, "cc" * 32
MANIFEST = manifest_of([FileDigest("a/b", A), FileDigest("a.txt", B)])


def bundle() -> dict[str, Any]:
    """A bundle as the tool writes it, its payload still as objects."""
    root = hashlib.sha256(bytes.fromhex(A + B)).hexdigest()
    predicate = {
        "serialization": {"method": "files", "hash_type": "sha256", "allow_symlinks": False, "ignore_paths": [".git"]},
        "resources": [
            {"name": "a/b", "algorithm": "sha256", "digest": A},
            {"name": "a.txt", "algorithm": "sha256", "digest": B},
        ],
    }
    statement = {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": "demo", "digest": {"sha256": root}}],
        "predicateType": "https://model_signing/signature/v1.0",
        "predicate": predicate,
    }
    envelope = {
        "payload": statement,
        "payloadType": "application/vnd.in-toto+json",
        "signatures": [{"sig": base64.b64encode(b"signature").decode(), "keyid": ""}],
    }
    return {
        "mediaType": "application/vnd.dev.sigstore.bundle.v0.3+json",
        "verificationMaterial": {"publicKey": {"hint": HINT}, "tlogEntries": []},
        "dsseEnvelope": envelope,
    }


def content_of(bundle: dict[str, Any]) -> bytes:
    payload = bundle["dsseEnvelope"]["payload"]
    if not isinstance(payload, str):
        payload = base64.b64encode(msgspec.json.encode(payload)).decode()
    return msgspec.json.encode(bundle | {"dsseEnvelope": bundle["dsseEnvelope"] | {"payload": payload}})


def at(tree: Any, path: str, value: Any) -> None:
    """Set, or for `...` remove, what a path of keys and numbers leads to."""
    *way, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    for part in way:
        tree = tree[part]
    if value is ...:
        del tree[last]
    else:
        tree[last] = value


STATEMENT = "dsseEnvelope.payload"


def test_what_the_tool_writes_is_read() -> None:
    """Protects interoperability: names, digests, hint, payload and signature are those of the file."""
    signed = read_bundle(content_of(bundle()))
    assert (signed.name, signed.manifest, signed.key_hint, signed.signature) == ("demo", MANIFEST, HINT, b"signature")
    assert msgspec.json.decode(signed.payload) == bundle()["dsseEnvelope"]["payload"]
    assert signed.signed_bytes == b"DSSEv1 28 application/vnd.in-toto+json %d " % len(signed.payload) + signed.payload


def test_what_is_written_is_what_the_tool_writes() -> None:
    """Protects interoperability: our file has the tool's members and values, its files by the parts of their paths."""
    written = msgspec.json.decode(write_bundle(statement_of(MANIFEST, "demo"), b"signature", HINT))
    written["dsseEnvelope"]["payload"] = msgspec.json.decode(base64.b64decode(written["dsseEnvelope"]["payload"]))
    expected = bundle()
    del expected["dsseEnvelope"]["payload"]["predicate"]["serialization"]["ignore_paths"]
    assert written == expected


def test_a_file_that_is_written_is_read() -> None:
    """Protects the round trip."""
    payload = statement_of(MANIFEST, "demo")
    signed = read_bundle(write_bundle(payload, b"signature", HINT))
    assert (signed.name, signed.manifest, signed.payload, signed.signature) == ("demo", MANIFEST, payload, b"signature")
    assert signed_bytes(payload) == signed.signed_bytes


def test_members_that_the_statement_may_get_are_passed_over() -> None:
    """Protects signatures of later tools: what is signed may say more than we read."""
    more = bundle()
    at(more, f"{STATEMENT}.predicate.card", {"x": 1})
    at(more, f"{STATEMENT}.predicate.resources.0.size", 7)
    assert read_bundle(content_of(more)).manifest == MANIFEST


@pytest.mark.parametrize(
    ("path", "value", "why"),
    [
        ("mediaType", "application/vnd.dev.sigstore.bundle+json;version=0.2", "mediaType"),
        ("mediaType", ..., "mediaType"),
        ("verificationMaterial.publicKey.hint", ..., "hint"),
        ("verificationMaterial.publicKey.hint", "", r"\^\[0-9a-f\]"),
        ("verificationMaterial.publicKey.hint", HINT.upper(), r"\^\[0-9a-f\]"),
        ("verificationMaterial.publicKey.hint", HINT + "\n", r"\^\[0-9a-f\]"),
        ("verificationMaterial.publicKey", ..., "publicKey"),
        ("verificationMaterial.certificate", {"rawBytes": ""}, "unknown field `certificate`"),
        ("verificationMaterial.tlogEntries", [{}], "length <= 0"),
        ("messageSignature", {}, "unknown field `messageSignature`"),
        ("dsseEnvelope.signatures", ..., "signatures"),
        ("dsseEnvelope.payloadType", "text/plain", "payloadType"),
        ("dsseEnvelope.payload", "", "truncated"),
        ("dsseEnvelope.payload", "e30", "base64"),
        ("dsseEnvelope.payload", "e3 0=", "base64"),
        ("dsseEnvelope.payload", "e31=", "base64"),
        ("dsseEnvelope.payload", "é", "ASCII|base64"),
        ("dsseEnvelope.signatures", [], "length >= 1"),
        ("dsseEnvelope.signatures", [{"sig": ""}, {"sig": ""}], "length <= 1"),
        ("dsseEnvelope.signatures.0.sig", ..., "sig"),
        ("dsseEnvelope.signatures.0.keyid", "k", "keyid"),
        (f"{STATEMENT}._type", "https://in-toto.io/Statement/v0.1", "_type"),
        (f"{STATEMENT}.predicateType", "https://model_signing/Digests/v0.1", "predicateType"),
        (f"{STATEMENT}.subject", [], "length >= 1"),
        (f"{STATEMENT}.subject.0.digest", {"sha256": A}, "digest of all files"),
        (f"{STATEMENT}.subject.0.digest", {}, "digest of all files"),
        (f"{STATEMENT}.predicate.serialization.method", "shards", "method"),
        (f"{STATEMENT}.predicate.serialization.hash_type", "blake3", "hash_type"),
        (f"{STATEMENT}.predicate.serialization", ..., "serialization"),
        (f"{STATEMENT}.predicate.resources.0.algorithm", "blake3", "algorithm"),
        (f"{STATEMENT}.predicate.resources.0.algorithm", ..., "algorithm"),
        (f"{STATEMENT}.predicate.resources.1.digest", "ab", "digest"),
        (f"{STATEMENT}.predicate.resources.1.digest", B + "\n", "digest"),
        (f"{STATEMENT}.predicate.resources.0", ..., "digest of all files"),
        (f"{STATEMENT}.predicate.resources.0.name", "x" * 5_000, "length"),
    ],
)
def test_what_deviates_from_the_format_is_refused(path: str, value: Any, why: str) -> None:
    """Protects from everything that is not exactly this format, whose refusal names what is wrong on one short line."""
    changed = bundle()
    at(changed, path, value)
    with pytest.raises(SignatureRefused, match=why) as refused:
        read_bundle(content_of(changed))
    assert refused.value.members == {"field": "signature", "reason": SignatureFlaw.MALFORMED}
    assert refused.value.detail.isprintable() and len(refused.value.detail) < 300


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b"null", b"\xff", b"[" * 100_000, b" " * (BUNDLE_BYTES_MAX + 1)])
def test_what_is_no_bundle_at_all_is_refused(content: bytes) -> None:
    """Protects the reader: any bytes are refused as a signature file, in bounded time and memory."""
    with pytest.raises(SignatureRefused) as refused:
        read_bundle(content)
    assert refused.value.members["reason"] == SignatureFlaw.MALFORMED


def test_a_bundle_that_is_cut_anywhere_is_refused() -> None:
    """Protects from partial signatures."""
    whole = content_of(bundle())
    for length in range(0, len(whole), 7):
        with pytest.raises(SignatureRefused):
            read_bundle(whole[:length])


@pytest.mark.parametrize(
    ("names", "flaw"),
    [
        ([], ArtifactFlaw.EMPTY),
        (["../a"], ArtifactFlaw.UNSAFE_PATH),
        (["a", "a"], ArtifactFlaw.DUPLICATE_PATH),
    ],
)
def test_a_signed_list_of_unusable_files_is_refused(names: list[str], flaw: ArtifactFlaw) -> None:
    """Protects the store: that it is signed does not make a path safe."""
    changed = bundle()
    resources = [{"name": name, "algorithm": "sha256", "digest": A} for name in names]
    at(changed, f"{STATEMENT}.predicate.resources", resources)
    root = hashlib.sha256(bytes.fromhex(A * len(names))).hexdigest()
    at(changed, f"{STATEMENT}.subject.0.digest", {"sha256": root})
    with pytest.raises(ArtifactRefused) as refused:
        read_bundle(content_of(changed))
    assert refused.value.members["reason"] == flaw


def test_too_many_files_are_refused() -> None:
    """Protects memory and time: the list is bounded."""
    changed = bundle()
    resources = [{"name": str(number), "algorithm": "sha256", "digest": A} for number in range(FILES_MAX + 1)]
    at(changed, f"{STATEMENT}.predicate.resources", resources)
    with pytest.raises(SignatureRefused, match=re.escape(f"length <= {FILES_MAX}")):
        read_bundle(content_of(changed))
