"""OpenAI's models: the aliases that a key may use."""

from weir import errors
from weir.api.openapi.answers import CONNECTION, OPENAI, PROBLEM, WITH_KEY, answer, refusals, together
from weir.api.openapi.json_schema import Json, answer_object, listed, only, ref, text, whole
from weir.api.openapi.surface_description import SurfaceDescription

_TAG = "OpenAI models"


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


def _list() -> Json:
    found = answer("The aliases.", {"application/json": {"schema": ref("ModelList")}})
    return {
        "tags": [_TAG],
        "operationId": "listModels",
        "summary": "List the models that you may use",
        "description": "The aliases that this key may use, of which any may be sent as `model` or `model_alias`.",
        "responses": together({"200": found}, refusals(OPENAI, WITH_KEY), refusals(PROBLEM, CONNECTION)),
    }


def _get() -> Json:
    found = answer("The alias.", {"application/json": {"schema": ref("Model")}})
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
        "parameters": [name],
        "responses": together(
            {"200": found}, refusals(OPENAI, (errors.UnknownAlias, *WITH_KEY)), refusals(PROBLEM, CONNECTION)
        ),
    }


SURFACE = SurfaceDescription(
    name=_TAG,
    description="The aliases that a key may use, as OpenAI lists models.",
    page="models.md",
    paths={"/v1/models": {"get": _list()}, "/v1/models/{model}": {"get": _get()}},
    schemas={"Model": _model(), "ModelList": _models()},
)
