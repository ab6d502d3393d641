"""The reference pages name exactly what the code has: settings, errors, endings, commands, limits, states."""

import re
from collections.abc import Iterator
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import typer
from tests.docs.pages import ROOT, column, name_in, names_in, page_of, pages, prose_of, records, table, text_of
from tools import check_links, write_errors

from weir import errors
from weir.api.admin_tables import USAGE_FORMATS, USAGE_SUMS
from weir.api.openapi import error_guide
from weir.api.openapi.document import SURFACES
from weir.api.openapi.surface_description import SurfaceDescription
from weir.api.wire import members_of
from weir.cli.main import ENTRIES, command_line
from weir.config import FurtherPoolConfig, WeirConfig, load_config
from weir.core.endings import Availability, EndingRule, FinishReason, ending
from weir.core.issuers import ALGORITHMS, Issuer, SignInRule, TokenFlaw
from weir.core.ledger.book import Book
from weir.core.metering import Worst
from weir.core.registry.arguments import ACCEPTED
from weir.core.registry.model import DEFAULT_WORKLOAD_CLASSES, EngineKind
from weir.core.registry.rollout_plan import RolloutPlan
from weir.core.tenancy import LIMIT_NAMES, Limits, Role, Scope, ServiceClass, scopes_of
from weir.ports import USAGE_GROUPS
from weir.units import Moment

API, ADMIN, ERRORS = "docs/reference/api.md", "docs/reference/admin-api.md", "docs/reference/errors.md"
CONFIGURATION, CLI = "docs/reference/configuration.md", "docs/reference/cli.md"
INTERNAL = {error.code for error in error_guide.INTERNAL}

ADMIN_OPTIONS = {"--state", "--admin", "--admin-key"}
NO_CLIENTS = (
    "weir up",
    "weir gateway",
    "weir coordinator",
    "weir control",
    "weir generate",
    "weir batch submit",
    "weir batch status",
    "weir batch list",
    "weir batch watch",
    "weir batch cancel",
    "weir batch results",
    "weir ledger verify",
    "weir model keygen",
    "weir model sign",
    "weir retention keys",
    "weir retention rotate-key",
    "weir retention drop-key",
    "weir sim run",
)
"""Commands that do not ask the management API."""


# ── configuration ────────────────────────────────────────────────────────────────────────────────────────────────────


ISSUER = Issuer("https://login", ("weir",), (SignInRule({"sub": "robot"}, "acme", "assistant"),))
NAMED: dict[str, Any] = {"pools": FurtherPoolConfig(), "issuers": ISSUER}
"""Sections of which there are several; NAME stands for theirs."""

UNSET = {"pool.input_tokens_max": "none", "pools.NAME.concurrency": "as pool"}
"""What the page calls the absence of a value, where that is not what it says of other keys."""


def settings() -> dict[str, Any]:
    """Every key with its default, MISSING for one that has none."""
    config = WeirConfig()
    sections = {name: NAMED.get(name, getattr(config, name)) for name in (section.name for section in fields(config))}
    return {
        f"{name}{'.NAME' if name in NAMED else ''}.{key.name}": MISSING
        if key.default is MISSING and key.default_factory is MISSING
        else getattr(section, key.name)
        for name, section in sections.items()
        for key in fields(section)
    }


def test_every_setting_is_documented_with_its_default() -> None:
    """Protects operators: the page has each key once, and its default is the one in force."""
    documented = {name_in(row[0]): row[1] for row in table(CONFIGURATION, "key")}
    assert column(CONFIGURATION, "key") == list(settings())
    assert column(CONFIGURATION, "key of a rule") == [key.name for key in fields(SignInRule)]
    for key, default in settings().items():
        if default is MISSING:
            assert documented[key] == "needed"
            continue
        shown = UNSET.get(key, "kind" if key.startswith("pool.") else "none")
        assert documented[key] == (shown if default is None else msgspec.json.encode(default).decode())


def needed_beside(name: str) -> dict[str, str]:
    """What an issuer needs beside one key, with ages that leave that key its whole range."""
    usual = {
        "url": '"https://login"',
        "audiences": '["weir"]',
        "rules": '[{ claims = { sub = "robot" }, tenant = "acme", application = "assistant" }]',
        "keys_valid_ms": "86400000",
        "keys_refresh_ms": "86400000" if name == "keys_cool_down_ms" else "1",
        "keys_cool_down_ms": "1",
    }
    return {other: value for other, value in usual.items() if other != name}


