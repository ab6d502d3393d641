"""OpenAI's embeddings: a vector for each text."""

from weir.api.openai import embeddings
from weir.api.openapi.answers import ADMISSION, CONNECTION, ENDED, OPENAI, PROBLEM, answer, refusals, together
from weir.api.openapi.generation_fields import body_of, record_links, weir_headers
from weir.api.openapi.json_schema import (
    Json,
    answer_object,
    either,
    listed,
    only,
    optional,
    ref,
    request_object,
    text,
    whole,
    words,
)
from weir.api.openapi.openai_parts import label, model_field
from weir.api.openapi.surface_description import SurfaceDescription
from weir.core.demands import DIMENSIONS_MAX, TEXTS_MAX

_TAG = "OpenAI embeddings"
_EXAMPLE: Json = {"model": "vectors", "input": ["a river", "a lake"]}


def _request() -> Json:
    one = text("A text.", shortest=1)
    fields = {
        "model": model_field(),
        "input": either("What is embedded; no tokens.", one, listed("Several.", one, fewest=1, most=TEXTS_MAX)),
        "encoding_format": optional(
            words("How a vector is written: as numbers, or as little-endian float32 in base64.", embeddings.FORMATS),
            embeddings.FORMATS[0],
        ),
        "dimensions": optional(
            whole(
                "How many numbers each vector has; absent: as many as the model makes; refused on llama.cpp.", 1, DIMENSIONS_MAX
            )
        ),
        "user": label("A label for your user, without effect."),
    }
    return request_object("Texts to embed.", fields, ["model", "input"])


def _list() -> Json:
    used = {
        "prompt_tokens": whole("Tokens of all texts."),
        "total_tokens": whole("The same: there is no output."),
        "cost_microusd": whole("What you pay, in millionths of a dollar; 0 where the platform pays."),
    }
    fields = {
        "id": text("The generation's id.", shortest=1),
        "object": only("What this is.", "list", "string"),
        "model": text("The alias that was asked for."),
        "system_fingerprint": text("The revision that answers: vectors of two are not to be compared."),
        "data": listed("One for each text, in their order.", ref("Embedding"), fewest=1, most=TEXTS_MAX),
        "usage": answer_object("What was used, and what it costs.", used, list(used)),
    }
    return answer_object("The embeddings.", fields, list(fields))


def _embedding() -> Json:
    as_numbers = listed("As numbers.", {"type": "number"}, fewest=1, most=DIMENSIONS_MAX)
    fields = {
        "object": only("What this is.", "embedding", "string"),
        "index": whole("Which text.", 0, TEXTS_MAX - 1),
        "embedding": either("The vector.", as_numbers, text("Little-endian float32 in base64.", shortest=1)),
    }
    return answer_object("The vector of a text.", fields, list(fields))


def _create() -> Json:
    made = answer("The embeddings.", {"application/json": {"schema": ref("EmbeddingList")}})
    return {
        "tags": [_TAG],
        "operationId": "createEmbedding",
        "summary": "Embed texts",
        "description": "OpenAI's embeddings, of an alias whose model embeds; any other is refused by the name `model`. Never a"
        " stream. A field that is not described here is refused by name.",
        "parameters": weir_headers(),
        "requestBody": body_of("EmbeddingRequest", "What to embed.", _EXAMPLE),
        "responses": together(
            {"200": {**made, "links": record_links()}},
            refusals(OPENAI, (*ADMISSION, *ENDED)),
            refusals(PROBLEM, CONNECTION),
        ),
    }


SURFACE = SurfaceDescription(
    name=_TAG,
    description="OpenAI's embeddings: texts in, a vector for each out.",
    page="embeddings.md",
    paths={"/v1/embeddings": {"post": _create()}},
    schemas={"EmbeddingRequest": _request(), "EmbeddingList": _list(), "Embedding": _embedding()},
    parsed={"EmbeddingRequest": embeddings.FIELDS},
)
