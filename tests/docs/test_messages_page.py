"""The page of Anthropic's messages says what the code does: fields, types of errors, and examples that run."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.docs.pages import blocks_of, name_in, names_in, table
from tests.docs.test_snippets import environment, expected_after, matches, run_session
from tests.e2e.running_cell import RunningCell

from weir import errors
from weir.api.anthropic.content_blocks import BLOCKS
from weir.api.anthropic.messages_request import FIELDS, parse_message
from weir.api.openapi.error_guide import INTERNAL
from weir.api.wire import anthropic_error_body

PAGE = "docs/reference/anthropic-messages.md"


def test_every_field_of_a_message_is_documented() -> None:
    """Protects clients: the body's fields, and no others; and which blocks a turn may have."""
    assert sorted(name for row in table(PAGE, "field") for name in names_in(row[0])) == sorted(FIELDS)
    for row in table(PAGE, "role"):
        kinds = BLOCKS[name_in(row[0])]
        assert set(kinds) <= set(names_in(row[1]))


def test_the_types_of_errors_are_documented() -> None:
    """Protects clients that decide by a type: the table is that of the code, for every status that is sent."""
    documented = {int(status): name_in(row[1]) for row in table(PAGE, "status") for status in row[0].split(",")}
    sent = [error for error in errors.ERROR_BY_CODE.values() if error not in INTERNAL]
    assert {error.http_status: anthropic_error_body(error(), 0, "r")["error"]["type"] for error in sent} == documented


def test_the_shown_error_is_the_codes() -> None:
    """Protects the example of an error from rotting."""
    [shown] = [json.loads(block.text) for block in blocks_of(PAGE) if block.language == "json"]
    with pytest.raises(errors.InvalidRequest) as refusal:
        parse_message({"model": "m", "max_tokens": 0, "messages": []}, {})
    assert anthropic_error_body(refusal.value, 0, shown["request_id"]) == shown


def test_the_page_runs_as_it_stands(cell: RunningCell, tmp_path: Path) -> None:
    """Protects readers who copy: curl and the official SDK, with address and key from the environment."""
    variables = {"WEIR_API_URL": cell.api, "WEIR_API_KEY": cell.key()}
    session = expected_after(blocks_of(PAGE))
    printed = run_session(tmp_path, [block for block, _ in session], **variables)
    for (block, shown), output in zip(session, printed, strict=True):
        assert shown is not None and matches(shown, output), f"{block.text}\nprinted\n{output}"
    for block in blocks_of(PAGE):
        if block.language == "python":
            command = [sys.executable, "-W", "error", "-c", block.text]
            ended = subprocess.run(command, env=environment(**variables), capture_output=True, timeout=60, text=True)
            assert ended.returncode == 0, ended.stderr
            assert "output_tokens=" in ended.stdout
