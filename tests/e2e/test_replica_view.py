"""What the management API shows of replicas: their room and their pace, as they were found before the first request."""

from tests.e2e.conftest import SLOW_ROW
from tests.e2e.http_client import Account
from tests.e2e.running_cell import RunningCell

from weir.engines.step_time import step_time


def test_a_replica_shows_its_room_and_its_pace(slow_account: Account) -> None:
    """Protects operators and predictions: the figures are those of the engine behind the URL, within a factor of two."""
    [replica] = slow_account.admin.done("GET", "/replicas")["replicas"]
    step = step_time(SLOW_ROW)
    pace, token_ms = replica["pace"], step.milliseconds(1, 0, 100, 0)
    assert replica["kv_tokens"] == step.row.kv_tokens // 16 * 16
    assert set(pace) == {"first_ms", "input_ms", "output_ms"}
    assert token_ms / 2 < pace["output_ms"] < 2 * token_ms
    prompt_ms = step.milliseconds(0, 2_000, 0, 2_000**2 / 2)
    assert prompt_ms / 2 < pace["first_ms"] + 2_000 * pace["input_ms"] < 2 * prompt_ms


def test_a_warm_up_is_nobodys_use(fast_cell: RunningCell, account: Account) -> None:
    """Protects tenants and budgets: what the platform generates to measure a replica is in no usage row."""
    [replica] = account.admin.done("GET", "/replicas")["replicas"]
    assert replica["pace"]["output_ms"] > 0.001 and replica["kv_tokens"] >= 32_768
    assert account.admin.done("GET", f"/usage?tenant={account.tenant}")["rows"] == []
