"""The aliases that a key may use, as OpenAI's models; as Anthropic's where the request names a version of its API."""

from weir import errors
from weir.api.anthropic.anthropic_surface import PAGE, PAGE_MAX
from weir.api.openapi.answers import BY_VERSION, CONNECTION, PROBLEM, WITH_KEY, Errors, answer, refusals, together
from weir.api.openapi.generation_fields import header
from weir.api.openapi.json_schema import Json, answer_object, either, flag, listed, nullable, only, ref, text, whole
from weir.api.openapi.surface_description import SurfaceDescription

_TAG = "Models"


def _model() -> Json:
    fields = {
        "id": text("The alias: what to send as `model`.", shortest=1),
        "object": only("What this is.", "model", "string"),
        "created": whole("Always 0."),
        "owned_by": text("Always `weir`."),
        "root": text("The revision that the alias means now."),
    }
    return answer_object("An alias as OpenAI's model.", fields, list(fields))


def _models() -> Json:
    fields = {"object": only("What this is.", "list", "string"), "data": listed("The aliases.", ref("Model"))}
    return answer_object("The aliases that this key may use.", fields, list(fields))


def _anthropic_model() -> Json:
    fields = {
        "type": only("What this is.", "model", "string"),
        "id": text("The alias: what to send as `model`.", shortest=1),
        "display_name": text("The same."),
        "created_at": text("Always the epoch: when it was made is not told."),
        "lifecycle": only("Always active.", "active", "string"),
        "model_revision": text("The revision that the alias means now."),
    }
    return answer_object("An alias as Anthropic's model.", fields, list(fields))


def _anthropic_models() -> Json:
    fields = {
        "data": listed("The aliases of this page, by name.", ref("AnthropicModel"), most=PAGE_MAX),
        "has_more": flag("Whether more follow, in the direction that was asked for."),
        "first_id": nullable(text("The first one's id, for `before_id`.")),
        "last_id": nullable(text("The last one's id, for `after_id`.")),
    }
    return answer_object("A page of the aliases that this key may use.", fields, list(fields))


_VERSION = header(
    "anthropic-version",
    "With it, whatever its value, the answer has Anthropic's shape, errors included; absent: OpenAI's.",
    {"type": "string"},
)


def _query(name: str, description: str, schema: Json) -> Json:
    return {"name": name, "in": "query", "required": False, "description": description, "schema": schema}


def _paging() -> list[Json]:
    said = "Read only with `anthropic-version`."
    size = {"type": "integer", "minimum": 1, "maximum": PAGE_MAX, "default": PAGE}
    return [
        _query("limit", f"How many aliases a page has. {said}", size),
        _query("after_id", f"The page right after this alias. {said}", {"type": "string"}),
        _query("before_id", f"The page right before this alias; not both. {said}", {"type": "string"}),
    ]


def _list() -> Json:
    shapes = either("By the header `anthropic-version`.", ref("ModelList"), ref("AnthropicModelPage"))
    tree: Errors = (errors.UnsupportedField, errors.ConflictingFields, *WITH_KEY)
    return {
        "tags": [_TAG],
        "operationId": "listModels",
        "summary": "List the models that you may use",
        "description": "The aliases that this key may use, of which any may be sent as `model` or `model_alias`: all of them as"
        " OpenAI lists models, or with the header `anthropic-version` a page of them as Anthropic does.",
        "parameters": [_VERSION, *_paging()],
        "responses": together(
            {"200": answer("The aliases.", {"application/json": {"schema": shapes}})},
            refusals(BY_VERSION, tree),
            refusals(PROBLEM, CONNECTION),
        ),
    }


def _get() -> Json:
    shapes = either("By the header `anthropic-version`.", ref("Model"), ref("AnthropicModel"))
    name = {
        "name": "model",
        "in": "path",
        "required": True,
        "description": "The alias; its slashes may stand as they are.",
        "schema": {"type": "string", "minLength": 1},
        "example": "assistant",
    }
    return {
        "tags": [_TAG],
        "operationId": "getModel",
        "summary": "Show one model",
        "description": "One alias that this key may use.",
        "parameters": [name, _VERSION],
        "responses": together(
            {"200": answer("The alias.", {"application/json": {"schema": shapes}})},
            refusals(BY_VERSION, (errors.UnknownAlias, *WITH_KEY)),
            refusals(PROBLEM, CONNECTION),
        ),
    }


SURFACE = SurfaceDescription(
    name=_TAG,
    description="The aliases that a key may use, as OpenAI lists models, or as Anthropic does.",
    page="models.md",
    paths={"/v1/models": {"get": _list()}, "/v1/models/{model}": {"get": _get()}},
    schemas={
        "Model": _model(),
        "ModelList": _models(),
        "AnthropicModel": _anthropic_model(),
        "AnthropicModelPage": _anthropic_models(),
    },
)
