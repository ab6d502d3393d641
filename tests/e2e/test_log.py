"""What a cell writes to its standard error while clients misbehave: lines of its own, each a JSON object, or nothing."""

import json
import random

from tests.e2e.http_client import Account, Json, Wire, is_at_rest, wait_until

CLIENTS = 50
BEHIND = (b"", b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n", b"POST /v1/g", b"garbage\r\n\r\n")
"""What comes behind a request that is left at once."""

NATIVE: Json = {"model_alias": "assistant", "input": "river"}
CHAT: Json = {"model": "assistant", "messages": [{"role": "user", "content": "river"}]}
"""213 tokens of 30 ms each: every one of these leaves long before the end."""


def leave_somewhere(account: Account, wire: Wire, dice: random.Random) -> None:
    """A request on a random surface, streamed or not, that is left at a random place, in a random way."""
    path, body = dice.choice((("/v1/generations", NATIVE), ("/v1/chat/completions", CHAT)))
    request = wire.request("POST", path, key=account.key, body={**body, "stream": dice.random() < 0.6})
    place = dice.choice(("in the head", "in the body", "at once", "dispatched", "streaming"))
    if place == "in the head":
        wire.send(request[: dice.randrange(1, 60)])
    elif place == "in the body":
        wire.send(request[: -dice.randrange(1, 20)])
    else:
        wire.send(request + (dice.choice(BEHIND) if place == "at once" else b""))
    if place == "dispatched":
        wait_until(lambda: not is_at_rest(account.cell))
    elif place == "streaming" and b'"stream": true' in request:
        wire.interim()
    if dice.random() < 0.5:
        wire.half_close()
    wire.close()


def test_fifty_clients_that_leave_leave_nothing_but_our_own_lines(slow_account: Account) -> None:
    """Protects whoever reads the log: no server, loop or library writes beside it, whatever moment a client leaves in."""
    cell, dice = slow_account.cell, random.Random(20)
    before = cell.log.stat().st_size
    for _ in range(CLIENTS):
        leave_somewhere(slow_account, slow_account.connect(), dice)
    wait_until(lambda: is_at_rest(cell))
    with cell.log.open("rb") as log:
        log.seek(before)
        written = [json.loads(line) for line in log.read().splitlines()]
    assert [line for line in written if line["event"] in ("library_log", "request_failed", "loop_fault")] == []
