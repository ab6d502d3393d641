"""OpenAI's files and batches: what is uploaded, asked for, shown and given up."""

from collections.abc import Mapping

from weir import errors
from weir.api.openai import batches, files, upload_form
from weir.api.openapi.answers import CONNECTION, OPENAI, PROBLEM, WITH_KEY, Answers, Errors, answer, refusals, together
from weir.api.openapi.generation_fields import REQUEST_ID_PATTERN, body_of, header
from weir.api.openapi.json_schema import (
    Json,
    answer_object,
    flag,
    listed,
    nullable,
    only,
    optional,
    ref,
    request_object,
    text,
    whole,
    words,
)
from weir.api.openapi.openai_parts import metadata_field
from weir.api.openapi.surface_description import SurfaceDescription
from weir.core.batches.batch_records import BATCH_ID_PREFIX, ENDPOINTS, FILE_ID_PREFIX, BatchStatus, Purpose, id_pattern
from weir.core.batches.completion_window import WINDOW_PATTERN

_TAG = "OpenAI files and batches"
_SECOND = "in seconds since 1970"
_STORED: Errors = (errors.NotFound, errors.FileStoreUnavailable, *WITH_KEY)
_LISTED: Errors = (errors.UnsupportedField, *_STORED)
_CHANGED: Errors = (errors.NotAllowedNow, *_STORED)
_UPLOADED: Errors = (errors.UnsupportedField, errors.QueueFull, *_CHANGED)
_CREATED: Errors = (errors.UnknownAlias, errors.ExceedsLimitCapacity, errors.RequestIdReused, *_UPLOADED)
_KEY = "The same key of your tenant's with the same order answers with the same batch, as it is by then; absent: a new one."
_EXAMPLE: Json = {"input_file_id": "file-0…", "endpoint": "/v1/chat/completions", "completion_window": "24h"}


# ── in ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _upload_request() -> Json:
    content = text("The file's content, as a part with a `filename`: one request a line.", shortest=1)
    anchor = only("From when on it is counted; only with the seconds.", files.ANCHOR, "string")
    seconds = whole("For how long it is kept; absent: 30 days.", files.EXPIRY_S_MIN, files.EXPIRY_S_MAX)
    fields = {
        "file": {**content, "contentMediaType": "application/octet-stream"},
        "purpose": only("What it is for.", Purpose.BATCH.value, "string"),
        files.ANCHOR_FIELD: anchor,
        files.SECONDS_FIELD: seconds,
    }
    form = answer_object(
        "A file to store, as a form: a field of it is there or absent, and never null.", fields, ["file", "purpose"]
    )
    together_only = {files.ANCHOR_FIELD: [files.SECONDS_FIELD], files.SECONDS_FIELD: [files.ANCHOR_FIELD]}
    return {**form, "dependentRequired": together_only, "additionalProperties": False}


def _batch_request() -> Json:
    fields = {
        "input_file_id": text("The file whose lines are asked.", shortest=1, longest=batches.ID_CHARS_MAX),
        "endpoint": words("What they are asked of: that of every line.", ENDPOINTS),
        "completion_window": text(
            "For how long it is tried: numbers with `h`, `m`, `s`, from `1s` to 7 days.",
            shortest=1,
            longest=batches.WINDOW_CHARS_MAX,
            pattern=WINDOW_PATTERN,
        ),
        "metadata": metadata_field(),
        "output_expires_after": ref("BatchOutputExpiry"),
    }
    return request_object("A batch to run.", fields, ["input_file_id", "endpoint", "completion_window"])


def _expiry() -> Json:
    fields = {
        "anchor": only("From when on it is counted: the result file's creation.", files.ANCHOR, "string"),
        "seconds": whole("For how long it is kept.", files.EXPIRY_S_MIN, files.EXPIRY_S_MAX),
    }
    return optional(request_object("How long result files are kept; absent: 30 days.", fields, list(fields)))


# ── out ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _file() -> Json:
    fields = {
        "id": text("The file's id.", shortest=1),
        "object": only("What this is.", "file", "string"),
        "bytes": whole("Its size, in bytes."),
        "created_at": whole(f"When it was made, {_SECOND}."),
        "expires_at": whole(f"When it is deleted, {_SECOND}."),
        "filename": text("As it was uploaded."),
        "purpose": words("What it is for: an upload, or what a batch made.", Purpose),
        "status": only("Always processed: its lines were checked as they arrived.", "processed", "string"),
    }
    return answer_object("A file.", fields, list(fields))


def _deleted() -> Json:
    fields = {
        "id": text("The file's id.", shortest=1),
        "object": only("What this is.", "file", "string"),
        "deleted": only("It is not there any more.", True, "boolean"),
    }
    return answer_object("A file that was deleted.", fields, list(fields))


