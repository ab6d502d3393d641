"""The ready file: where a part listens and which keys its demonstration has, for whoever started it. It holds secrets."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from weir.control.bootstrap import BootstrapSecrets
from weir.storage.state_directory import write_private_file


@dataclass(frozen=True, slots=True)
class Ready:
    """What the ready file says, as written. api: None where gateways are started by others; gateways: this cell's processes."""

    api: str | None
    admin: str
    metrics: str
    secrets: BootstrapSecrets
    aliases: list[dict[str, str]]
    gateways: list[str] = field(default_factory=list)

    def content(self) -> dict[str, Any]:
        """The JSON object of the ready file."""
        return {
            **({"api": self.api} if self.api else {}),
            "admin": self.admin,
            "metrics": self.metrics,
            **self.secrets,
            "aliases": self.aliases,
            **({"gateways": self.gateways} if self.gateways else {}),
        }


class ReadyFiles:
    """Where it is written: in the state directory, and where somebody asked for it."""

    def __init__(self, paths: Sequence[Path | None]) -> None:
        self._paths = [path for path in paths if path is not None]

    def write(self, ready: Ready) -> None:
        """Everything is ready. Raises OSError."""
        content = msgspec.json.format(msgspec.json.encode(ready.content()), indent=2) + b"\n"
        for path in self._paths:
            write_private_file(path, content)

    def remove(self) -> None:
        """Nothing is ready."""
        for path in self._paths:
            path.unlink(missing_ok=True)
