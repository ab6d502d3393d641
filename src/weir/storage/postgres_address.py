"""The address of a PostgreSQL database, read once: everything that connects uses these parts, and nothing reads the text again.

It decides what an address is, strictly: two readers that disagree about where a password ends would show a part of it, or send
it elsewhere. It must never quote what it refuses.
"""

import re
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl, unquote, urlencode

from weir import errors

_FORM = re.compile(
    r"postgres(?:ql)?://(?:(?P<user>[^:/?#@]*)(?::(?P<password>[^/?#@]*))?@)?"
    r"(?:\[(?P<ipv6>[0-9A-Fa-f:.]+)\]|(?P<host>[^:/?#@\[\],]*))(?::(?P<port>[0-9]{1,5}))?"
    r"/(?P<database>[^/?#@]+)(?:\?(?P<settings>[^?#@]*))?"
)
_PORT_MAX = 65_535
_DEFAULT_PORT = 5_432
_PARTS = ("user", "password", "host", "port")


@dataclass(frozen=True, slots=True)
class Address:
    """Where a database is, and who we are there. None: as the driver's environment says. settings: the driver's, as a query."""

    database: str
    host: str | None
    port: int | None
    user: str | None = field(repr=False)
    password: str | None = field(repr=False)
    settings: str = field(repr=False)

    @property
    def shown(self) -> str:
        """Host, port and database, never more."""
        host = "local" if self.host is None or self.host.startswith("/") else self.host
        return f"{f'[{host}]' if ':' in host else host}:{self.port or _DEFAULT_PORT}/{self.database}"

    def arguments(self) -> dict[str, Any]:
        """What the driver is given. Settings go as an address of nothing else: some of them it takes in no other way."""
        parts = {"host": self.host, "port": self.port, "user": self.user, "password": self.password, "database": self.database}
        return {"dsn": f"postgresql:///?{self.settings}" if self.settings else None} | parts


def parse_address(address: str) -> Address:
    """A PostgreSQL URL, checked. Raises InvalidRequest, which does not quote it: it may hold a password."""
    found = _FORM.fullmatch(address)
    try:
        parsed = _parsed(found.groupdict()) if found else None
    except ValueError:  # no UTF-8, no number, or a query without a value
        parsed = None
    if parsed is None:
        raise errors.InvalidRequest(
            "The database address must be postgresql://USER:PASSWORD@HOST:PORT/DATABASE; "
            "in each part, characters such as / ? # @ : % are written as %2F %3F %23 %40 %3A %25.",
            members={"field": "store.url", "accepted": "a PostgreSQL URL"},
        )
    return parsed


def _parsed(found: dict[str, str | None]) -> Address | None:
    """The address of matched parts, None where one cannot be meant. Raises ValueError."""
    settings = dict(parse_qsl(found["settings"] or "", strict_parsing=bool(found["settings"]), errors="strict"))
    named = {name: settings.pop(name) for name in _PARTS if name in settings}
    written = {name: unquote(text, errors="strict") for name, text in found.items() if text and name != "settings"}
    written["host"] = written.pop("ipv6", "") or written.get("host", "")
    parts = {name: written.get(name) or named.get(name) for name in _PARTS}
    host, port = parts["host"], int(parts["port"]) if parts["port"] else None
    if any(not text.isprintable() for text in (*written.values(), *named.values(), *settings.values())):
        return None
    is_name = host is None or host.startswith("/") or "/" not in host
    if not is_name or "@" in (host or "") or (port is not None and not 1 <= port <= _PORT_MAX):
        return None
    return Address(written["database"], host, port, parts["user"], parts["password"], urlencode(settings))