def accepts(path: Path, key: str, value: str) -> bool:
    """Whether a configuration with this one key is accepted."""
    section, _, name = key.rpartition(".")
    beside = needed_beside(name) if section == "issuers.NAME" else {}
    if section == "retention" and name != "key_file":
        beside = {"key_file": '"keys"'}
    lines = [f"{other} = {usual}" for other, usual in beside.items()]
    path.write_text("\n".join([f"[{section}]", *lines, f"{name} = {value}", ""]), encoding="utf-8")
    try:
        load_config(path)
    except errors.InvalidRequest:
        return False
    return True


OF_ISSUERS = {
    "an https URL": (['"https://a/b"', '"http://127.0.0.1:8000"'], ['"http://a"', '"a"']),
    "a URL of keys": (['"https://a/b?c"'], ['"http://127.0.0.1/keys"', '"a"']),
    "texts": (['["a", "b"]'], ['"a"', '["a", "a"]']),
    "algorithms": ([f"{list(ALGORITHMS)}"], ['"RS256"', '["none"]', '["HS256"]', '["RS256", "RS256"]']),
    "tables": (['[{ claims = { a = "b", c = 1, d = true }, tenant = "t", application = "a" }]'], ["[{}]", "{}"]),
}
"""What ranges of issuers that are no numbers accept, and what they do not."""


@pytest.mark.parametrize("row", table(CONFIGURATION, "key"), ids=column(CONFIGURATION, "key"))
def test_the_documented_range_is_accepted_and_nothing_beyond(tmp_path: Path, row: list[str]) -> None:
    """Protects operators from a page that promises another range than the start accepts."""
    key, path = name_in(row[0]), tmp_path / "weir.toml"
    if row[3] in ("interactive, batch", "URLs"):
        assert accepts(path, key, '["batch", "interactive"]')
        assert not any(accepts(path, key, wrong) for wrong in ("[]", "[1]", '"batch"', '["batch", "batch"]'))
        return
    if row[3] in ("true or false", "a path", "a PostgreSQL URL", "a bucket's URL", "a tenant's name", "HOST:PORT"):
        assert accepts(path, key, "true" if row[3] == "true or false" else '"file"')
        assert not accepts(path, key, "1")
        return
    if row[3] in OF_ISSUERS:
        right, wrong = OF_ISSUERS[row[3]]
        assert all(accepts(path, key, value) for value in right)
        assert not any(accepts(path, key, value) for value in (*wrong, "1", '""', "[]", "[1]"))
        return
    low, high = map(int, row[3].split(" to "))
    assert accepts(path, key, str(low))
    assert accepts(path, key, str(high))
    assert not accepts(path, key, str(low - 1))
    assert not accepts(path, key, str(high + 1))


# ── errors and endings ───────────────────────────────────────────────────────────────────────────────────────────────


def test_every_error_code_is_documented_with_its_status_and_advice() -> None:
    """Protects clients: the table of errors is the error tree, with no class of it forgotten."""
    rows = {name_in(row["code"]): row for row in records(ERRORS, "code")}
    assert rows.keys() == errors.ERROR_BY_CODE.keys() - INTERNAL
    assert set(column(ERRORS, "never sent")) == INTERNAL
    families = {name_in(row["family"]): set(names_in(row["codes"])) for row in records(ERRORS, "family")}
    assert families.keys() == {family.__name__ for family in errors.WeirError.__subclasses__()}
    assert set().union(*families.values()) == errors.ERROR_BY_CODE.keys()
    for code, row in rows.items():
        error = errors.ERROR_BY_CODE[code]
        assert row["status"] == str(error.http_status)
        assert (row["x-should-retry"] == "false") == (error.should_retry is False)
        assert row["Retry-After"].startswith("exact") == error.waits_exactly
        if error.should_retry is False:
            assert row["retry"] == "no" and (row["Retry-After"] == "–" or error is errors.BudgetExhausted)


def test_the_page_of_errors_is_current() -> None:
    """Protects the page: it is what `make docs` writes."""
    assert text_of(ERRORS) == write_errors.page()


def test_every_reason_of_a_refused_token_is_documented() -> None:
    """Protects whoever looks for why a token is refused: the table has the reasons that there are."""
    assert column(API, "reason") == [flaw.value for flaw in TokenFlaw]


