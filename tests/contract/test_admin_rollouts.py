"""Protects the management API's routes of rollouts over a real socket: what is asked, what is shown, what is refused."""

from collections.abc import AsyncIterator
from dataclasses import fields
from typing import Any

import pytest
from tests.contract.admin_stand import NOON_MS, PLAN, Stand, standing

from weir import errors
from weir.api.admin_rollout_bodies import PlanBody, StepBody, TolerancesBody
from weir.api.admin_rollout_views import PlanView, StepView, TolerancesView
from weir.control.rollout_commands import ACTOR
from weir.control.rollout_loop import Look
from weir.core.registry.comparison import compare
from weir.core.registry.evidence import Evidence, Pairs, Tally
from weir.core.registry.golden_set import Score
from weir.core.registry.rollout import RaiseWeight, RollbackReason, Verify
from weir.core.registry.rollout_decision import Awaited, Breach, GiveUp, Hold, Proceed, Verdict, Wait
from weir.core.registry.rollout_plan import RANGES, RolloutPlan, Step, Tolerances
from weir.core.tenancy import Role

NEW = {"alias": "assistant", "revision": "next@1"}
EVIDENCE = Evidence(Tally(90, 1, 2), Tally(10, 3, 0), Pairs(9, 4), Pairs(8, 3), Pairs(7, 2), Pairs(6, 1))


@pytest.fixture
async def stand() -> AsyncIterator[Stand]:
    async with standing() as made:
        yield made


def look_with(verdict: Verdict, evidence: Evidence | None = EVIDENCE) -> Look:
    comparisons = () if evidence is None else compare(PLAN, 0, evidence, None)
    return Look(NOON_MS + 5_000, verdict, evidence, 2, 1, comparisons)


# ── proposals ────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_rollout_is_proposed_by_the_default_plan(stand: Stand) -> None:
    """Protects whoever proposes: the whole plan is shown, nobody is routed yet, and the act is audited."""
    made = await stand.good("POST", "/admin/v1/rollouts", NEW, 201, role=Role.RELEASER)
    plan = RolloutPlan()
    assert made["plan"] == {
        **{field.name: getattr(plan, field.name) for field in fields(plan)},
        "steps": [{field.name: getattr(step, field.name) for field in fields(step)} for step in plan.steps],
        "tolerances": {field.name: getattr(plan.tolerances, field.name) for field in fields(plan.tolerances)},
    }
    noon = "2023-11-15T12:00:00.000Z"
    assert {name: value for name, value in made.items() if name != "plan"} == {
        "id": made["id"],
        "alias": "assistant",
        "tenant": None,
        "stable": "small-1",
        "canary": "next@1",
        "state": "proposed",
        "since": noon,
        "is_over": False,
        "step": None,
        "weight": 0,
        "score": None,
        "proposed_by": "releaser",
        "proposed_at": noon,
        "pools": [],
        "former_pools": ["small"],
    }
    assert stand.published[-1].aliases["assistant"].canary is None
    [entry] = (await stand.good("GET", "/admin/v1/audit?limit=1"))["entries"]
    assert (entry["actor"], entry["action"], entry["subject"]) == ("releaser", "rollout.propose", made["id"])
    status, problem = await stand.bad("POST", "/admin/v1/rollouts", NEW)
    assert (status, problem["code"], problem["rollout"]) == (409, "not_allowed_now", made["id"])


async def test_every_part_of_a_plan_is_taken_and_shown(stand: Stand) -> None:
    """Protects plans: what is given is what is followed, what is absent or null is the default."""
    steps = [{"weight": 5, "samples_min": 7, "time_min_ms": 9}, {"weight": 100, "samples_min": 1, "time_min_ms": 0}]
    numbers = {name: RANGES[name][0] for name in PlanBody.model_fields if name in RANGES}
    tolerances: dict[str, Any] = {name: RANGES[name][1] for name in TolerancesBody.model_fields}
    plan = {"steps": steps, "tolerances": tolerances, **numbers}
    made = await stand.good("POST", "/admin/v1/rollouts", NEW | {"plan": plan}, 201)
    assert made["plan"] == plan
    [stored] = [each for each in (await stand.store.load()).rollouts if each.id == made["id"]]
    assert stored.plan.steps == (Step(5, 7, 9), Step(100, 1, 0)) and stored.plan.tolerances == Tolerances(**tolerances)
    await stand.good("POST", f"/admin/v1/rollouts/{made['id']}/roll-back")
    other = NEW | {"alias": "over", "plan": {"warm_ms": 5, "lost_ms": None, "tolerances": {"errors_points": 9}}}
    made = await stand.good("POST", "/admin/v1/rollouts", other, 201)
    assert (made["plan"]["warm_ms"], made["plan"]["lost_ms"]) == (5, RolloutPlan().lost_ms)
    assert made["plan"]["tolerances"]["errors_points"] == 9
    assert made["plan"]["tolerances"]["output_percent"] == Tolerances().output_percent


