"""A revision is registered: its artifact is verified and kept, and everything that makes it what it is, recorded.

It decides what a registration may say and what the revision is called: its id carries a digest of all that is immutable, so
that another artifact, window or argument is another revision. Files are read before anything is recorded; what is kept and
never recorded is found by its content the next time. Nothing serves by being registered.
"""

import asyncio
import errno
import fnmatch
import hashlib
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from weir import errors
from weir.control.catalog_lookup import require_revision, require_signing_key, require_tenant
from weir.control.commands import Commands, Outcome
from weir.control.validation import check_batch_percent, check_name, check_number, check_prices
from weir.core.metering import Price
from weir.core.registry.arguments import checked_arguments
from weir.core.registry.golden_set import parse_golden_set
from weir.core.registry.key_ring import KeyRole, SigningKey, check_trust
from weir.core.registry.manifest import Manifest
from weir.core.registry.model import FROM_ARTIFACTS, Argument, EngineKind, Revision, RevisionState
from weir.core.registry.signatures import verify
from weir.core.registry.signed_manifest import SignedManifest
from weir.ports import Artifacts, Catalog, CatalogChange, Clock, KeptArtifact
from weir.units import Bytes, Tokens

CONTEXT_TOKENS_MIN, CONTEXT_TOKENS_MAX = 16, 100_000_000
BUNDLE_BYTES_MAX: Bytes = 16 * 1024 * 1024
_PATH_CHARACTERS_MAX = 4_096
_ID_DIGITS = 8
_WEIGHTS = ".gguf"
_ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
_MUTABLE = ("id", "state", "price", "registered_by", "approved_by")
_INHERITED = ("context_tokens", "max_output_tokens", "typical_output_tokens", "chat", "arguments")
_FITTING = {
    "served": "with the engine openai, and only then, the served model's name",
    "folder": "with the engines llamacpp and vllm, and only then, the artifact's path",
    "signature": "with the engines llamacpp and vllm, and only then, its signature's path",
    "external": "only with the engine openai",
    "artifact": "not with the engines openai and vllm",
}


@dataclass(frozen=True, slots=True)
class NewRevision:
    """A revision as it is asked for; see `Revision`.

    folder, signature: absolute paths on this machine, of the artifact and of its signature. artifact: the file in it that
    llama.cpp loads, if there are several; of a simulated engine, the calibration row. served: what an engine behind a URL calls
    the model. max_output_tokens, typical_output_tokens: None for the window, and for a quarter of the most. chat: None is true.
    evaluation: the evaluation set's lines. An adapter (adapter_of) says none of context_tokens, the output tokens, chat and
    arguments: it has those of what it changes.
    """

    name: str
    engine: EngineKind
    input_microusd: int
    cached_input_microusd: int
    output_microusd: int
    batch_percent: int = 100
    context_tokens: Tokens | None = None
    folder: str | None = None
    signature: str | None = None
    artifact: str | None = None
    served: str | None = None
    max_output_tokens: Tokens | None = None
    typical_output_tokens: Tokens | None = None
    chat: bool | None = None
    external: bool = False
    arguments: Mapping[str, Argument] = field(default_factory=dict)
    evaluation: str | None = None
    tenant: str | None = None
    adapter_of: str | None = None


