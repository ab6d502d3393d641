"""The tutorial of rollouts, with a real model: every block runs and prints what the page shows, and no request fails."""

import re
import signal
from pathlib import Path

import pytest
from tests.docs.pages import blocks_of
from tests.docs.test_snippets import STOP_S, expected_after, matches, run_session, started

PAGE = "docs/tutorial/rollouts.md"


@pytest.mark.model
def test_the_tutorial_of_rollouts_runs_as_it_stands(tmp_path: Path) -> None:
    """Protects whoever upgrades for the first time: a good revision is promoted under load, a bad one is not."""
    (up, _), *session = expected_after(blocks_of(PAGE))
    with started(tmp_path, up) as process:
        printed = run_session(tmp_path, [block for block, _ in session])
        for (block, shown), output in zip(session, printed, strict=True):
            assert shown is None or matches(shown, output), f"{block.text}\nprinted\n{output}"
        assert re.fullmatch(r"\s*\d+ 200\s*", printed[-1]), printed[-1]
        process.send_signal(signal.SIGINT)
        assert process.wait(STOP_S) == 0
