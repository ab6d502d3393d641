"""A real llama.cpp that embeds: vectors that mean something, the right refusals, and stops that are confirmed."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence

import pytest
from tests.contract.engine_servers import API_KEY, SLOTS, WAIT_S, Children, Sink

from weir.core.demands import Demands, Embedding
from weir.core.output import numbers_of, vectors_of
from weir.core.registry.model import EngineKind
from weir.core.request import Sampling
from weir.engines.llamacpp import LlamaCppEngine
from weir.engines.llamacpp_child import ChildSpec
from weir.engines.packaged_models import smollm2_path
from weir.errors import EngineRejected
from weir.messages import ReplicaAddress
from weir.ports import EngineCall, EngineEnd

pytestmark = pytest.mark.model

WINDOW = 256


@pytest.fixture(scope="module")
def children() -> Iterator[Children]:
    started = Children()
    yield started
    started.close()


class Embedder:
    """Weir's client of one replica."""

    def __init__(self, engine: LlamaCppEngine, replica: ReplicaAddress) -> None:
        self.engine = engine
        self.replica = replica

    def call(self, *texts: str) -> EngineCall:
        return EngineCall(self.replica, 0, "", False, 1, Sampling(), None, Demands(embedding=Embedding(texts)))

    async def embed(self, *texts: str) -> tuple[list[tuple[float, ...]], EngineEnd]:
        """The vectors of texts, and how that ended."""
        sink = Sink()
        run = self.engine.start(self.call(*texts), sink)
        end = await sink.end()
        await run.stopped()
        return [numbers_of(vector) for vector in vectors_of(sink.deltas)], end


@pytest.fixture
async def embedder(children: Children) -> AsyncIterator[Embedder]:
    """A replica of the packaged model, which says nothing of pooling, so that it is told."""
    spec = ChildSpec(str(smollm2_path()), "m", SLOTS, WINDOW, 2, API_KEY, embeddings=True, pooling="mean")
    child = children.shared("weir.engines.llamacpp_child", spec)
    engine = LlamaCppEngine()
    address = ReplicaAddress("r", "p", "v", EngineKind.LLAMACPP, child.url, "", 1, api_key=API_KEY)
    try:
        yield Embedder(engine, await engine.probe(address))
    finally:
        await engine.aclose()


def alike(one: Sequence[float], other: Sequence[float]) -> float:
    """The cosine between vectors of unit length."""
    return sum(a * b for a, b in zip(one, other, strict=True))


async def test_related_texts_are_alike(embedder: Embedder) -> None:
    """Protects what embeddings are for: equal texts have equal vectors, related ones are nearer than others."""
    texts = ("The river is high after the rain.", "After the rain, the river is high.", "def add(a, b): return a + b")
    vectors, end = await embedder.embed(*texts, texts[0])
    river, paraphrase, code, again = vectors
    assert alike(river, again) == pytest.approx(1, abs=1e-3) and alike(river, river) == pytest.approx(1, abs=1e-4)
    assert alike(river, paraphrase) > alike(river, code) + 0.05
    assert len({len(vector) for vector in vectors}) == 1
    counts = [await embedder.engine.count_input(embedder.replica, text, False) for text in (*texts, texts[0])]
    assert end.usage is not None and end.usage.output_tokens == 0
    assert end.usage.input_tokens == sum(count or 0 for count in counts)


async def test_what_stands_beside_a_text_does_not_enter_its_vector(embedder: Embedder) -> None:
    """Protects tenants and indexes: neither the words nor the length of what is read together with a text change its vector."""
    text = "A weir holds the water back."
    [alone], _ = await embedder.embed(text)
    for other in ("Rain.", "Rain falls on green hills.", "Rain falls on the green hills, and on the sea."):
        first, _ = await embedder.embed(text, other)
        second, _ = await embedder.embed(other, text)
        assert alike(alone, first[0]) > 0.999 and alike(alone, second[1]) > 0.999


async def test_a_text_that_does_not_fit_is_refused(embedder: Embedder) -> None:
    """Protects the replica: such a text is the caller's, and the next one is served; the largest that fits is."""
    refused, end = await embedder.embed("short", "word " * (2 * WINDOW))
    assert not refused and isinstance(end.fault, EngineRejected)
    assert "word" not in end.fault.detail
    served, fitting = await embedder.embed("word " * (WINDOW - 10))
    assert len(served) == 1 and fitting.usage is not None and WINDOW - 20 < fitting.usage.input_tokens <= WINDOW


async def test_a_stop_is_confirmed_when_no_text_runs(embedder: Embedder) -> None:
    """Protects lanes: after a cancel nothing of the call runs in any slot, and none of its texts begins later."""
    sink = Sink()
    run = embedder.engine.start(embedder.call(*[f"{number} " + "word " * (WINDOW - 20) for number in range(12)]), sink)
    for _ in range(50 * WAIT_S):
        if await _is_running(embedder):
            break
        await asyncio.sleep(0.02)
    run.cancel()
    await run.stopped()
    assert not await _is_running(embedder) and sink.calls == 0
    assert len((await embedder.embed("another"))[0]) == 1


async def _is_running(embedder: Embedder) -> bool:
    slots = await embedder.engine.slots(embedder.replica)
    return any(slot.get("is_processing") for slot in slots or ())