@pytest.mark.parametrize("limit", LIMIT_NAMES)
def test_the_members_of_a_refused_limit_are_documented(limit: str) -> None:
    """Protects clients that read a refusal: the table has exactly its members, and the page says what each of them means."""
    book, now, worst = Book(), Moment(0, 1_767_268_800_000), Worst(1, 1, 2)
    book.configure({Scope("acme"): replace(Limits(), **{limit: 3})}, {}, 0)
    scopes, taken = scopes_of("acme", "app", "key", "assistant", ServiceClass.INTERACTIVE), 0
    while (refused := book.check(scopes, worst, now)) is None:
        book.take(taken, scopes, worst, now)
        taken += 1
    said = set(members_of(refused, now.wall_ms))
    row = next(row for row in records(ERRORS, "code") if name_in(row["code"]) == refused.code)
    documented = set(row["members"].split(", "))
    assert documented - said == ({"window", "resets_at"} if limit.endswith("lifetime") else set()) and said <= documented
    assert said <= set(column(API, "member"))
    assert (row["Retry-After"] == "–") <= (refused.retry_after_ms is None)


def retry_advice(rule: EndingRule) -> str:
    """The column `an SDK should retry`."""
    if rule.error is None:
        return "–"
    return "if nothing was generated" if rule.retry_if_nothing_generated else "no"


def ending_row(reason: FinishReason) -> list[str]:
    """A row of the table of endings as the code has it."""
    rule = ending(reason)
    availability = "not counted" if rule.availability is Availability.NOT_COUNTED else rule.availability.value
    code = f"`{rule.error.code}`" if rule.error else "–"
    statuses = [str(rule.http_status), str(rule.compatible_http_status)]
    return [rule.status.value, f"`{reason.value}`", *statuses, code, retry_advice(rule), rule.payer.value, availability]


def test_the_table_of_endings_is_the_codes_table() -> None:
    """Protects the public contract: each ending's status, HTTP, retry, payer and availability, row by row."""
    assert table(API, "status") == [ending_row(reason) for reason in FinishReason]


# ── fields and policy ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("surface", SURFACES, ids=lambda surface: surface.page)
def test_every_field_of_a_request_is_documented(surface: SurfaceDescription) -> None:
    """Protects clients: a surface's page has the body fields of the surface, and no others."""
    bodies = re.findall(r"'#/components/schemas/(\w+)'", str(list(request_bodies(surface))))
    fields = {name for component in bodies for name in surface.schemas[component]["properties"]}
    documented = [name for row in table(page_of(surface), "field") for name in names_in(row[0])] if bodies else []
    assert sorted(documented) == sorted(fields)


def request_bodies(surface: SurfaceDescription) -> Iterator[Any]:
    """The bodies that the operations of a surface take."""
    for operations in surface.paths.values():
        yield from (operation["requestBody"] for operation in operations.values() if "requestBody" in operation)


def test_the_entry_page_lists_every_surface() -> None:
    """Protects newcomers: from the first page of the reference each surface's own is one step away, by the name of its tag."""
    listed = dict(re.findall(r"^\| \[(.*?)\]\((.*?)\) \|", text_of(API), re.MULTILINE))
    assert listed == {surface.name: surface.page for surface in SURFACES if page_of(surface) != API}


def test_workload_classes_are_documented() -> None:
    """Protects deadlines and targets: the page shows the rows in force."""
    shown = [
        [
            f"`{row.name}`",
            row.service_class.value,
            "any" if row.input_tokens_max is None else f"up to {row.input_tokens_max}",
            *(
                f"{amount} ms"
                for amount in (
                    row.default_deadline_ms,
                    row.ttft_target_ms,
                    row.tpot_target_ms,
                    row.backlog_ms,
                    row.of_many_backlog_ms,
                )
            ),
        ]
        for row in DEFAULT_WORKLOAD_CLASSES
    ]
    assert table(API, "class") == shown


def test_limits_roles_and_report_columns_are_documented() -> None:
    """Protects administrators: each limit, each role, each grouping column and each format is named."""
    assert column(ADMIN, "limit") == list(LIMIT_NAMES)
    assert set(LIMIT_NAMES) == {name for row in table("docs/howto/set-limits.md", "limit") for name in names_in(row[0])}
    files = {form.media_type for form in USAGE_FORMATS.values() if form.is_file}
    assert {*USAGE_FORMATS, *files, *USAGE_SUMS} <= set(names_in(prose_of(ADMIN)))
    assert column(ADMIN, "role") == [role.value for role in Role]
    assert set(USAGE_GROUPS) <= set(names_in(prose_of(ADMIN)))


