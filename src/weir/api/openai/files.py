"""The paths of OpenAI's files: upload, list, show, read, delete. An upload is stored as it arrives and never held whole."""

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

import msgspec

from weir import errors
from weir.api.door import Call, Door, Methods
from weir.api.openai.list_query import ListQuery
from weir.api.openai.upload_form import FORM_BYTES_MAX, FileBegun, FormField, Told, UploadForm
from weir.api.wire import Rendered, id_headers, limit_headers, openai_error, refuse_field
from weir.batches.desk import BatchDesk, Upload
from weir.core.batches.batch_records import FILE_ID_PREFIX, FileRecord, Purpose
from weir.core.tenancy import Principal

_PATH = "/v1/files"
FILES_PAGE_MAX = 10_000
ORDERS = ("asc", "desc")
EXPIRY_S_MIN, EXPIRY_S_MAX = 3_600, 2_592_000
EXPIRY_FIELDS = ("anchor", "seconds")
ANCHOR = "created_at"
QUERY = ("purpose", "limit", "order", "after")
SECONDS_ACCEPTED = f"a whole number from {EXPIRY_S_MIN} to {EXPIRY_S_MAX}"
ANCHOR_FIELD, SECONDS_FIELD = "expires_after[anchor]", "expires_after[seconds]"
_MANY = 200


class FilesSurface:
    """`/v1/files` and what lies below it, in OpenAI's shapes, errors included."""

    generating: frozenset[str] = frozenset()

    def __init__(self, door: Door) -> None:
        self._door = door

    def owns(self, path: str) -> bool:
        """Its own paths."""
        return path == _PATH or path.startswith(f"{_PATH}/")

    def methods(self, call: Call) -> Methods | None:
        """All files, or one by its id."""
        path = call.exchange.path
        if path == _PATH:
            return {"GET": self._list, "POST": self._upload}
        call.argument, _, action = path.removeprefix(f"{_PATH}/").partition("/")
        routes: dict[str, Methods] = {
            "": {"GET": self._show, "DELETE": self._delete},
            "content": {"GET": self._content},
        }
        return routes.get(action)

    def refusal(self, error: errors.WeirError, now_wall_ms: int, request_id: str) -> Rendered:
        """OpenAI's error shape."""
        return openai_error(error, now_wall_ms)

    def _check_standing(self, principal: Principal) -> None:
        """What takes long ends with its credential. Raises Revoked."""
        if self._door.gateway.inbox.snapshot.is_revoked(principal.tenant, principal.application, principal.key):
            raise errors.Revoked()

    async def _upload(self, call: Call) -> None:
        call.take_key()
        principal = self._door.authenticate(call)
        desk = self._door.desk()
        form = UploadForm(call.exchange.headers.get(b"content-type", b""))
        arriving = _ArrivingFile(desk, principal)
        limit = desk.bounds.file_bytes_max + FORM_BYTES_MAX
        try:
            async with aclosing(call.exchange.body_pieces(limit)) as pieces:
                async for piece in pieces:
                    self._check_standing(principal)
                    for told in await asyncio.to_thread(form.feed, piece):
                        await arriving.take(told)
            form.finish()
            record = await arriving.finish()
        finally:
            await arriving.abort()
        await self._door.send_json(call, file_object(record))

    async def _list(self, call: Call) -> None:
        principal = self._door.authenticate(call)
        query = ListQuery(call.exchange.query, QUERY)
        purpose = query.word("purpose", tuple(Purpose))
        found, has_more = await self._door.desk().files(
            principal,
            None if purpose is None else Purpose(purpose),
            query.after(FILE_ID_PREFIX),
            query.limit(FILES_PAGE_MAX, FILES_PAGE_MAX),
            is_rising=query.word("order", ORDERS) == "asc",
        )
        if len(found) > _MANY:  # takes a while: on a thread
            await self._door.send_json(call, await asyncio.to_thread(_listed, found, has_more))
        else:
            await self._door.send_json(call, _listed(found, has_more))

    async def _show(self, call: Call) -> None:
        principal = self._door.authenticate(call)
        await self._door.send_json(call, file_object(await self._door.desk().file(principal, call.argument)))

    async def _delete(self, call: Call) -> None:
        principal = self._door.authenticate(call)
        await self._door.desk().delete_file(principal, call.argument)
        await self._door.send_json(call, {"id": call.argument, "object": "file", "deleted": True})

    async def _content(self, call: Call) -> None:
        principal = self._door.authenticate(call)
        record, content = await self._door.desk().content(principal, call.argument)
        exchange = call.exchange
        first = await anext(content, b"")
        headers = [(b"content-type", b"application/octet-stream"), (b"content-length", str(record.size).encode())]
        standing = await self._door.standing(principal)
        await exchange.start(200, [*headers, *id_headers(call.request_id), *limit_headers(standing)])
        await exchange.send_piece(first)
        async with aclosing(content):
            async for piece in content:
                self._check_standing(principal)
                await exchange.send_piece(piece)
                if exchange.is_lost:
                    return
        await exchange.finish()


