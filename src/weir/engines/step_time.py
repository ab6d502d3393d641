"""How long one engine step takes on a real GPU: a fitted formula and its coefficients, as pure values.

One step processes B decode sequences and P prefill tokens; S is the sum of the decode sequences' context lengths, A the sum
over prefill chunks of length × (tokens already computed before it + length ÷ 2). Nothing here schedules or waits: the simulated
batch asks, and so may the planner. The coefficients lie beside this module in calibration.json, with their origin.
"""

import functools
from dataclasses import dataclass
from importlib import resources

import msgspec

from weir.units import Tokens


class Row(msgspec.Struct, frozen=True):
    """Coefficients, in milliseconds, of a model on `tp` GPUs of one kind.

    kv_tokens: tokens whose KV blocks fit. step_tokens_max: the engine's token budget of one step.
    """

    model: str
    gpu: str
    tp: int
    o: float
    w: float
    g: float
    c: float
    q: float
    p: float
    kv_tokens: Tokens
    step_tokens_max: Tokens


class Preset(msgspec.Struct, frozen=True):
    """The engine's own overhead around the kernels: a share, and milliseconds per step and per decode sequence."""

    pad: float
    ov0: float
    ov_b: float = msgspec.field(name="ovB")


class Calibration(msgspec.Struct, frozen=True):
    """Everything that was fitted, by name."""

    source: str
    formula: str
    presets: dict[str, Preset]
    rows: dict[str, Row]


@dataclass(frozen=True, slots=True)
class StepTime:
    """The step time of one row under one overhead preset."""

    row: Row
    preset: Preset

    def milliseconds(self, decodes: int, prefill_tokens: Tokens, context_tokens: Tokens, attention: float) -> float:
        """Duration of one step with B = decodes, P = prefill_tokens, S = context_tokens and A = attention, each ≥ 0."""
        row, preset = self.row, self.preset
        compute = (row.w**row.p + (row.g * (decodes + prefill_tokens)) ** row.p) ** (1.0 / row.p)
        kernels: float = row.o + compute + row.c * context_tokens + row.q * attention
        return kernels * (1.0 + preset.pad) + preset.ov0 + preset.ov_b * decodes


@functools.cache
def calibration() -> Calibration:
    """The coefficients that ship with the package."""
    text = resources.files("weir.engines").joinpath("calibration.json").read_bytes()
    return msgspec.json.decode(text, type=Calibration)


def step_time(row: str, preset: str = "nominal") -> StepTime:
    """The step time by name, as in "llama3.1-8b/h100_sxm/tp1" or "demo". Raises LookupError that lists the known names."""
    known = calibration()
    if row not in known.rows:
        raise LookupError(f"no calibration row {row!r}; known: {', '.join(sorted(known.rows))}")
    if preset not in known.presets:
        raise LookupError(f"no overhead preset {preset!r}; known: {', '.join(sorted(known.presets))}")
    return StepTime(known.rows[row], known.presets[preset])
