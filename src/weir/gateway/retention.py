"""Retained streams of one gateway: who may keep one, beginning, finding, replaying and deleting them, and their bounds.

Policy is the snapshot's, streams are the store's: nothing here is the only copy of anything, so that every gateway that shares
the store does the same. A tenant's bytes are counted where they are written, and looked up in the store whenever a sixteenth of
them was written here: what gateways write at the same time is above the bound by no more than that for each.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import msgspec
import structlog

from weir import errors
from weir.config import GatewayConfig
from weir.core.request import DEADLINE_MS_MAX
from weir.core.tenancy import Retention
from weir.gateway.client import Client
from weir.gateway.inbox import Inbox
from weir.gateway.kept_client import Begun, KeepParts, KeptClient
from weir.gateway.kept_reader import Follower, FollowParts, KeptReader, Reading, RecordOf, StreamMeta, StreamShape, Wakes
from weir.gateway.sealing import KeyRing, open_head, seal_head
from weir.kept_streams import StoredStream, StreamName, StreamStore
from weir.ports import Clock, Entropy
from weir.telemetry import Telemetry
from weir.units import Bytes, Millis

_log = structlog.get_logger("weir.gateway")
_TOUCH_MS_MAX: Millis = 5_000
_LOOKS_PER_BYTES = 16


class RetentionDesk:
    """One gateway's. ring: the keys as they are now. inbox: whose snapshot says who keeps streams."""

    def __init__(
        self,
        store: StreamStore,
        ring: Callable[[], Awaitable[KeyRing]],
        clock: Clock,
        entropy: Entropy,
        inbox: Inbox,
        sweep_ms: Millis,
    ) -> None:
        self._store = store
        self._ring = ring
        self._clock = clock
        self._entropy = entropy
        self.inbox = inbox
        self._sweep_ms = sweep_ms
        self._wakes = Wakes()
        self._listed: dict[str, Bytes] = {}  # of tenants that keep streams, as last looked up
        self._written: dict[str, Bytes] = {}  # here, since
        self._fitting: dict[str, asyncio.Task[bool]] = {}
        self._without_policy: set[str] = set()  # at the last sweep
        self._parts: KeepParts | None = None

    def connect(self, config: GatewayConfig, telemetry: Telemetry, spawn: Callable[[Coroutine[Any, Any, None]], None]) -> None:
        """Once, before anything is kept."""
        follow = FollowParts(
            store=self._store,
            wakes=self._wakes,
            clock=self._clock,
            entropy=self._entropy,
            buffer=config.stream_buffer_bytes,
            slow_client_grace_ms=config.slow_client_grace_ms,
            keep_alive_ms=config.keep_alive_ms,
        )
        self._telemetry = telemetry
        self._parts = KeepParts(follow, self, spawn, lambda reason: telemetry.streams_cut.labels(reason).inc())

    def close(self) -> None:
        """Whoever reads a stream is to go on elsewhere."""
        self._wakes.close()

    async def aclose(self) -> None:
        """Let go of the store."""
        await self._store.aclose()

    def policy(self, tenant: str) -> Retention | None:
        """What a tenant asked for, None where it keeps nothing or is no more."""
        owner = self.inbox.snapshot.tenants.get(tenant)
        return owner.keeps if owner is not None else None

    # ── keeping ──────────────────────────────────────────────────────────────────────────────────────────────────────

    async def begin(self, client: KeptClient, name: StreamName, meta: StreamMeta, whole_max: Bytes) -> None:
        """Keep what is written for this client, if it is admitted; until then nothing is deleted for it.

        whole_max: of the events of an answer that is shown whole.

        Raises UnsupportedField, QueueFull where no room could be made, or StreamStoreUnavailable.
        """
        policy = self.policy(name.tenant)
        assert self._parts is not None
        if policy is None:
            raise errors.UnsupportedField("This tenant keeps no streams.", members={"field": "retain", "accepted": "false"})
        if not (self._is_roomy(name.tenant, policy) or await self._could_fit(name.tenant, policy)):
            detail = f"Streams that still run take all {policy.bytes} bytes that this tenant keeps."
            raise errors.QueueFull(detail, retry_after_ms=1_000)
        ring = await self._ring()
        head, seal = seal_head(ring, name, msgspec.msgpack.encode(meta), self._entropy)
        writer = await self._store.create(name, head, client.on_stored)
        self.take(name.tenant, len(head))
        grace_ms = None if client.is_background else 1_000 * policy.resume_grace_seconds
        client.begin(self._parts, Begun(name, meta, seal, writer, grace_ms, whole_max, policy.bytes))

    async def admitted(self, tenant: str) -> None:
        """A stream that was begun goes on: what is oldest makes room for it."""
        self._telemetry.streams_begun.inc()
        policy = self.policy(tenant)
        if policy is not None and not self._is_roomy(tenant, policy):
            await self.make_room(tenant)

    def take(self, tenant: str, size: Bytes) -> bool:
        """Count what is stored now; False where that is too much, or where it is time to look."""
        policy, listed = self.policy(tenant), self._listed.get(tenant)
        if policy is None or listed is None:
            return False
        self._written[tenant] = written = self._written.get(tenant, 0) + size
        return written <= _room(policy) and listed + written <= policy.bytes

    def _is_roomy(self, tenant: str, policy: Retention) -> bool:
        """Whether it is known without a look that one more stream has room."""
        return self.take(tenant, 0) and self._listed[tenant] + self._written[tenant] + _room(policy) <= policy.bytes

    async def _could_fit(self, tenant: str, policy: Retention) -> bool:
        """Whether there is room for one more beside those that run: the others may be deleted for it."""
        streams = await self._store.streams(tenant)
        return sum(stream.size for stream in streams if not self._may_go(stream)) + _room(policy) <= policy.bytes

    def _may_go(self, stream: StoredStream) -> bool:
        """Whether it does not run: it has ended, or is older than any request."""
        return stream.is_ended or self._clock.wall_ms() - stream.changed_ms > DEADLINE_MS_MAX

    async def make_room(self, tenant: str) -> bool:
        """Delete the tenant's streams that are over, and the oldest that do not run until the rest and one more fit.

        Whether the rest does. False also without a policy. True where the store cannot be asked: it fails the next write by
        itself.
        """
        if (fitting := self._fitting.get(tenant)) is None:
            fitting = self._fitting[tenant] = asyncio.get_running_loop().create_task(self._fit_if_kept(tenant))
            fitting.add_done_callback(lambda _: self._fitting.pop(tenant))
        return await asyncio.shield(fitting)

    async def _fit_if_kept(self, tenant: str) -> bool:
        policy = self.policy(tenant)
        try:
            return policy is not None and await self._fit(tenant, policy)
        except errors.StreamStoreUnavailable:
            return True

    async def _fit(self, tenant: str, policy: Retention) -> bool:
        streams = await self._store.streams(tenant)
        total = sum(stream.size for stream in streams)
        for stream in streams:
            is_too_much = total + _room(policy) > policy.bytes
            if self._is_over(stream, policy) or (is_too_much and self._may_go(stream)):
                await self._store.delete(stream.name)
                total -= stream.size
        self._listed[tenant], self._written[tenant] = total, 0
        return total <= policy.bytes

    # ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────────

    async def find(self, tenant: str, generation_id: str, *, has_ended: bool) -> KeptReader | None:
        """A stream that is kept; None where it was not, is no more, or its key was dropped. Raises StreamStoreUnavailable."""
        name = StreamName(tenant, generation_id)
        policy = self.policy(tenant)
        stored = await self._store.find(name) if policy is not None else None
        head = await self._store.head(name) if stored is not None else None
        if policy is None or stored is None or head is None or self._is_over(stored, policy, has_ended=has_ended):
            return None
        opened = open_head(await self._ring(), name, head)
        if opened is None:
            return None
        meta, seal = opened
        return KeptReader(self._store, self._entropy, name, seal, msgspec.msgpack.decode(meta, type=StreamMeta))

    async def has(self, tenant: str, generation_id: str) -> bool:
        """Whether anything of a stream is stored. Raises StreamStoreUnavailable."""
        return await self._store.find(StreamName(tenant, generation_id)) is not None

    def check_room(self, tenant: str) -> None:
        """Raises QueueFull where one more reader would be one too many."""
        self._wakes.check_room(tenant)

    async def follow(
        self,
        reader: KeptReader,
        client: Client,
        shape: StreamShape,
        record_of: RecordOf,
        after: int = -1,
        is_allowed: Callable[[], bool] = lambda: True,
    ) -> bool:
        """Show the events behind `after`; as `Follower.run` says. A client that is lost or too slow is dropped."""
        assert self._parts is not None
        tenant = reader.name.tenant
        policy = self.policy(tenant)
        grace_ms = 1_000 * policy.resume_grace_seconds if policy is not None else _TOUCH_MS_MAX
        touch_ms = min(_TOUCH_MS_MAX, grace_ms // 3)
        reading = Reading(after, touch_ms, lambda: is_allowed() and self.policy(tenant) is not None)
        return await Follower(self._parts.follow, reader, client, shape, reading).run(record_of)

    async def delete(self, tenant: str, generation_id: str) -> None:
        """Nothing of it is kept on return. Raises StreamStoreUnavailable."""
        await self._store.delete(StreamName(tenant, generation_id))

    # ── time ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    async def sweep_forever(self) -> None:
        """Delete what is over, every while."""
        while True:
            await asyncio.sleep(self._sweep_ms / 1e3)
            try:
                await self.sweep()
            except errors.StreamStoreUnavailable as fault:
                _log.warning("retained_streams_not_swept", detail=fault.detail)

    async def sweep(self) -> None:
        """Delete streams whose time is over, above their tenant's bytes, and of tenants that keep none any more."""
        snapshot = self.inbox.snapshot
        if not snapshot.version or self.inbox.fresh_ms == 0 or self.inbox.is_lost:
            return  # who keeps what is not known
        stored = await self._store.tenants()
        for tenant in stored:
            if (policy := self.policy(tenant)) is not None:
                await self._fit(tenant, policy)
        # Twice in a row: a snapshot may be older than a policy for a moment. Tenants of another cell are not ours to judge.
        without = {tenant for tenant in stored if tenant in snapshot.tenants and self.policy(tenant) is None}
        for tenant in without & self._without_policy:
            await self._forget(tenant)
        self._without_policy = without

    async def _forget(self, tenant: str) -> None:
        for stream in await self._store.streams(tenant):
            await self._store.delete(stream.name)
        self._listed.pop(tenant, None)
        self._written.pop(tenant, None)

    def _is_over(self, stream: StoredStream, policy: Retention, *, has_ended: bool = False) -> bool:
        """A stream without an end may still run, as long as any request may. has_ended: its record says that it does not."""
        kept_ms = 1_000 * policy.seconds + (0 if stream.is_ended or has_ended else DEADLINE_MS_MAX)
        return self._clock.wall_ms() - stream.changed_ms > kept_ms


def _room(policy: Retention) -> Bytes:
    """What is kept free for the next stream."""
    return policy.bytes // _LOOKS_PER_BYTES