class _ArrivingFile:
    """A form's fields put together, in whatever order they come."""

    def __init__(self, desk: BatchDesk, principal: Principal) -> None:
        self._desk = desk
        self._principal = principal
        self._upload: Upload | None = None
        self._fields: dict[str, str] = {}

    async def take(self, told: Told) -> None:
        """Whatever comes next. Raises InvalidRequest, and what an upload raises."""
        match told:
            case FileBegun(name):
                self._upload = await self._desk.upload(self._principal, name, Purpose.BATCH, None)
            case FormField(name, value):
                self._fields[name] = value
                if name == "purpose" and value != Purpose.BATCH:
                    refuse_field("purpose", Purpose.BATCH.value)
            case _:
                assert self._upload is not None
                await self._upload.write(told)

    async def finish(self) -> FileRecord:
        """All of the form came. Raises the same."""
        if "purpose" not in self._fields:
            refuse_field("purpose", Purpose.BATCH.value)
        if self._upload is None:
            refuse_field("file", "a file")
        self._upload.expires_after_s = self._expiry_s()
        return await self._upload.finish()

    def _expiry_s(self) -> int | None:
        anchor, seconds = self._fields.get(ANCHOR_FIELD), self._fields.get(SECONDS_FIELD)
        if anchor is None and seconds is None:
            return None
        if anchor != ANCHOR:
            refuse_field(ANCHOR_FIELD, ANCHOR)
        digits = seconds or ""
        if not (digits.isascii() and digits.isdigit() and len(digits) <= 7 and EXPIRY_S_MIN <= int(digits) <= EXPIRY_S_MAX):
            refuse_field(SECONDS_FIELD, SECONDS_ACCEPTED)
        return int(digits)

    async def abort(self) -> None:
        """Nothing is left of what is not whole."""
        if self._upload is not None:
            await self._upload.abort()


def file_object(record: FileRecord) -> dict[str, Any]:
    """A file as OpenAI's."""
    return {
        "id": record.id,
        "object": "file",
        "bytes": record.size,
        "created_at": record.created_ms // 1000,
        "expires_at": record.expires_ms // 1000,
        "filename": record.name,
        "purpose": record.purpose.value,
        "status": "processed",
    }


def page_object(objects: Sequence[dict[str, Any]], *, has_more: bool) -> dict[str, Any]:
    """A page of a list as OpenAI's."""
    first, last = (objects[0]["id"], objects[-1]["id"]) if objects else (None, None)
    return {"object": "list", "data": objects, "first_id": first, "last_id": last, "has_more": has_more}


def _listed(found: Sequence[FileRecord], has_more: bool) -> bytes:
    return msgspec.json.encode(page_object([file_object(record) for record in found], has_more=has_more))
