"""The step time is the fitted formula, with the coefficients that ship."""

import pytest

from weir.engines.step_time import StepTime, calibration, step_time

LLAMA = "llama3.1-8b/h100_sxm/tp1"


@pytest.mark.parametrize(
    ("row", "preset", "step", "expected_ms"),
    [
        (LLAMA, "kernel", (1, 0, 2_000, 0), 6.7512914169),
        (LLAMA, "nominal", (1, 0, 2_000, 0), 7.7008559878),
        (LLAMA, "nominal", (150, 0, 322_500, 0), 24.5619086355),
        (LLAMA, "nominal", (100, 2_000, 215_000, 2_000_000), 57.9049660688),
        ("llama3.1-70b-fp8/h200_sxm/tp1", "conserv", (16, 512, 32_000, 512 * (1_024 + 256)), 93.9158222047),
        ("demo", "nominal", (1, 0, 100, 0), 1.9771050002),
    ],
)
def test_values_computed_by_hand(row: str, preset: str, step: tuple[int, int, int, int], expected_ms: float) -> None:
    """A transcription error in formula or coefficients shows."""
    assert step_time(row, preset).milliseconds(*step) == pytest.approx(expected_ms, rel=1e-9)


def test_every_row_and_preset_gives_a_plausible_step() -> None:
    """All 21 fitted rows and the invented one are complete: more work never takes less time."""
    known = calibration()
    assert len(known.rows) == 22 and set(known.presets) == {"kernel", "nominal", "conserv"}
    for name, row in known.rows.items():
        assert name in (f"{row.model}/{row.gpu}/tp{row.tp}", "demo")
        assert row.kv_tokens > 0 and row.step_tokens_max in (2_048, 8_192)
        for preset in known.presets.values():
            times = StepTime(row, preset)
            light, heavy = times.milliseconds(1, 0, 100, 0), times.milliseconds(64, 1_024, 64_000, 524_288)
            assert 1 < light < heavy < 1_000


def test_the_demo_row_feels_instant() -> None:
    """A working stack without a GPU answers at about 2 ms a token."""
    assert 1.5 < step_time("demo").milliseconds(4, 0, 400, 0) < 2.5


def test_an_unknown_name_lists_the_known_ones() -> None:
    """A misspelt row or preset is refused with the names that exist."""
    with pytest.raises(LookupError, match=r"llama3\.1-8b/h100_sxm/tp1"):
        step_time("llama")
    with pytest.raises(LookupError, match="nominal"):
        step_time("demo", "typical")