def test_arguments_of_engines_are_documented_with_what_they_accept() -> None:
    """Protects whoever registers a model: each engine, and each argument with its range."""
    shown = [[name_in(row[0]), name_in(row[1]), row[2].replace(" to ", " … ")] for row in table(ADMIN, "argument")]
    assert shown == [[name, engine.value, str(rule)] for engine, known in ACCEPTED.items() for name, rule in known.items()]
    assert {engine.value for engine in EngineKind} <= set(names_in(prose_of(ADMIN)))


def test_a_plans_fields_are_documented_with_their_defaults() -> None:
    """Protects whoever plans a rollout: the default of each field is the one that is followed."""
    plan, rows = RolloutPlan(), {name_in(row[0]): row for row in table(ADMIN, "of a plan")}
    assert list(rows) == [field.name for field in fields(plan)]
    numbers = {name: row[1] for name, row in rows.items() if name not in ("steps", "tolerances")}
    assert numbers == {name: str(getattr(plan, name)) for name in numbers}
    assert rows["steps"][1] == f"{', '.join(str(step.weight) for step in plan.steps)} %"
    for field in fields(plan.tolerances):
        assert f"`{field.name}` {getattr(plan.tolerances, field.name)}" in rows["tolerances"][2]


# ── the command line ─────────────────────────────────────────────────────────────────────────────────────────────────


def commands() -> Iterator[tuple[str, Any]]:
    """Every command that does something, by its full name."""
    for name in ENTRIES:
        command: Any = typer.main.get_command(command_line([name]))
        command = command.commands[name]
        below = getattr(command, "commands", {})
        yield from ((f"weir {name} {word}", each) for word, each in below.items())
        if not below:
            yield f"weir {name}", command


def options_of(command: Any) -> set[str]:
    """Long options of a command."""
    words = {
        word
        for option in command.params
        if not getattr(option, "hidden", False)
        for word in (*option.opts, *option.secondary_opts)
    }
    return {word for word in words if word.startswith("--")}


def test_every_command_is_documented_with_its_options() -> None:
    """Protects the command line's page: each command has its row, its arguments and its own options."""
    rows = {re.split(r" (?=[A-Z])", name_in(row[0]))[0]: row for row in table(CLI, "command")}
    found = dict(commands())
    assert rows.keys() == found.keys()
    for name, command in found.items():
        shared = set() if name in NO_CLIENTS else ADMIN_OPTIONS
        assert set(names_in(rows[name][1])) == options_of(command) - shared
        assert shared <= options_of(command)
        arguments = [option for option in command.params if not option.opts[0].startswith("--")]
        assert len(re.findall(r" [A-Z]", name_in(rows[name][0]))) == len(arguments)


def test_every_option_has_its_meaning() -> None:
    """Protects the table of options from missing or unknown ones."""
    documented = {name for row in table(CLI, "option") for name in names_in(row[0])}
    assert documented == set().union(*(options_of(command) for _, command in commands()))


# ── the pages themselves ─────────────────────────────────────────────────────────────────────────────────────────────


def test_every_link_leads_somewhere() -> None:
    """Protects readers: links and anchors of all pages, and no marker of unfinished work."""
    assert list(check_links.findings_in(ROOT)) == []


SOURCE_PATH = re.compile(r"^(?:src|tests|tools|benchmarks|docs)/[\w./-]+?(?:::([\w.]+))?$|^([\w/]+\.py)(?:::([\w.]+))?$")


@pytest.mark.parametrize("page", pages())
def test_files_and_names_in_the_text_exist(page: str) -> None:
    """Protects readers from a file, a test or a function that was renamed: `path` or `path::name`, also below src/weir."""
    for name in names_in(prose_of(page)):
        if not SOURCE_PATH.match(name):
            continue
        path, _, defined = name.partition("::")
        file = next((at for at in (ROOT / path, ROOT / "src/weir" / path) if at.exists()), None)
        assert file is not None, f"{page} names {path}"
        last = defined.rpartition(".")[2]
        assert not last or re.search(rf"\b(def|class) {last}\b|^{last}\b", file.read_text(encoding="utf-8"), re.MULTILINE), name