def _page(component: str, what: str, most: int) -> Json:
    fields = {
        "object": only("What this is.", "list", "string"),
        "data": listed(f"The {what} of this page.", ref(component), most=most),
        "first_id": nullable(text("The first one's id.")),
        "last_id": nullable(text("The last one's id, for `after`.")),
        "has_more": flag("Whether more follow."),
    }
    return answer_object(f"A page of your {what}.", fields, list(fields))


def _time(description: str) -> Json:
    return nullable(whole(f"{description}, {_SECOND}; null where it did not."))


def _batch() -> Json:
    counted = {
        "total": whole("Lines of the file."),
        "completed": whole("Those with an answer."),
        "failed": whole("Those with an error."),
    }
    file_id = nullable(text("The file of lines with an answer, once it has ended; null where there is none."))
    error_id = nullable(text("The file of lines with an error, once it has ended; null where there is none."))
    fields = {
        "id": text("The batch's id.", shortest=1),
        "object": only("What this is.", "batch", "string"),
        "endpoint": words("What its lines are asked of.", ENDPOINTS),
        "errors": {"anyOf": [ref("BatchErrorList"), {"type": "null"}], "description": "Why it failed as a whole."},
        "input_file_id": text("The file whose lines are asked."),
        "completion_window": text("As it was asked for."),
        "status": words("How far it is, or how it ended.", BatchStatus),
        "output_file_id": file_id,
        "error_file_id": error_id,
        "created_at": whole(f"When it was asked for, {_SECOND}."),
        "in_progress_at": _time("When its first line was asked"),
        "expires_at": whole(f"When what is left of it is given up, {_SECOND}."),
        "finalizing_at": _time("When its last line ended"),
        "completed_at": _time("When it completed"),
        "failed_at": _time("When it failed"),
        "expired_at": _time("When it expired"),
        "cancelling_at": _time("When it was given up"),
        "cancelled_at": _time("When it was cancelled"),
        "request_counts": answer_object("Lines, so far.", counted, list(counted)),
        "metadata": {"type": "object", "additionalProperties": {"type": "string"}, "description": "As it was sent."},
        "paused_reason": nullable(text("The code of the refusal that it waits for; null while it does not wait.")),
        "resumes_at": nullable(whole(f"When it goes on, {_SECOND}, where that is known.")),
    }
    return answer_object("A batch.", fields, list(fields))


def _batch_errors() -> Json:
    fault = {
        "code": text("The stable name of what happened."),
        "message": text("One sentence for a person."),
        "line": nullable(whole("The line, counted from 1.", 1)),
        "param": nullable(text("The field that is wrong.")),
    }
    fields = {
        "object": only("What this is.", "list", "string"),
        "data": listed("One or more.", answer_object("Why.", fault, list(fault))),
    }
    return answer_object("Why a batch failed.", fields, list(fields))


# ── paths ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _operation(operation_id: str, summary: str, description: str, answers: Answers) -> Json:
    return {
        "tags": [_TAG],
        "operationId": operation_id,
        "summary": summary,
        "description": description,
        "responses": answers,
    }


def _answers(description: str, component: str, tree: Errors, links: Json | None = None) -> Answers:
    content = {"application/json": {"schema": ref(component)}}
    made = answer(description, content)
    return _with_refusals({**made, "links": links} if links else made, tree)


def _links(parameter: str, followed: Mapping[str, str]) -> Json:
    """From an answer to what its id is a parameter of. followed: operations and what each does."""
    by_id = {parameter: "$response.body#/id"}
    return {
        operation: {"operationId": operation, "parameters": by_id, "description": description}
        for operation, description in followed.items()
    }


def _with_refusals(made: Json, tree: Errors) -> Answers:
    return together({"200": made}, refusals(OPENAI, tree), refusals(PROBLEM, CONNECTION))


def _id_in_path(name: str, prefix: str) -> Json:
    return {
        "name": name,
        "in": "path",
        "required": True,
        "description": "An id of your tenant's; every application of it sees the same ones.",
        "schema": {"type": "string", "pattern": id_pattern(prefix)},
    }


def _query(name: str, description: str, schema: Json) -> Json:
    return {"name": name, "in": "query", "required": False, "description": description, "schema": schema}


def _paging(page: int, most: int, prefix: str) -> list[Json]:
    size = {"type": "integer", "minimum": 1, "maximum": most, "default": page}
    cursor = {"type": "string", "pattern": id_pattern(prefix)}
    return [_query("limit", "How many a page has.", size), _query("after", "The page right behind this id.", cursor)]


