"""Components that every surface shares: security, headers, the error shapes, a generation's record."""

from typing import Any

from weir.api.openapi.error_guide import ENDINGS, codes_of
from weir.api.openapi.json_schema import (
    Json,
    answer_object,
    either,
    listed,
    nullable,
    number,
    ref,
    text,
    whole,
    words,
)
from weir.core.batches.batch_records import BatchStatus
from weir.core.endings import FinishReason, Status
from weir.core.issuers import TokenFlaw
from weir.core.metering import Basis
from weir.core.tenancy import LIMIT_NAMES, ServiceClass

_BEARER = """`Authorization: Bearer <credential>`: an application's API key.

Where the operator has configured OpenID Connect issuers, a signed token of one of them (a JWT) may take its place in either
header; what is wrong with a token that is refused stands in `reason`."""
SECURITY_SCHEMES: Json = {
    "bearer": {"type": "http", "scheme": "bearer", "description": _BEARER},
    "apiKey": {
        "type": "apiKey",
        "in": "header",
        "name": "x-api-key",
        "description": "The same key or token, as Anthropic's SDK sends it.",
    },
}
SECURITY: list[Json] = [{"bearer": []}, {"apiKey": []}]
OPEN: list[Json] = []
"""The security of a path that needs no key."""


# ── headers ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _header(schema: Json, *, required: bool = False) -> Json:
    described = dict(schema)
    return {"description": described.pop("description"), "required": required, "schema": described}


_DURATION = r"^(\d+h\d+m|\d+m)?\d+(\.\d+)?(ms|s)$"


def _limit_headers(unit: str) -> dict[str, Json]:
    return {
        f"x-ratelimit-limit-{unit}": _header(whole(f"The tightest limit of {unit} per minute that is set.")),
        f"x-ratelimit-remaining-{unit}": _header(whole(f"What is left of it, in {unit}.")),
        f"x-ratelimit-reset-{unit}": _header(text("When it is unused again: `1m0s`, `1.5s`, `250ms`.", pattern=_DURATION)),
    }


LIMIT_HEADERS: dict[str, Json] = {
    **_limit_headers("requests"),
    **_limit_headers("tokens"),
    "RateLimit-Policy": _header(text('The same limits as structured fields: `"requests";q=600;w=60`.')),
    "RateLimit": _header(text('Their state as structured fields: `"requests";r=599;t=1`.')),
}
RETRY_HEADERS: dict[str, Json] = {
    "Retry-After": _header(whole("Whole seconds after which to come again, rounded up; absent where no wait helps.")),
    "retry-after-ms": _header(whole("The same in milliseconds.")),
    "x-should-retry": _header(
        words("Whether an SDK should send it again, where the status would mislead it.", ("true", "false"))
    ),
}
HEADERS: dict[str, Json] = {
    "x-request-id": _header(text("The request's id: the caller's own, else a generated one.", shortest=1), required=True),
    "request-id": _header(text("The same, under the name that Anthropic's SDK reads.", shortest=1), required=True),
    **LIMIT_HEADERS,
    **RETRY_HEADERS,
    "WWW-Authenticate": _header(text("How to authenticate.", pattern="^Bearer$"), required=True),
    "Allow": _header(text("The methods that this path takes."), required=True),
    "ETag": _header(text("Names this version of the document."), required=True),
    "Cache-Control": _header(text("How long the answer may be kept."), required=True),
    "weir-replayed": _header(words("`true` where this was shown before, and is shown again from what was kept.", ("true",))),
}


def header_refs(*names: str) -> Json:
    """References to these headers."""
    return {name: {"$ref": f"#/components/headers/{name}"} for name in names}


# ── errors ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def member_schemas() -> dict[str, Json]:
    """Every member that a refusal of the tenant API may carry."""
    accepted: Json = either("What is accepted there.", {"type": "string"}, {"type": "array", "items": {"type": "string"}})
    limit: Json = either("A limit's value, in tokens, requests or micro-dollars; its name in `exceeds_limit_capacity`.",
                         {"type": "integer"}, {"type": "string"})  # fmt: skip
    return {
        "field": text("The field, header or part of the body that is wrong."),
        "accepted": accepted,
        "reason": words("What is wrong with a token.", TokenFlaw),
        "input_tokens": whole("Tokens of the input, as counted or bounded."),
        "limit": limit,
        "limit_bytes": whole("The bound, in bytes."),
        "predicted_ms": whole("How long it is predicted to take, in milliseconds."),
        "deadline_ms": whole("How long it may take, in milliseconds."),
        "scope": ref("Scope"),
        "limit_name": words("Which limit refused.", LIMIT_NAMES),
        "needed": whole("What the request needs of the limit."),
        "capacity": whole("All that the limit allows."),
        "used": whole("What is used of a bucket, spent of a budget, or in flight."),
        "held": whole("What open holds have set aside of a budget, or what is in flight."),
        "window": text("The budget's window: `day/2026-11-29` or `month/2026-11`, in the tenant's time zone."),
        "resets_at": {**text("When the bucket is unused again, or the window ends (RFC 3339)."), "format": "date-time"},
        "service_class": words("The caller's service class, which no pool of the model takes.", ServiceClass),
        "allowed": listed("The methods that the path takes.", {"type": "string"}),
        "line": whole("The line of the file that is wrong.", 1),
        "state": words("The state of what this is about.", dict.fromkeys((*Status, *BatchStatus))),
        "generation": ref("Generation"),
    }