def test_a_plans_form_has_each_of_its_fields() -> None:
    """Protects plans from a field that can be followed and neither be given nor seen."""
    for form, view, known in (
        (PlanBody, PlanView, RolloutPlan),
        (StepBody, StepView, Step),
        (TolerancesBody, TolerancesView, Tolerances),
    ):
        names = [field.name for field in fields(known)]
        assert list(form.model_fields) == names == list(view.model_fields)


async def test_the_document_says_what_a_plans_numbers_may_be(stand: Stand) -> None:
    """Protects clients of the document: each number has its range."""
    schemas = (await stand.good("GET", "/admin/openapi.json"))["components"]["schemas"]
    described = [schemas[name]["properties"] for name in ("PlanBody", "StepBody", "TolerancesBody")]
    ranges = {
        name: (each["minimum"], each["maximum"]) for part in described for name, each in part.items() if "minimum" in each
    }
    assert ranges == RANGES


# ── looking ──────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_rollouts_are_listed_newest_first_and_narrowed(stand: Stand) -> None:
    """Protects whoever looks for a rollout."""
    for query, names in {
        "": ["over", "canary", "paused", "proposed"],
        "?open=true": ["canary", "paused", "proposed"],
        "?open=false": ["over"],
        "?alias=paused": ["paused"],
        "?alias=paused&open=false": [],
        "?alias=nothing&open=": [],
    }.items():
        rollouts = (await stand.good("GET", f"/admin/v1/rollouts{query}", role=Role.VIEWER))["rollouts"]
        assert [rollout["id"] for rollout in rollouts] == names, query


async def test_each_state_is_shown_with_what_is_true_in_it(stand: Stand) -> None:
    """Protects whoever looks: where a paused one goes on, the share, and why one went back."""
    by_id = {each["id"]: each for each in (await stand.good("GET", "/admin/v1/rollouts"))["rollouts"]}
    noon, later = "2023-11-15T12:00:00.000Z", "2023-11-15T12:00:01.000Z"
    paused, over = by_id["paused"], by_id["over"]
    assert (paused["state"], paused["was"], paused["since"]) == ("paused", "canary", later)
    assert (paused["step"], paused["step_since"], paused["weight"]) == (0, noon, 10)
    assert (by_id["canary"]["since"], by_id["canary"]["step_since"], "was" in by_id["canary"]) == (noon, noon, False)
    assert (over["state"], over["is_over"], over["weight"], over["step"]) == ("rolled_back", True, 0, None)
    assert (over["reason"], over["detail"]) == ("errors", "errors: 9 of 10 requests.")


async def test_a_rollout_is_shown_with_its_latest_look(stand: Stand) -> None:
    """Protects people's judgement: what it waits for, both revisions' tallies, pairs, and each comparison with its bounds."""
    assert (await stand.good("GET", "/admin/v1/rollouts/canary"))["look"] is None
    stand.looks.by_id["canary"] = look_with(Hold((Wait(Awaited.SAMPLES, 10, 50), Wait(Awaited.TIME, 5_000, 60_000))))
    look = (await stand.good("GET", "/admin/v1/rollouts/canary", role=Role.VIEWER))["look"]
    assert look["verdict"] == {
        "kind": "hold",
        "waits": [{"what": "samples", "have": 10, "need": 50}, {"what": "time", "have": 5_000, "need": 60_000}],
    }
    assert (look["at"], look["ready_replicas"], look["running"]) == ("2023-11-15T12:00:05.000Z", 2, 1)
    assert look["evidence"]["stable"] == {"requests": 90, "errors": 1, "cancellations": 2}
    assert look["evidence"]["canary"] == {"requests": 10, "errors": 3, "cancellations": 0}
    assert look["evidence"]["first_token"] == {"pairs": 9, "worse": 4}
    assert [each["measure"] for each in look["comparisons"]] == [
        "errors",
        "cancellations",
        "first_token",
        "per_token",
        "longer_output",
        "shorter_output",
    ]
    errors_seen, first_token = look["comparisons"][0], look["comparisons"][2]
    [core, _, pairs, *_] = compare(PLAN, 0, EVIDENCE, None)
    assert errors_seen == {
        "measure": "errors",
        "samples": 10,
        "hits": 3,
        "at_least": core.at_least,
        "at_most": core.at_most,
        "stable_samples": 90,
        "stable_hits": 1,
        "is_paired": False,
        "is_breach": core.is_breach,
    }
    assert (first_token["is_paired"], first_token["at_most"], first_token["at_least"]) == (True, 0.5, pairs.at_least)


