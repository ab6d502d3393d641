"""`weir key-ring`: trust, list and revoke the public keys that sign models, through the management API.

A private key that is named by mistake is never sent.
"""

from pathlib import Path
from typing import Annotated, Any

import typer

from weir.cli.admin_client import JsonOption, admin_connection
from weir.cli.http_api import CommandFailed, Connection, connected, segment
from weir.cli.tables import print_json, print_table
from weir.core.registry.key_ring import KeyRole

_KEY_BYTES_MAX = 16 * 1024
_FINGERPRINT_CHARACTERS = 16

commands = typer.Typer(no_args_is_help=True)
Name = Annotated[str, typer.Argument(help="What the key is called.")]


@commands.command()
@connected(admin_connection)
def add(
    connection: Connection,
    name: Name,
    file: Annotated[Path, typer.Argument(help="Its public part, a PEM file.")],
    role: Annotated[list[KeyRole], typer.Option(help="What it may vouch for (repeatable).")],
    not_before: Annotated[str | None, typer.Option(help="From when it is valid; a date or RFC 3339. Else from now.")] = None,
    not_after: Annotated[str | None, typer.Option(help="Until when; else without end.")] = None,
    tenant: Annotated[str | None, typer.Option(help="It vouches for this tenant's artifacts only.")] = None,
) -> None:
    """Trust a key to sign models, or a tenant's adapters, within its time."""
    body = {
        "name": name,
        "public_key": _public_key(file),
        "roles": [each.value for each in role],
        "not_before": not_before,
        "not_after": not_after,
        "tenant": tenant,
    }
    print_json(connection.call("POST", "/admin/v1/signing-keys", body))


def _public_key(path: Path) -> str:
    try:
        with path.open("rb") as file:
            text = file.read(_KEY_BYTES_MAX + 1).decode(errors="replace")
    except OSError as fault:
        raise CommandFailed(f"The key cannot be read: {fault.strerror}.") from None
    if "PRIVATE KEY" in text:
        raise CommandFailed("This is a private key: it stays with whoever signs. Give its public key.")
    return text


@commands.command("list")
@connected(admin_connection)
def list_keys(connection: Connection, as_json: JsonOption = False) -> None:
    """List the key ring."""
    keys = connection.call("GET", "/admin/v1/signing-keys")["signing_keys"]
    if as_json:
        print_json(keys)
        return
    columns = ("key", "roles", "tenant", "not before", "not after", "revoked", "fingerprint")
    print_table(columns, [_row(key) for key in keys])


def _row(key: dict[str, Any]) -> tuple[str, ...]:
    times = key["not_before"], key["not_after"] or "no end"
    revoked, fingerprint = "yes" if key["revoked"] else "", key["fingerprint"][:_FINGERPRINT_CHARACTERS]
    return key["name"], ", ".join(key["roles"]), key["tenant"] or "", *times, revoked, fingerprint


@commands.command()
@connected(admin_connection)
def revoke(connection: Connection, name: Name) -> None:
    """Trust a key no more, for good: nothing that it signed is registered or loaded any more; what runs goes on."""
    print_json(connection.call("DELETE", f"/admin/v1/signing-keys/{segment(name)}"))
