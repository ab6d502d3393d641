"""The client of the management API that the administrative commands share.

The address and key come from the options or the environment, else from the ready file of a state directory. A key from the file
is never sent to an address from elsewhere.
"""

from pathlib import Path
from typing import Annotated

import typer

from weir.cli.http_api import CommandFailed, Connection, read_ready_file

StateOption = Annotated[Path, typer.Option("--state", help="State directory of the running cell.", show_default=True)]
AdminOption = Annotated[str | None, typer.Option("--admin", envvar="WEIR_ADMIN_URL", help="URL of the admin listener.")]
AdminKeyOption = Annotated[str | None, typer.Option("--admin-key", envvar="WEIR_ADMIN_KEY", help="Admin key.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")]


def admin_connection(
    state: StateOption = Path("state"), admin: AdminOption = None, admin_key: AdminKeyOption = None
) -> Connection:
    """The management API as the options name it. Raises CommandFailed when address or key is not known."""
    if admin:
        if not admin_key:
            raise CommandFailed("An address needs its own key: give --admin-key beside --admin.")
        return Connection(admin, admin_key)
    ready = read_ready_file(state)
    url, key = ready.get("admin"), admin_key or ready.get("admin_key")
    if not url or not key:
        raise CommandFailed("The ready file names no admin key that is valid; give one with --admin-key.")
    return Connection(str(url), str(key))