async def test_each_verdict_says_why(stand: Stand) -> None:
    """Protects whoever reads a verdict: each kind has its own fields and no others."""
    [worse, *_] = compare(PLAN, 0, EVIDENCE, None)
    shown: list[tuple[Verdict, dict[str, Any]]] = [
        (Hold(fault="no memory"), {"kind": "hold", "waits": [], "fault": "no memory"}),
        (Proceed(50), {"kind": "proceed", "weight": 50}),
        (GiveUp(RollbackReason.NO_CAPACITY, "Why."), {"kind": "give_up", "reason": "no_capacity", "detail": "Why."}),
    ]
    for verdict, expected in shown:
        stand.looks.by_id["canary"] = look_with(verdict, None)
        look = (await stand.good("GET", "/admin/v1/rollouts/canary"))["look"]
        assert (look["verdict"], look["evidence"], look["comparisons"]) == (expected, None, [])
    stand.looks.by_id["canary"] = look_with(Breach(worse))
    verdict = (await stand.good("GET", "/admin/v1/rollouts/canary"))["look"]["verdict"]
    assert verdict["kind"] == "breach" and verdict["comparison"]["measure"] == "errors"
    assert verdict["comparison"]["is_breach"] is worse.is_breach


async def test_a_rollouts_history_is_its_own_acts(stand: Stand) -> None:
    """Protects whoever asks what happened: who did what and when, people and the platform, newest first."""
    made = await stand.good("POST", "/admin/v1/rollouts", NEW, 201, role=Role.RELEASER)
    other = await stand.good("POST", "/admin/v1/rollouts", NEW | {"alias": "over"}, 201)
    await stand.rollouts.act(ACTOR, made["id"], lambda stored: Verify(NOON_MS, Score(9, 10, ("case-1",))))
    await stand.rollouts.act(ACTOR, made["id"], lambda stored: RaiseWeight(NOON_MS))
    await stand.good("POST", f"/admin/v1/rollouts/{other['id']}/pause")
    shown = await stand.good("GET", f"/admin/v1/rollouts/{made['id']}")
    assert [(entry["actor"], entry["action"]) for entry in shown["history"]] == [
        (ACTOR, "rollout.raise_weight"),
        (ACTOR, "rollout.verify"),
        ("releaser", "rollout.propose"),
    ]
    assert shown["history"][0]["summary"] == {"state": "canary", "weight": 1}
    assert shown["score"] == {"passed": 9, "total": 10, "failed_ids": ["case-1"]}


# ── acts ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_people_pause_resume_promote_and_roll_back(stand: Stand) -> None:
    """Protects people's say, and what the alias means after each act."""
    path = "/admin/v1/rollouts/canary"
    paused = await stand.good("POST", f"{path}/pause", role=Role.RELEASER)
    assert (paused["state"], paused["was"], paused["weight"]) == ("paused", "canary", 10)
    assert (await stand.good("POST", f"{path}/resume"))["state"] == "canary"
    promoted = await stand.good("POST", f"{path}/promote")
    assert (promoted["state"], promoted["weight"]) == ("promoting", 100)
    assert stand.published[-1].aliases["canary"].revision == "next@1"
    back = await stand.good("POST", f"{path}/roll-back", {"detail": "Answers in French."}, role=Role.RELEASER)
    assert (back["state"], back["reason"], back["detail"]) == ("rolling_back", "operator", "Answers in French.")
    assert stand.published[-1].aliases["canary"].revision == "small-1"
    [entry] = (await stand.good("GET", "/admin/v1/audit?limit=1"))["entries"]
    assert (entry["actor"], entry["action"], entry["summary"]["detail"]) == (
        "releaser",
        "rollout.roll_back",
        "Answers in French.",
    )
    for rollout, body in (("proposed", None), ("paused", {"detail": None})):
        said = await stand.good("POST", f"/admin/v1/rollouts/{rollout}/roll-back", body)
        assert said["detail"] == "An administrator rolled it back."


NO_SHARES: tuple[Any, ...] = (0, 1, True, "0.1", [], {}, 10**400)
BAD_PLANS: tuple[tuple[Any, str], ...] = (
    ([], "plan"),
    ({"colour": 1}, "colour"),
    ({"steps": []}, "steps"),
    ({"steps": [{"weight": 100, "samples_min": 1, "time_min_ms": 0}]}, "steps"),
    ({"steps": {}}, "plan.steps"),
    ({"steps": [1]}, "plan.steps.0"),
    ({"steps": [{"weight": 5, "samples_min": 1}]}, "plan.steps.0.time_min_ms"),
    ({"steps": [{"weight": 5, "samples_min": 1, "time_min_ms": 0, "x": 1}]}, "x"),
    ({"steps": [{"weight": "5", "samples_min": 1, "time_min_ms": 0}] * 2}, "steps[0].weight"),
    ({"steps": [{"weight": 5, "samples_min": None, "time_min_ms": 0}] * 2}, "steps[0].samples_min"),
    ({"steps": [{"weight": 5, "samples_min": 1, "time_min_ms": 0}] * 2}, "steps[1].weight"),
    ({"tolerances": 5}, "plan.tolerances"),
    ({"tolerances": {"x": 1}}, "x"),
    ({"tolerances": {"errors_points": 1.5}}, "tolerances.errors_points"),
    *(({"false_alarm_rate": wrong}, "false_alarm_rate") for wrong in NO_SHARES),
    *(({"interval_ms": wrong}, "interval_ms") for wrong in (0, -1, 1.5, True, "5s", 2**64, 10**400)),
)


