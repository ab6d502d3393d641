"""A response whose gateway died: its end is made of what its stream tells, and that is what was made."""

import msgspec
import pytest
from tests.kept_stand import COMPLETED, FAILED, RUNNING, TakingClient

from weir.api.openai.response_streams import ResponsesShape, output_in, response_in, retrieved
from weir.api.openai.responses import ResponseAnswer
from weir.api.openai.responses_request import ResponseOptions
from weir.clock import SystemClock
from weir.core.output import Delta, ShapedDelta, ToolCallPart
from weir.core.request import InferenceRequest
from weir.gateway.client import Accepted
from weir.messages import StandingView

END = b"\n\n"
PIECES: dict[str, list[Delta]] = {
    "text": [Delta("one "), Delta("two")],
    "reasoning first": [ShapedDelta("", reasoning="hm "), ShapedDelta("", reasoning="so"), Delta("yes")],
    "a call": [
        ShapedDelta("", tool_calls=(ToolCallPart(0, "call-1", "look", '{"a"'),)),
        ShapedDelta("", tool_calls=(ToolCallPart(0, arguments=":1}"),)),
    ],
}


async def events_of(pieces: list[Delta]) -> list[bytes]:
    """The events of a complete response."""
    client, clock = TakingClient(), SystemClock()
    request = InferenceRequest("assistant", "x", stream=True, retain=True)
    answer = ResponseAnswer(client, clock, "req-1", request, ResponseOptions(instructions="be brief", store=True))
    await answer.open(Accepted("gen-1", "req-1", "assistant", "rev", StandingView()))
    answer.output(pieces)
    answer.finish_reason(COMPLETED)
    await answer.end(COMPLETED, [], StandingView())
    return [event + END for event in client.taken.split(END)[:-1]]


@pytest.mark.parametrize("name", PIECES)
async def test_a_complete_response_is_rebuilt_at_any_cut(name: str) -> None:
    """Protects background answers: what was settled as complete is shown with all its output, wherever its gateway died."""
    events = await events_of(PIECES[name])
    whole = response_in(events[-1])
    last_delta = max((place for place, event in enumerate(events) if b".delta" in event), default=1)
    for cut in range(last_delta + 1, len(events)):
        closing = ResponsesShape(SystemClock()).closing(COMPLETED, events[:cut])
        made = response_in(closing)
        assert made["output"] == whole["output"], (cut, events[cut])
        assert (made["status"], made["instructions"], made["store"]) == ("completed", "be brief", True)
        assert closing.startswith(b"event: response.completed\n") and closing.count(END) == 1
        assert msgspec.json.decode(closing.partition(b"\ndata: ")[2])["sequence_number"] == cut


async def test_a_failed_response_has_no_half_output() -> None:
    """Protects callers from half an answer that looks whole: a failure says so, behind what its stream began with."""
    events = await events_of(PIECES["text"])
    shape = ResponsesShape(SystemClock())
    made = response_in(shape.closing(FAILED, events[:4]))
    assert (made["status"], made["output"], made["error"]["code"]) == ("failed", [], "coordinator_lost")
    alone = shape.closing(FAILED, ())
    assert [event.split(b"\n")[0] for event in alone.split(END)[:-1]] == [
        b"event: response.created",
        b"event: response.in_progress",
        b"event: response.failed",
    ]


async def test_a_running_response_is_shown_with_what_was_asked_for() -> None:
    """Protects polling: settings are those of the request, the state is the record's, and `id` comes first."""
    events = await events_of(PIECES["text"])
    shown = retrieved(RUNNING, events[0])
    assert next(iter(shown)) == "id" and (shown["status"], shown["instructions"]) == ("in_progress", "be brief")
    assert output_in([], "completed") == []
