"""The lines of batches on their surfaces: what a worker needs of them."""

from weir import errors
from weir.api.batch_lines import line_answer
from weir.api.wire import openai_error, problem
from weir.batches.line_answer import LineClient
from weir.batches.worker import LineSurfaces
from weir.core.request import InferenceRequest
from weir.gateway.client import Answer
from weir.ports import Clock


def line_surfaces(clock: Clock) -> LineSurfaces:
    """How lines are read and answered."""

    def answer_for(endpoint: str, body: bytes, client: LineClient, request_id: str) -> tuple[InferenceRequest, Answer, str]:
        return line_answer(endpoint, body, client, clock, request_id)

    def refused_for(endpoint: str, error: errors.WeirError) -> tuple[int, bytes]:
        show = problem if endpoint == "/v1/generations" else openai_error
        rendered = show(error, clock.wall_ms())
        return rendered.status, rendered.body

    return LineSurfaces(answer_for, refused_for)