async def test_a_plan_that_cannot_be_followed_is_refused_by_field(stand: Stand) -> None:
    """Protects whoever writes a plan: the field, what it accepts, and no rollout."""
    version = await stand.version()
    for plan, field in BAD_PLANS:
        status, problem = await stand.bad("POST", "/admin/v1/rollouts", NEW | {"plan": plan})
        assert (status, problem["code"], problem["field"]) == (400, "invalid_request", field), plan
        assert problem["accepted"]
    for written in (b"NaN", b"Infinity", b"1e999"):
        content = b'{"alias": "assistant", "revision": "next@1", "plan": {"false_alarm_rate": ' + written + b"}}"
        sent = {"content-type": "application/json"}
        _, problem = await stand.bad("POST", "/admin/v1/rollouts", content=content, headers=sent)
        assert problem["field"] == "false_alarm_rate"
    assert await stand.version() == version


BAD_INPUT: tuple[tuple[str, str, Any, str, str | None], ...] = (
    ("POST", "rollouts", None, "invalid_request", "body"),
    ("POST", "rollouts", {"alias": "assistant"}, "invalid_request", "revision"),
    ("POST", "rollouts", NEW | {"alias": "nothing"}, "not_found", None),
    ("POST", "rollouts", NEW | {"revision": "nothing@1"}, "not_found", None),
    ("POST", "rollouts", NEW | {"revision": "fresh@1"}, "not_allowed_now", None),
    ("POST", "rollouts", NEW | {"revision": "small-1"}, "invalid_request", "revision"),
    ("POST", "rollouts", NEW | {"tenant": "acme"}, "not_found", None),
    ("POST", "rollouts", NEW | {"alias": "canary"}, "not_allowed_now", None),
    ("POST", "rollouts", NEW | {"weight": 5}, "invalid_request", "weight"),
    ("GET", "rollouts?open=maybe", None, "invalid_request", "open"),
    ("GET", "rollouts?state=live", None, "invalid_request", "state"),
    ("GET", "rollouts/nothing", None, "not_found", None),
    *(("POST", f"rollouts/nothing/{act}", None, "not_found", None) for act in ("pause", "resume", "promote", "roll-back")),
    *(("POST", f"rollouts/over/{act}", None, "not_allowed_now", None) for act in ("pause", "resume", "promote", "roll-back")),
    ("POST", "rollouts/proposed/promote", None, "not_allowed_now", None),
    ("POST", "rollouts/proposed/resume", None, "not_allowed_now", None),
    ("POST", "rollouts/paused/pause", None, "not_allowed_now", None),
    ("POST", "rollouts/canary/finish", None, "not_found", None),
    ("DELETE", "rollouts/canary", None, "method_not_allowed", None),
    ("POST", "rollouts/canary/roll-back", {"why": "x"}, "invalid_request", "why"),
    *(
        ("POST", "rollouts/canary/roll-back", {"detail": wrong}, "invalid_request", "detail")
        for wrong in ("", " ", "a\nb", "\x1b[2J", "\0", "x" * 501, 5, ["x"])
    ),
)


async def test_bad_input_is_a_problem_that_names_the_field(stand: Stand) -> None:
    """Protects every route from bad input: code, status, field, what is accepted, and nothing changed."""
    version = await stand.version()
    for method, path, body, code, field in BAD_INPUT:
        status, problem = await stand.bad(method, f"/admin/v1/{path}", body)
        assert (problem["code"], problem.get("field")) == (code, field), (method, path, body, problem)
        assert status == errors.ERROR_BY_CODE[code].http_status
    assert await stand.version() == version


async def test_what_a_part_has_not_acknowledged_is_said(stand: Stand) -> None:
    """Protects administrators: each change is stored, and names the parts that are behind."""
    stand.pending = ("gateway-2",)
    for path, body in (("", NEW), ("/canary/pause", None), ("/canary/roll-back", None)):
        assert (await stand.good("POST", f"/admin/v1/rollouts{path}", body, 202))["pending"] == ["gateway-2"]
