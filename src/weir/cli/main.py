"""The `weir` command. Lists every command and imports only the one that is called, so that help is quick.

It decides nothing: each command's own module does. A command's module is named in the table below with its one line of help.
"""

import importlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import typer

import weir


@dataclass(frozen=True, slots=True)
class Entry:
    """A command: where it is. attribute: a typer application for a group, a function for a single command."""

    module: str
    attribute: str
    summary: str


ENTRIES = {
    "up": Entry("weir.cli.up", "up", "Run a whole cell in this process."),
    "gateway": Entry("weir.cli.gateway", "gateway", "Run one gateway of a cell, linked to its coordinator."),
    "coordinator": Entry("weir.cli.run_coordinator", "coordinator", "Run the coordinator of a cell alone."),
    "control": Entry("weir.cli.run_control", "control", "Run the control of a cell alone: engines, catalog, management."),
    "generate": Entry("weir.cli.generate", "generate", "Ask a model and stream its answer to the terminal."),
    "batch": Entry("weir.cli.batch_acts", "commands", "Run the requests of a file in their own time."),
    "tenant": Entry("weir.cli.tenant", "commands", "Create, show, change and end tenants."),
    "app": Entry("weir.cli.application", "commands", "Create and list a tenant's applications."),
    "key": Entry("weir.cli.key", "commands", "Create, list and revoke API keys."),
    "admin-key": Entry("weir.cli.administrator", "commands", "Create, list and revoke the keys of administrators."),
    "limit": Entry("weir.cli.limit", "commands", "Set, show and remove limits."),
    "price": Entry("weir.cli.price", "commands", "Set and show the prices of revisions."),
    "model": Entry("weir.cli.revision", "commands", "Sign, register, approve and end revisions."),
    "key-ring": Entry("weir.cli.trusted_key", "commands", "Trust and revoke the keys that sign models."),
    "alias": Entry("weir.cli.alias", "commands", "Say what model names mean."),
    "pool": Entry("weir.cli.pool", "commands", "Create, change and retire pools of replicas."),
    "rollout": Entry("weir.cli.rollout_acts", "commands", "Move an alias to another revision, step by step."),
    "retention": Entry("weir.cli.retention_keys", "commands", "List, rotate and drop the keys that seal retained streams."),
    "usage": Entry("weir.cli.usage", "usage", "What was used and what it costs."),
    "explain": Entry("weir.cli.explanation", "explain", "What happened to one request, and why."),
    "ledger": Entry("weir.cli.ledger", "commands", "What is held and spent; check a whole ledger."),
    "audit": Entry("weir.cli.audit_trail", "audit", "Who changed what, and when."),
    "sim": Entry("weir.cli.sim", "commands", "What-if runs: a workload on a fleet, in virtual time."),
}


def command_line(arguments: Sequence[str]) -> typer.Typer:
    """The application for these arguments: every command by name, the one that is called with its real code."""
    called = next((word for word in arguments if not word.startswith("-")), None)
    app = typer.Typer(name="weir", add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)
    app.callback(help="Multi-tenant model serving: budgets, predictable latency, isolation, controlled upgrades.")(_root)
    for name, entry in ENTRIES.items():
        loaded: Any = getattr(importlib.import_module(entry.module), entry.attribute) if name == called else _unloaded
        if isinstance(loaded, typer.Typer):
            app.add_typer(loaded, name=name, help=entry.summary)
        else:
            app.command(name, help=entry.summary)(loaded)
    return app


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"weir {weir.__version__}")
        raise typer.Exit


def _root(version: bool = typer.Option(False, "--version", help="Show the version.", callback=_version)) -> None:
    """The root takes one option of its own, --version."""


def _unloaded() -> None:
    """Stands for a command that is listed but not called."""


def main() -> None:
    """Run the command line of this process; exits with its status."""
    run: Callable[[], Any] = command_line(sys.argv[1:])
    run()


if __name__ == "__main__":
    main()
