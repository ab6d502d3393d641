"""A link as the event loop sees it: bytes in, frames out, and the word when it is over."""

import asyncio
from collections.abc import Callable
from typing import Any, Protocol, cast

import structlog

from weir import errors
from weir.link.frames import FRAME_BYTES_MAX, Frame, FrameSplitter
from weir.units import Bytes

_log = structlog.get_logger("weir.link")


class LinkUser(Protocol):
    """One end of a link."""

    def on_frame(self, channel: "Channel", found: Frame) -> None:
        """One frame. May raise LinkFault, which ends the link."""
        ...

    def on_closed(self, channel: "Channel") -> None:
        """The link is over, for whatever reason; said once."""
        ...


class Channel(asyncio.Protocol):
    """One connection of a link. session: what its end knows it by; None before the greeting.

    body_bytes_max: of the greeting, from whoever it is.
    """

    def __init__(
        self,
        user: LinkUser,
        on_open: Callable[["Channel"], None] = lambda channel: None,
        body_bytes_max: Bytes = FRAME_BYTES_MAX,
    ) -> None:
        self._user = user
        self._on_open = on_open
        self._splitter = FrameSplitter(body_bytes_max)
        self._transport: asyncio.Transport | None = None
        self.session: Any = None

    def greeted(self, session: Any) -> None:
        """The other side is known: its frames may be as long as any."""
        self.session = session
        self._splitter.body_bytes_max = FRAME_BYTES_MAX

    def hand_over(self, user: LinkUser) -> None:
        """Whoever took the connection is not who it is for: what comes from now on is this one's."""
        self._user = user

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio's word that there is a connection."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's own is none by its type
        self._on_open(self)

    def data_received(self, data: bytes) -> None:
        """asyncio's word that bytes came."""
        try:
            for found in self._splitter.feed(data):
                self._user.on_frame(self, found)
                if self._transport is None:
                    return
        except errors.LinkFault as fault:
            _log.warning("link_broken", reason=fault.detail)
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """asyncio's word that the connection is over."""
        self._transport = None
        self._user.on_closed(self)

    def write(self, piece: bytes) -> None:
        """Never blocks; what a closed link is given is lost, and sent again on the next one."""
        if self._transport is not None:
            self._transport.write(piece)

    def finish(self) -> None:
        """Close it once what was written has left. Idempotent."""
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.close()

    def close(self) -> None:
        """Cut it at once: what matters is kept by both ends. Idempotent."""
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.abort()
