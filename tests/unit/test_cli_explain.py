"""Protects `weir explain`: the timeline as a table that names every figure, as JSON, and a refusal in one sentence."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.unit.cli_terminal import Terminal, terminal_of


@pytest.fixture
async def terminal(tmp_path: Path) -> AsyncIterator[Terminal]:
    async with terminal_of(tmp_path) as made:
        yield made


async def test_a_timeline_reads_as_a_table(terminal: Terminal) -> None:
    """Protects an operator's reading: times, holds in dollars, scopes, takes, candidates and why one was not taken."""
    shown = await terminal.run("explain", "explained")
    heading, *lines = shown.out.splitlines()
    assert (shown.status, shown.err) == (0, "") and max(map(len, lines)) < 120
    assert heading == (
        "acme / explained, execution 2: running, arrived 2023-11-14T22:13:20.000Z;"
        " 3 further delivery steps; 1 earlier events are not kept"
    )
    assert " ".join(" ".join(lines[3:]).split()) == (
        "0.0 received alias assistant, stream yes"
        " 0.5 admitted held $0.0015, held tokens 1,100, windows: day/2023-11-14; lifetime,"
        " scopes: tenant acme; alias assistant service class batch,"
        " takes: 1,100 of tokens per minute (application assistant); 1 of requests per minute (tenant),"
        " door: lanes 8, free 3, predicted wait 0 ms"
        " 12.0 dispatched attempt 1, replica r-2,"
        " candidates: r-1 (4 running, 0 free: full); r-2 (1 running, 3 free: score 1,300, 900 cached)"
        " 13.0 rejected figures: scope: tenant acme, limit 5,000,000, ttft 6.7 ms"
    )


async def test_a_timeline_as_json_and_of_one_tenant(terminal: Terminal) -> None:
    """Protects scripts: the answer of the management API as it is, for the tenant that was named."""
    explanation = await terminal.good("explain", "explained", "--tenant", "globex", "--json")
    assert (explanation["tenant"], explanation["request_id"]) == ("globex", "explained")
    assert [event["event"] for event in explanation["timelines"][0]["events"]] == [
        "received",
        "admitted",
        "dispatched",
        "rejected",
    ]


async def test_what_is_not_kept_is_one_sentence(terminal: Terminal) -> None:
    """Protects an operator from guessing: the sentence says how much is kept, and since when."""
    refused = await terminal.run("explain", "long-ago")
    assert (refused.status, refused.out) == (1, "")
    assert "7 requests are kept" in refused.err and "2023-11-14T22:13:20.000Z" in refused.err
