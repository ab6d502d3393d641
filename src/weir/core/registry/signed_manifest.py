"""The OpenSSF Model Signing format: a manifest and its signature as one JSON file, read strictly and written.

Pure. The file is a Sigstore bundle (v0.3) in key mode: the hint of a public key, and a DSSE envelope around an in-toto
statement, whose predicate lists every file with its SHA-256. A signature is over the envelope's payload exactly as it stands,
so the payload is kept as bytes and never written again. Reading says nothing about trust: that is `key_ring`'s.

Of the format's variants only whole files and SHA-256 are read. Members that later versions may add to the signed statement are
passed over, as the format demands; outside, where nothing is signed, an unknown member refuses the file.
"""

import base64
import binascii
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Final, Literal

import msgspec

from weir import errors
from weir.core.registry.manifest import FILES_MAX, FileDigest, Manifest, manifest_of
from weir.units import Bytes

BUNDLE_BYTES_MAX: Bytes = 16 * 1024 * 1024
_BUNDLE_TYPE: Final = "application/vnd.dev.sigstore.bundle.v0.3+json"
_PAYLOAD_TYPE: Final = "application/vnd.in-toto+json"
_STATEMENT_TYPE: Final = "https://in-toto.io/Statement/v1"
_PREDICATE_TYPE: Final = "https://model_signing/signature/v1.0"
_REASON_CHARACTERS = 200

Hex256 = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
_Name = Annotated[str, msgspec.Meta(max_length=4_096)]


class SignatureFlaw(StrEnum):
    """Why a signature is refused: the member `reason` of the refusal."""

    UNSIGNED = "unsigned"
    MALFORMED = "malformed"
    UNKNOWN_KEY = "unknown_key"
    MISMATCH = "mismatch"
    REVOKED_KEY = "revoked_key"
    WRONG_ROLE = "wrong_role"
    OTHER_TENANT = "other_tenant"
    NOT_YET_VALID = "not_yet_valid"
    EXPIRED = "expired"


def signature_refused(flaw: SignatureFlaw, detail: str) -> errors.SignatureRefused:
    """The refusal of a signature. detail: a sentence."""
    return errors.SignatureRefused(detail, members={"field": "signature", "reason": flaw.value})


@dataclass(frozen=True, slots=True)
class SignedManifest:
    """A manifest with a signature that nobody checked yet.

    name: what the signer called the artifact, only for people. key_hint: the fingerprint of the key it claims to be from.
    payload: the signed statement. signature: ECDSA in DER.
    """

    name: str
    manifest: Manifest
    key_hint: str
    payload: bytes
    signature: bytes

    @property
    def signed_bytes(self) -> bytes:
        """What the signature is over."""
        return signed_bytes(self.payload)


class _Subject(msgspec.Struct):
    name: _Name
    digest: dict[str, str]


class _Serialization(msgspec.Struct):
    method: Literal["files"]
    hash_type: Literal["sha256"]
    allow_symlinks: bool


class _Resource(msgspec.Struct):
    name: _Name
    algorithm: Literal["sha256"]
    digest: Hex256


class _Predicate(msgspec.Struct):
    serialization: _Serialization
    resources: Annotated[list[_Resource], msgspec.Meta(max_length=FILES_MAX)]


class _Statement(msgspec.Struct, rename={"type": "_type", "predicate_type": "predicateType"}):
    type: Literal["https://in-toto.io/Statement/v1"]
    subject: Annotated[list[_Subject], msgspec.Meta(min_length=1, max_length=1)]
    predicate_type: Literal["https://model_signing/signature/v1.0"]
    predicate: _Predicate


class _PublicKey(msgspec.Struct, forbid_unknown_fields=True):
    hint: Hex256


class _Material(msgspec.Struct, forbid_unknown_fields=True, rename="camel"):
    public_key: _PublicKey
    tlog_entries: Annotated[list[msgspec.Raw], msgspec.Meta(max_length=0)] = []


class _Signature(msgspec.Struct, forbid_unknown_fields=True):
    sig: str
    keyid: Literal[""] = ""