def _scope() -> Json:
    parts = {
        "tenant": text("The tenant."),
        "application": text("Its application, where the limit is that one's."),
        "key": text("The key's id, where the limit is that one's."),
        "alias": text("The alias, where the limit is for that one alone."),
        "service_class": words("The service class, where the limit is for requests of that one alone.", ServiceClass),
    }
    return answer_object("What a limit attaches to; only what is set.", parts, ["tenant"])


def _problem() -> Json:
    fields = {
        "type": text("`urn:weir:error:` and the code.", pattern="^urn:weir:error:[a-z_]+$"),
        "title": text("What happened, the same for every refusal of the code.", shortest=1),
        "status": whole("The HTTP status.", 400, 599),
        "code": text("The stable name of what happened: switch on this."),
        "detail": text("One sentence for a person; never the text that was sent.", shortest=1),
        **member_schemas(),
    }
    return answer_object("A refusal as RFC 9457 has it, with the code's own members.", fields, list(fields)[:5])


def _openai_error() -> Json:
    fields = {
        "message": text("One sentence for a person; never the text that was sent.", shortest=1),
        "type": text("OpenAI's kind of error, by the HTTP status."),
        "param": nullable(text("The field that is wrong, where it is one field.")),
        "code": text("The stable name of what happened: switch on this."),
        **member_schemas(),
    }
    return answer_object("An error as OpenAI has it, with the code's own members.", fields, list(fields)[:4])


def _anthropic_error() -> Json:
    code = text("The same as `code`, where Anthropic's SDK reads it.")
    fields = {
        "type": text("Anthropic's kind of error, by the HTTP status."),
        "message": text("One sentence for a person; never the text that was sent.", shortest=1),
        "code": text("The stable name of what happened: switch on this."),
        "details": answer_object("For the SDK.", {"error_code": code}, ["error_code"]),
        **member_schemas(),
    }
    return answer_object("An error as Anthropic has it, with the code's own members.", fields, list(fields)[:4])


# ── a generation ─────────────────────────────────────────────────────────────────────────────────────────────────────


def _usage() -> Json:
    fields: dict[str, Json] = {
        "input_tokens": whole("Tokens of the input, as measured."),
        "cached_input_tokens": whole("Those of them that the engine had cached."),
        "output_tokens": whole("Tokens of the output, as measured."),
        "cost_microusd": whole("What you pay, in millionths of a dollar; 0 where the platform pays."),
        "basis": nullable(
            words("Measured by the engine, counted by Weir, or bounded after a crash; null: nothing ran.", Basis)
        ),
        "settlement": words("`posted` once the ledger holds it durably.", ("posted", "pending")),
    }
    return answer_object("What was used, and what it costs.", fields, list(fields))


def _timing() -> Json:
    fields = {
        "queue_ms": nullable(number("From the last byte of the request to its dispatch.", 0)),
        "ttft_ms": nullable(number("To the first output.", 0)),
        "tpot_ms": nullable(number("Per output token after the first.", 0)),
        "total_ms": nullable(number("To the end.", 0)),
    }
    return answer_object("In milliseconds; null where a phase was not reached.", fields, list(fields))


def ended_fields() -> dict[str, Any]:
    """Fields of a generation that has ended."""
    return {"usage": ref("Usage"), "timing": ref("Timing"), "error": ref("EndingError")}


def _generation() -> Json:
    fields: dict[str, Json] = {
        "id": text("The generation's id.", shortest=1),
        "request_id": text("The request's id: the idempotency key.", shortest=1),
        "model_alias": text("The alias that was asked for."),
        "model_revision": text("The revision that answers: a name, `@` and the beginning of a digest."),
        "status": words("How far it is, or how it ended.", Status),
        "finish_reason": nullable(words("Why it ended; null while it lasts.", FinishReason)),
        "output": text("The whole text, when it completed: in the answer to the request itself, and where its stream is kept."),
        **ended_fields(),
    }
    return answer_object("A generation: its record, and its output where that is shown.", fields, list(fields)[:6])


def _ending_error() -> Json:
    codes = codes_of(tuple(rule.error for rule in ENDINGS if rule.error))
    fields = {
        "code": words("Why it ended without success.", codes),
        "detail": text("One sentence for a person."),
    }
    return answer_object("Why a generation did not complete.", fields, list(fields))


SCHEMAS: dict[str, Json] = {
    "Problem": _problem(),
    "OpenAIError": _openai_error(),
    "AnthropicError": _anthropic_error(),
    "Scope": _scope(),
    "Generation": _generation(),
    "Usage": _usage(),
    "Timing": _timing(),
    "EndingError": _ending_error(),
}