class Registration:
    """Registers revisions. `actor` is the name that the audit trail shows, and who may not approve them."""

    def __init__(self, commands: Commands, artifacts: Artifacts, clock: Clock) -> None:
        self._commands = commands
        self._artifacts = artifacts
        self._clock = clock

    async def register(self, actor: str, asked: NewRevision) -> Outcome[Revision]:
        """Verify, keep and record. Nothing serves yet.

        Raises InvalidRequest by field, SignatureRefused or ArtifactRefused with the reason, NotFound for the tenant or the
        revision that an adapter changes, NotAllowedNow where that one cannot be changed, AlreadyExists, ArtifactsUnavailable.
        """
        revision, kept = await self._built(await self._commands.catalog(), actor, asked)
        summary = {
            "artifact": revision.artifact_digest or "unverified",
            "signing_key": kept.key.name if kept else None,
            "engine": revision.engine.value,
            "tenant": revision.tenant,
            "adapter_of": revision.adapter_of,
        }
        entry = self._commands.audit_entry(actor, "revision.register", revision.id, summary)

        def plan(catalog: Catalog) -> tuple[Revision, CatalogChange]:
            _draft(catalog, actor, asked)  # again, and whoever vouched: to copy a model takes minutes
            if kept is not None:
                trusted = require_signing_key(catalog, kept.key.name)
                check_trust(trusted, _role_of(asked), asked.tenant, self._clock.wall_ms())
            if any(known.id == revision.id for known in catalog.revisions):
                raise errors.AlreadyExists(f"This is registered already, as {revision.id!r}.")
            return revision, CatalogChange(entry, revisions=(revision,))

        return await self._commands.commit(plan)

    async def _built(self, catalog: Catalog, actor: str, asked: NewRevision) -> tuple[Revision, KeptArtifact | None]:
        draft = _draft(catalog, actor, asked)
        cases = None if asked.evaluation is None else asked.evaluation.encode()
        if cases is not None:
            _check_evaluation(draft, cases)
        kept = await self._kept(catalog, asked)
        revision = replace(
            draft,
            artifact=_loaded_file(asked, kept.manifest) if kept else draft.artifact,
            artifact_digest=kept.manifest.digest if kept else None,
            evaluation=None if cases is None else await self._artifacts.keep_file(cases),
        )
        return with_id(asked.name, revision), kept

    async def _kept(self, catalog: Catalog, asked: NewRevision) -> KeptArtifact | None:
        """The artifact, verified and copied; None for an engine that loads none of ours."""
        if asked.engine not in FROM_ARTIFACTS:
            return None
        folder, signature = _absolute("folder", asked.folder), _absolute("signature", asked.signature)
        bundle = await asyncio.to_thread(_read_bundle, signature)

        def trusted(signed: SignedManifest) -> SigningKey:
            return verify(signed, catalog.signing_keys, _role_of(asked), asked.tenant, self._clock.wall_ms())

        inside = signature.relative_to(folder).as_posix() if signature.is_relative_to(folder) else None
        return await self._artifacts.keep(folder, bundle, trusted, inside)


def _check_evaluation(draft: Revision, cases: bytes) -> None:
    """Raises InvalidRequest for a set that cannot be read, or of a model that answers no question."""
    if draft.embeds:
        members = {"field": "evaluation", "accepted": "absent: this model makes embeddings"}
        raise errors.InvalidRequest("An evaluation set asks for text, and this model makes embeddings.", members=members)
    parse_golden_set(cases)


def _role_of(asked: NewRevision) -> KeyRole:
    """What the signing key must vouch for."""
    return KeyRole.MODEL if asked.adapter_of is None else KeyRole.ADAPTER


def with_id(name: str, revision: Revision) -> Revision:
    """The revision under its id: its name and a digest of everything about it that never changes."""
    immutable = {each: value for each, value in msgspec.to_builtins(revision).items() if each not in _MUTABLE}
    identity = msgspec.json.encode(immutable, order="deterministic")
    return replace(revision, id=f"{name}@{hashlib.sha256(identity).hexdigest()[:_ID_DIGITS]}")


def _price(asked: NewRevision) -> Price:
    """The first version of its price schedule. Raises InvalidRequest."""
    amounts = {name: getattr(asked, name) for name in ("input_microusd", "cached_input_microusd", "output_microusd")}
    check_prices(amounts)
    check_batch_percent(asked.batch_percent)
    return Price(1, **amounts, batch_percent=asked.batch_percent)