def _upload() -> Json:
    described = (
        "A form, read as it arrives: each line is a JSON object with `custom_id`, `method`, `url` and `body`, all of one `url`."
        " A line that is none, or a field that is not described here, is refused, and nothing is stored."
    )
    form = {"multipart/form-data": {"schema": ref("FileUpload")}}
    body = {"required": True, "description": "The file and what it is for.", "content": form}
    followed = {"getFile": "Show it.", "getFileContent": "Read it.", "deleteFile": "Delete it."}
    answers = _answers("The file, stored.", "File", _UPLOADED, _links("file_id", followed))
    return {**_operation("createFile", "Upload a file", described, answers), "requestBody": body}


def _files() -> Json:
    query = [
        _query("purpose", "Only files for this.", {"type": "string", "enum": list(Purpose)}),
        _query("order", "By age.", {"type": "string", "enum": list(files.ORDERS), "default": "desc"}),
        *_paging(files.FILES_PAGE_MAX, files.FILES_PAGE_MAX, FILE_ID_PREFIX),
    ]
    described = "Uploads and results that have not expired, the youngest first. Any other query is refused by name."
    return {
        **_operation("listFiles", "List your files", described, _answers("A page.", "FileList", _LISTED)),
        "parameters": query,
    }


def _file_paths() -> dict[str, dict[str, Json]]:
    named = {"parameters": [_id_in_path("file_id", FILE_ID_PREFIX)]}
    show = _operation("getFile", "Show a file", "What it is.", _answers("The file.", "File", _STORED))
    described = "It is gone once this answers. The input of a batch that has not ended is refused."
    delete = _operation("deleteFile", "Delete a file", described, _answers("It is deleted.", "FileDeleted", _CHANGED))
    content = {"application/octet-stream": {"schema": {"type": "string", "contentMediaType": "application/octet-stream"}}}
    read = _operation(
        "getFileContent",
        "Read a file",
        "Its bytes, as they were uploaded or made.",
        _with_refusals(answer("All of them.", content), _STORED),
    )
    return {
        "/v1/files": {"get": _files(), "post": _upload()},
        "/v1/files/{file_id}": {"get": {**show, **named}, "delete": {**delete, **named}},
        "/v1/files/{file_id}/content": {"get": {**read, **named}},
    }


def _batch_paths() -> dict[str, dict[str, Json]]:
    named = {"parameters": [_id_in_path("batch_id", BATCH_ID_PREFIX)]}
    described = (
        "Its lines run one by one as this key, within its limits. A file whose worst case no limit could ever take is refused."
    )
    followed = {"getBatch": "How far it is.", "cancelBatch": "Give it up."}
    create = {
        **_operation(
            "createBatch",
            "Create a batch",
            described,
            _answers("The batch, to be run.", "Batch", _CREATED, _links("batch_id", followed)),
        ),
        "parameters": [header("Idempotency-Key", _KEY, {"type": "string", "pattern": REQUEST_ID_PATTERN})],
        "requestBody": body_of("BatchRequest", "What to run.", _EXAMPLE),
    }
    page = {
        **_operation(
            "listBatches",
            "List your batches",
            "The youngest first. Any other query is refused by name.",
            _answers("A page.", "BatchList", _LISTED),
        ),
        "parameters": _paging(batches.BATCHES_PAGE, batches.BATCHES_PAGE_MAX, BATCH_ID_PREFIX),
    }
    show = _operation("getBatch", "Show a batch", "How far it is.", _answers("The batch.", "Batch", _STORED))
    described = "No further line begins. What is done is kept; one that has ended is refused."
    cancel = _operation("cancelBatch", "Cancel a batch", described, _answers("The batch.", "Batch", _CHANGED))
    return {
        "/v1/batches": {"get": page, "post": create},
        "/v1/batches/{batch_id}": {"get": {**show, **named}},
        "/v1/batches/{batch_id}/cancel": {"post": {**cancel, **named}},
    }


SURFACE = SurfaceDescription(
    name=_TAG,
    description="OpenAI's files and batches: many requests as lines of a file, and their answers as another.",
    page="openai-batches.md",
    paths={**_file_paths(), **_batch_paths()},
    schemas={
        "FileUpload": _upload_request(),
        "File": _file(),
        "FileList": _page("File", "files", files.FILES_PAGE_MAX),
        "FileDeleted": _deleted(),
        "BatchRequest": _batch_request(),
        "BatchOutputExpiry": _expiry(),
        "Batch": _batch(),
        "BatchErrorList": _batch_errors(),
        "BatchList": _page("Batch", "batches", batches.BATCHES_PAGE_MAX),
    },
    parsed={
        "FileUpload": upload_form.FIELDS,
        "BatchRequest": batches.FIELDS,
        "BatchOutputExpiry": files.EXPIRY_FIELDS,
    },
)
