"""What is llama.cpp's own about embeddings: how a text that is too long is told, and when a call that was cut has ended.

Each text is a task, which gets any slot; a slot does not say whose task it runs. Of a call whose connection was cut, the server
drops the tasks that wait and ends those that run, a text at a time: it is read in one batch, which nothing interrupts.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable
from itertools import chain, repeat
from typing import Any

from weir import errors
from weir.engines.openai_stream import refusal_of
from weir.units import Millis

_ARRIVAL_MS = 250  # a request may reach its slots a moment after its connection was closed
_POLL_MS = 1_100  # an answer of /slots puts off the server's next look at its connections, by a second
_LOST_MAX = 3
_TOO_LONG = re.compile(rb"input \((\d{1,12}) tokens\) is too large to process[^(]*\(current batch size: (\d{1,12})\)")

Slots = Callable[[], Awaitable[list[dict[str, Any]] | None]]
"""The slots as /slots shows them, None when it does not answer sensibly. Raises ReplicaLost."""


def refused_texts(status: int, body: bytes) -> errors.EngineFault:
    """An answer that is no embeddings: of a text that does not fit the server says 500, as of its own failures."""
    found = _TOO_LONG.search(body)
    if found is None:
        return refusal_of(status, body)
    tokens, window = int(found[1]), int(found[2])
    detail = f"A text is {tokens} tokens; the engine's context window is {window} tokens."
    return errors.EngineRejected(detail, members={"n_prompt_tokens": tokens, "n_ctx": window})


async def wait_texts_done(slots: Slots, texts: int, bound_ms: Millis) -> None:
    """Until no task runs that may be one of so many texts of a call that was cut. Raises ReplicaLost after the bound.

    Tasks have rising numbers and those of a call follow each other: none of its is above the newest that ran at the cut, and so
    many more.
    """
    now = asyncio.get_running_loop().time
    waits_ms, give_up_at = chain((_ARRIVAL_MS,), repeat(_POLL_MS)), now() + bound_ms / 1_000
    newest: int | None = None
    lost = 0
    while lost < _LOST_MAX and now() < give_up_at:
        await asyncio.sleep(next(waits_ms) / 1_000)
        try:
            seen = await slots()
        except errors.ReplicaLost:
            lost += 1
            continue
        if seen is None:
            continue
        running = [number for slot in seen if slot.get("is_processing") is not False and (number := _task_of(slot)) is not None]
        newest = max(running, default=0) + texts if newest is None else newest
        if all(number > newest for number in running):
            return
    raise errors.ReplicaLost("The engine did not confirm that it stopped.")


def _task_of(slot: dict[str, Any]) -> int | None:
    number = slot.get("id_task")
    return number if type(number) is int else None