def _draft(catalog: Catalog, actor: str, asked: NewRevision) -> Revision:
    """The revision without what its artifact says. Raises InvalidRequest, NotFound or NotAllowedNow."""
    check_name("name", asked.name)
    if asked.tenant is not None:
        require_tenant(catalog, asked.tenant)
    price = _price(asked)
    artifact = _unverified(asked)
    if asked.adapter_of is not None:
        changed = _changed_model(catalog, asked)
        return replace(
            changed,
            state=RevisionState.REGISTERED,
            price=price,
            tenant=asked.tenant,
            adapter_of=changed.id,
            registered_by=actor,
            approved_by=None,
        )
    check_number("context_tokens", asked.context_tokens, CONTEXT_TOKENS_MIN, CONTEXT_TOKENS_MAX)
    context = asked.context_tokens or 0
    most = context if asked.max_output_tokens is None else asked.max_output_tokens
    check_number("max_output_tokens", most, 1, context)
    typical = max(1, most // 4) if asked.typical_output_tokens is None else asked.typical_output_tokens
    check_number("typical_output_tokens", typical, 1, most)
    return Revision(
        id="",
        engine=asked.engine,
        artifact=artifact,
        context_tokens=context,
        max_output_tokens=most,
        typical_output_tokens=typical,
        price=price,
        chat=asked.chat is not False,
        external=asked.external,
        state=RevisionState.REGISTERED,
        arguments=checked_arguments(asked.engine, asked.arguments),
        tenant=asked.tenant,
        registered_by=actor,
    )


def _unverified(asked: NewRevision) -> str:
    """What an engine is told to load that loads nothing of ours. Raises InvalidRequest for fields that do not fit it."""
    is_served, is_kept = asked.engine is EngineKind.OPENAI, asked.engine in FROM_ARTIFACTS
    fits = {
        "served": bool(asked.served) is is_served,
        "folder": bool(asked.folder) is is_kept,
        "signature": bool(asked.signature) is is_kept,
        "external": is_served or not asked.external,
        "artifact": not (asked.artifact and asked.engine in (EngineKind.OPENAI, EngineKind.VLLM)),
    }
    for name, is_right in fits.items():
        if not is_right:
            members = {"field": name, "accepted": _FITTING[name]}
            raise errors.InvalidRequest(f"{name} does not fit the engine {asked.engine.value}.", members=members)
    if asked.engine is EngineKind.SIMULATED and asked.artifact is None:
        raise errors.InvalidRequest("artifact is missing.", members={"field": "artifact", "accepted": "a calibration row"})
    return asked.served or asked.artifact or ""


def _changed_model(catalog: Catalog, asked: NewRevision) -> Revision:
    """The revision whose model an adapter changes."""
    assert asked.adapter_of is not None
    changed = require_revision(catalog, asked.adapter_of)
    if asked.tenant is None:
        raise errors.InvalidRequest(
            "An adapter belongs to a tenant.", members={"field": "tenant", "accepted": "a tenant's name"}
        )
    fits = changed.serves and changed.adapter_of is None and changed.tenant in (None, asked.tenant)
    if not fits or changed.engine not in FROM_ARTIFACTS or changed.artifact_digest is None:
        detail = (
            f"Revision {changed.id!r} takes no adapter: that needs a verified model that we run and that serves this tenant."
        )
        raise errors.NotAllowedNow(detail, members={"state": changed.state.value})
    given = (name for name in _INHERITED if getattr(asked, name) not in (None, {}))
    name = next(given, None) if asked.engine is changed.engine else "engine"
    if name is not None:
        members = {"field": name, "accepted": f"what {changed.id} has, so leave it out" if name != "engine" else changed.engine}
        raise errors.InvalidRequest(f"An adapter has the {name} of what it changes.", members=members)
    return changed


def _loaded_file(asked: NewRevision, manifest: Manifest) -> str:
    """What the engine loads of the artifact: a file, or all of it. Raises InvalidRequest unless that is there."""
    if asked.engine is EngineKind.VLLM:
        return _whole_folder(asked, manifest)
    weights = sorted(file.path for file in manifest.files if file.path.endswith(_WEIGHTS))
    if asked.artifact is None and len(weights) == 1:
        return weights[0]
    if asked.artifact not in weights:
        members = {"field": "artifact", "accepted": weights}
        raise errors.InvalidRequest("artifact must be a file of weights in the folder.", members=members)
    return asked.artifact


def _whole_folder(asked: NewRevision, manifest: Manifest) -> str:
    """Raises InvalidRequest unless vLLM will find there what it looks for."""
    configuration, weights = ("config.json", "*.safetensors") if asked.adapter_of is None else _ADAPTER_FILES
    names = [file.path for file in manifest.files if "/" not in file.path]
    if configuration not in names or not fnmatch.filter(names, weights):
        members = {"field": "folder", "accepted": f"a folder with {configuration} and {weights}"}
        raise errors.InvalidRequest(f"vLLM needs {configuration} and {weights} in the folder.", members=members)
    return "."


def _absolute(name: str, text: str | None) -> Path:
    if text is None or not text.startswith("/") or "\0" in text or len(text) > _PATH_CHARACTERS_MAX:
        accepted = "an absolute path on the machine of control"
        raise errors.InvalidRequest(f"{name} must be {accepted}.", members={"field": name, "accepted": accepted})
    return Path(text)


def _read_bundle(path: Path) -> bytes:
    """The signature's file. Raises InvalidRequest."""
    try:
        with open(path, "rb", opener=_open_at_once) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise OSError(errno.EINVAL, "it is no plain file")
            content = file.read(BUNDLE_BYTES_MAX + 1)
    except OSError as fault:
        reason = fault.strerror or "unknown fault"
        members = {"field": "signature", "accepted": "a file that control can read"}
        raise errors.InvalidRequest(f"The signature cannot be read: {reason}.", members=members) from fault
    if len(content) > BUNDLE_BYTES_MAX:
        members = {"field": "signature", "accepted": f"at most {BUNDLE_BYTES_MAX} bytes"}
        raise errors.InvalidRequest("The signature is too large.", members=members)
    return content


def _open_at_once(path: str, flags: int) -> int:
    """A pipe without a writer would keep a thread for ever."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY)
