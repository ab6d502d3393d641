"""Orders under an idempotency key: the same key with the same order is the same batch, whichever gateways it reaches.

A note says which batch a key of a tenant stands for. It is written once, before anything of the batch, so that of several tries
all go on with one id, whatever the first of them had done when it died; and it is deleted before the batch is.
"""

import hashlib
from dataclasses import dataclass, field

import msgspec

from weir import errors
from weir.batches import file_keys
from weir.core.batches.batch_records import KeptOrder
from weir.kept_files import FileStore


@dataclass(frozen=True, slots=True)
class BatchOrder:
    """A batch as it is asked for. window: as written. output_expires_s: of its result files, None for the default."""

    input_file_id: str
    endpoint: str
    window: str
    metadata: dict[str, str] = field(default_factory=dict)
    output_expires_s: int | None = None


def order_name(key: str) -> str:
    """What a key is called in the store, where not every character of it may be in a name."""
    return hashlib.sha256(key.encode()).hexdigest()


class KeptOrders:
    """Of one store. Each call raises FileStoreUnavailable, and RequestIdReused where the key stands for another order."""

    def __init__(self, store: FileStore) -> None:
        self._store = store

    async def find(self, tenant: str, key: str, order: BatchOrder) -> str | None:
        """The id of the batch that was ordered so before, which may not be there yet; None for a new key."""
        content = await self._store.read(file_keys.batch_order(tenant, order_name(key)))
        if content is None:
            return None
        try:
            kept = msgspec.json.decode(content, type=KeptOrder)
        except msgspec.DecodeError:
            raise errors.FileStoreUnavailable("What is recorded of this idempotency key is damaged.") from None
        if kept.digest != _digest_of(order):
            raise errors.RequestIdReused("This idempotency key was used with another order.")
        return kept.batch

    async def keep(self, tenant: str, key: str, order: BatchOrder, batch_id: str) -> str:
        """Let the key stand for this batch; the id of the one that it stands for, which is whichever was kept first."""
        note = msgspec.json.encode(KeptOrder(batch_id, _digest_of(order)))
        while not await self._store.create(file_keys.batch_order(tenant, order_name(key)), note):
            first = await self.find(tenant, key, order)
            if first is not None:  # else it was deleted just now
                return first
        return batch_id


def _digest_of(order: BatchOrder) -> str:
    return hashlib.sha256(msgspec.json.encode(order, order="deterministic")).hexdigest()