class _Envelope(msgspec.Struct, forbid_unknown_fields=True, rename="camel"):
    payload: str
    payload_type: Literal["application/vnd.in-toto+json"]
    signatures: Annotated[list[_Signature], msgspec.Meta(min_length=1, max_length=1)]


class _Bundle(msgspec.Struct, forbid_unknown_fields=True, rename="camel"):
    media_type: Literal["application/vnd.dev.sigstore.bundle.v0.3+json"]
    verification_material: _Material
    dsse_envelope: _Envelope


def read_bundle(content: bytes) -> SignedManifest:
    """What a signature file says. Raises SignatureRefused where it breaks the format, ArtifactRefused for what it lists."""
    if len(content) > BUNDLE_BYTES_MAX:
        raise _malformed(f"it has more than {BUNDLE_BYTES_MAX} bytes")
    try:
        bundle = msgspec.json.decode(content, type=_Bundle)
        payload = _from_base64(bundle.dsse_envelope.payload)
        signature = _from_base64(bundle.dsse_envelope.signatures[0].sig)
        statement = msgspec.json.decode(payload, type=_Statement)
    except (msgspec.MsgspecError, ValueError, RecursionError) as fault:
        raise _malformed(str(fault)) from None
    resources, [subject] = statement.predicate.resources, statement.subject
    if subject.digest.get("sha256") != _root_digest(resources):
        raise _malformed("its digest of all files does not belong to the files it lists")
    manifest = manifest_of(FileDigest(resource.name, resource.digest) for resource in resources)
    return SignedManifest(subject.name, manifest, bundle.verification_material.public_key.hint, payload, signature)


def statement_of(manifest: Manifest, name: str) -> bytes:
    """The statement to be signed for a manifest. name: what to call the artifact, for people."""
    # The format orders files by the parts of their paths.
    files = sorted(manifest.files, key=lambda file: file.path.split("/"))
    resources = [_Resource(file.path, "sha256", file.sha256) for file in files]
    subject = _Subject(name, {"sha256": _root_digest(resources)})
    predicate = _Predicate(_Serialization("files", "sha256", allow_symlinks=False), resources)
    return msgspec.json.encode(_Statement(_STATEMENT_TYPE, [subject], _PREDICATE_TYPE, predicate))


def signed_bytes(payload: bytes) -> bytes:
    """What the signature of a statement is over: the statement with its type and both lengths (DSSE)."""
    return f"DSSEv1 {len(_PAYLOAD_TYPE)} {_PAYLOAD_TYPE} {len(payload)} ".encode() + payload


def write_bundle(payload: bytes, signature: bytes, key_hint: str) -> bytes:
    """A signature file's content. payload: a statement; signature: over its signed_bytes; key_hint: the key's fingerprint."""
    signatures = [_Signature(base64.b64encode(signature).decode())]
    envelope = _Envelope(base64.b64encode(payload).decode(), _PAYLOAD_TYPE, signatures)
    return msgspec.json.encode(_Bundle(_BUNDLE_TYPE, _Material(_PublicKey(key_hint)), envelope))


def _root_digest(resources: Iterable[_Resource]) -> str:
    """The format's digest over all files: of their digests' bytes, one after another as they are listed."""
    return hashlib.sha256(b"".join(bytes.fromhex(resource.digest) for resource in resources)).hexdigest()


def _from_base64(text: str) -> bytes:
    """Raises ValueError unless it is exactly what encoding gives, so that each value has one form."""
    try:
        content = base64.b64decode(text, validate=True)
    except binascii.Error:
        raise ValueError("its base64 is malformed") from None
    if base64.b64encode(content).decode() != text:
        raise ValueError("its base64 is malformed")
    return content


def _malformed(why: str) -> errors.SignatureRefused:
    """why: may quote the file, so it is cut and shown on one line."""
    plain = why if why.isprintable() else ascii(why)
    detail = f"The signature file is not one of the OpenSSF Model Signing format with a key: {plain[:_REASON_CHARACTERS]}."
    return signature_refused(SignatureFlaw.MALFORMED, detail)
