"""The official Node SDKs against a live cell, where Node is present: what they read is what the Python SDKs read."""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.http_client import Account, new_account

SCRIPTS = Path(__file__).parent / "node"
MODULES = Path(__file__).parents[2] / ".venv" / "node-sdks" / "node_modules"
needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="Node is not present")


def _found(script: str, *arguments: str) -> Any:
    """What a script printed."""
    assert MODULES.is_dir(), "run: make node-sdks"
    ended = subprocess.run(
        ["node", str(SCRIPTS / script), *arguments],
        env={**os.environ, "NODE_PATH": str(MODULES)},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-2_000:]
    return json.loads(ended.stdout)


@pytest.fixture
def limited_key(account: Account) -> str:
    """The key of a tenant that may ask for nothing."""
    other = new_account(account.cell)
    other.limit(spend_microusd_lifetime=0)
    return other.key


@needs_node
def test_openai(account: Account, limited_key: str) -> None:
    """Protects OpenAI's Node users: answers, streams, errors with their codes, and a stream that is left is cancelled."""
    check_openai(account, limited_key)


def check_openai(account: Account, limited_key: str) -> None:
    """What OpenAI's SDK read is what the platform tells."""
    found = _found("openai_checks.cjs", f"{account.cell.api}/v1", account.key, limited_key)
    assert "assistant" in found["models"]
    chat, streamed = found["chat"], found["chatStream"]
    assert streamed == {"text": chat["text"], "reasons": ["length"], "usage": chat["usage"]}
    assert chat["reason"] == "length" and chat["usage"]["completion_tokens"] == 12
    assert found["completion"]["reason"] == "length" and found["completion"]["text"]
    response, events = found["response"], found["responseStream"]
    assert response["status"] == "incomplete" and response["text"] == events["text"] != ""
    assert events["kinds"][0] == "response.created" and events["kinds"][-1] == "response.incomplete"
    assert events["numbers"] == list(range(len(events["numbers"])))
    assert found["wrongKey"] == _refusal("AuthenticationError", 401, code="unauthenticated", param=None)
    assert found["badField"] == _refusal("BadRequestError", 400, code="invalid_request", param="temperature")
    assert found["limited"] == _refusal("RateLimitError", 429, code="budget_exhausted", param=None)
    left = account.ended("node-left")
    assert (left["status"], left["finish_reason"]) in (("cancelled", "disconnect"), ("completed", "stop"))


@needs_node
def test_anthropic(account: Account, limited_key: str) -> None:
    """Protects Anthropic's Node users: answers, streams, counts, and errors with their types and codes."""
    check_anthropic(account, limited_key)


def check_anthropic(account: Account, limited_key: str) -> None:
    """What Anthropic's SDK read is what the platform tells."""
    found = _found("anthropic_checks.cjs", account.cell.api, account.key, limited_key)
    message, streamed = found["message"], found["stream"]
    assert message["model"] == "assistant" and message["reason"] == streamed["reason"] == "max_tokens"
    assert message["text"] == streamed["text"] == streamed["whole"] != ""
    assert message["usage"]["output_tokens"] == streamed["usage"]["output_tokens"] == 12
    assert streamed["kinds"][0] == "message_start" and streamed["kinds"][-1] == "message_stop"
    assert found["count"]["input_tokens"] == message["usage"]["input_tokens"]
    assert found["wrongKey"] == _refusal("AuthenticationError", 401, code="unauthenticated", type="authentication_error")
    assert found["badField"] == _refusal("BadRequestError", 400, code="invalid_request", type="invalid_request_error")
    assert found["limited"] == _refusal("RateLimitError", 429, code="budget_exhausted", type="rate_limit_error")


def _refusal(kind: str, status: int, **more: str | None) -> dict[str, Any]:
    return {"kind": kind, "status": status, "id": True, **more}
