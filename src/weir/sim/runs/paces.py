"""How long a simulated replica's steps take: a calibration row, a plain linear step time, or a flat rate of output tokens.

    llama3.1-8b/h100_sxm/tp1[,preset=…]     a fitted row, see `weir.engines.step_time`
    linear:a=…,b=…,c=…,d=…                  a + b·B + c·S + d·P milliseconds
    flat:RATE                               each output token takes 1 ÷ RATE s of the replica, prompts take none

B are the step's decode sequences, P its prefill tokens, S the sum of the decode sequences' contexts. Each takes kv= (tokens of
KV memory) and step= (tokens of one step).
"""

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from weir.engines.simulated_batch import SimulatedBatch, Step
from weir.engines.step_time import Preset, Row, StepTime, step_time
from weir.messages import ReplicaPace
from weir.sim.runs.terms import Terms, number, refused
from weir.units import Tokens

_OPTION = "--engine"
_UNBOUNDED: Tokens = 2**31 - 1
_STEP_TOKENS: Tokens = 8_192
_WARM_UP_INPUT: tuple[Tokens, Tokens] = (8, 2_000)
_WARM_UP_OUTPUT: Tokens = 4
_BARE = Preset(0.0, 0.0, 0.0)

Pace = Callable[[Step], float]
"""A scheduled step → its milliseconds, before noise."""


@dataclass(frozen=True, slots=True)
class EngineModel:
    """What a replica of a run is. flat_per_s: output tokens per second whatever the batch, None where the step time says."""

    label: str
    step_time: StepTime
    flat_per_s: float | None = None

    @property
    def pace(self) -> Pace:
        """How long its steps take."""
        if self.flat_per_s is None:
            return lambda step: step.duration_ms
        token_ms = 1_000 / self.flat_per_s
        return lambda step: token_ms * (len(step.decodes) + len(step.prefills))


def engine_model(text: str) -> EngineModel:
    """An engine from its text. Raises InvalidRequest."""
    terms = Terms(_OPTION, text)
    if terms.name == "flat":
        rate = number(f"{_OPTION} flat:", terms.value, 0.001, 10_000_000)
        row = Row("flat", "", 1, 0, 0, 0, 0, 0, 1, _UNBOUNDED, _UNBOUNDED)  # a prompt of any length is one step's
        model = EngineModel(text, StepTime(row, _BARE), rate)
    elif terms.name == "linear":
        model = EngineModel(text, _linear(terms))
    else:
        model = EngineModel(text, _calibrated(terms))
    row = model.step_time.row
    kv_tokens = terms.whole("kv", row.kv_tokens, 16, _UNBOUNDED)
    step_tokens = terms.whole("step", row.step_tokens_max, 1, _UNBOUNDED)
    terms.close("kv", "step", *{"flat": (), "linear": ("a", "b", "c", "d")}.get(terms.name, ("preset",)))
    row = msgspec.structs.replace(row, kv_tokens=kv_tokens, step_tokens_max=step_tokens)
    return EngineModel(text, StepTime(row, model.step_time.preset), model.flat_per_s)


def _linear(terms: Terms) -> StepTime:
    """The fitted formula with w = 0 and p = 1, and what a decode costs above a prefill token as overhead per sequence."""
    a, b, c, d = (terms.number(key, 0.0, 0, 100_000) for key in "abcd")
    if a <= 0:
        raise refused(_OPTION, terms.text, "linear:a=MS with a > 0, and b=, c=, d= in milliseconds")
    return StepTime(Row("linear", "", 1, a, 0, d, c, 0, 1, _UNBOUNDED, _STEP_TOKENS), Preset(0.0, 0.0, b - d))


def _calibrated(terms: Terms) -> StepTime:
    try:
        return step_time(terms.name, terms.take("preset", "nominal"))
    except LookupError as unknown:
        raise refused(_OPTION, terms.text, f"flat:RATE, linear:a=MS,…, or a row and preset ({unknown.args[0]})") from None


def warmed_up(engine: EngineModel) -> ReplicaPace:
    """How fast an idle replica is, from a short and a long prompt, as control measures it: without noise."""
    short, long = _WARM_UP_INPUT
    long = max(short + 1, min(long, engine.step_time.row.kv_tokens // 4))
    short_ms, later_ms = _alone_ms(engine, short)
    input_ms = (_alone_ms(engine, long)[0] - short_ms) / (long - short)
    return ReplicaPace(short_ms - short * input_ms, input_ms, later_ms / (_WARM_UP_OUTPUT - 1))


def _alone_ms(engine: EngineModel, input_tokens: Tokens) -> tuple[float, float]:
    """What a request alone takes to its first output, and from there to its last."""
    batch, pace = SimulatedBatch(engine.step_time, 1), engine.pace
    batch.submit(0, input_tokens, _WARM_UP_OUTPUT)
    first_ms = later_ms = 0.0
    emitted: Tokens = 0
    while (step := batch.schedule()) is not None:  # ends with its last output
        if emitted:
            later_ms += pace(step)
        else:
            first_ms += pace(step)
        emitted += len(batch.complete(step).emitted)
    return first_ms, later_ms
