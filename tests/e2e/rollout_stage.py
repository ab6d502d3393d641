"""A cell whose alias is moved while clients ask: an administrator, another one who approves, and a load that never stops."""

import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tests.e2e.http_client import Admin, Json, demo_account, exchange, wait_until
from tests.e2e.running_cell import RunningCell

PRICES = {"input_microusd": 200_000, "cached_input_microusd": 50_000, "output_microusd": 600_000}
STEPS = [{"weight": 30, "samples_min": 15, "time_min_ms": 0}, {"weight": 100, "samples_min": 15, "time_min_ms": 0}]
QUICK: Json = {"steps": STEPS, "interval_ms": 200, "warm_ms": 500, "lost_ms": 20_000}
OVER_S = 90.0
_JOIN_S = 30.0


@dataclass
class Rollouts:
    """admin: the owner, who registers; approver: another administrator."""

    cell: RunningCell
    admin: Admin
    approver: Admin

    def approved(self, name: str, **fields: Any) -> str:
        """The id of a revision of the simulated engine that may serve."""
        asked = {"name": name, "engine": "simulated", "artifact": "demo", "context_tokens": 32_768, "price": PRICES, **fields}
        revision: str = self.admin.done("POST", "/revisions", asked)["id"]
        self.approver.done("POST", f"/revisions/{revision}/approve")
        return revision

    def started(self, revision: str, **plan: Any) -> str:
        """The id of a rollout of `assistant` to a revision."""
        body = {"alias": "assistant", "revision": revision, "plan": {**QUICK, **plan}}
        return str(self.admin.done("POST", "/rollouts", body)["id"])

    def shown(self, rollout: str) -> Json:
        """What the management API says of it."""
        return self.admin.done("GET", f"/rollouts/{rollout}")

    def wait(self, rollout: str, *states: str) -> Json:
        """What it is once it is in one of these states."""
        wait_until(lambda: self.shown(rollout)["state"] in states, OVER_S)
        return self.shown(rollout)


def rollouts_of(cell: RunningCell) -> Rollouts:
    """A running cell's, with a second administrator."""
    admin = Admin(cell.ready["admin"], cell.ready["admin_key"])
    secret = admin.done("POST", "/admin-keys", {"actor": "bob", "role": "approver"})["secret"]
    return Rollouts(cell, admin, Admin(cell.ready["admin"], secret))


class Told(NamedTuple):
    """One answer. asked_s: when it was asked; revision: whose it was, or the code of a refusal."""

    asked_s: float
    status: int
    revision: str


@dataclass
class Load:
    """Clients that ask one after the other. told: every answer, in the order of their ends."""

    cell: RunningCell
    clients: int = 4
    output_tokens: int = 12
    told: list[Told] = field(default_factory=list)
    _over: threading.Event = field(default_factory=threading.Event)

    def _ask(self, client: int) -> None:
        key = demo_account(self.cell).key
        body = {"model_alias": "assistant", "input": "How wide is the river?", "max_output_tokens": self.output_tokens}
        while not self._over.is_set():
            asked_s = time.monotonic()
            reply = exchange(self.cell.api, "POST", "/v1/generations", key=key, body=body)
            said = reply.json
            code = said.get("code") or (said.get("error") or {}).get("code")
            self.told.append(Told(asked_s, reply.status, str(said["model_revision"] if reply.status == 200 else code)))

    @property
    def failures(self) -> Counter[str]:
        """Answers that were none, by their codes."""
        return Counter(each.revision for each in self.told if each.status != 200)

    def revisions(self, since_s: float = 0.0) -> Counter[str]:
        """How many answers each revision gave to what was asked after a time."""
        return Counter(each.revision for each in self.told if each.asked_s > since_s)

    def wait_more(self, number: int) -> None:
        """Wait for so many further answers."""
        wanted = len(self.told) + number
        wait_until(lambda: len(self.told) >= wanted, _JOIN_S)

    @contextmanager
    def running(self) -> Iterator["Load"]:
        """The clients ask for the length of a block, and finish what they asked."""
        threads = [threading.Thread(target=self._ask, args=(client,)) for client in range(self.clients)]
        for thread in threads:
            thread.start()
        try:
            yield self
        finally:
            self._over.set()
            for thread in threads:
                thread.join(_JOIN_S)
            assert not any(thread.is_alive() for thread in threads)


def actions(shown: Json) -> Sequence[str]:
    """What was done with a rollout, oldest first."""
    return [entry["action"] for entry in reversed(shown["history"])]
