"""Protects retained streams: every store shows to any gateway what was appended, in order, whole, until it is deleted."""

import asyncio
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.contract.stream_places import HEAD, KINDS, STREAM, StreamPlace, all_of, ended, started

from weir import errors
from weir.kept_streams import StoredStream, StreamName, StreamStore
from weir.storage.stream_framing import READ_BYTES

OTHER = StreamName("acme", "gen-2")
THEIRS = StreamName("acme2", "gen-1")
WRONG = ("", ".", "..", "-a", ".hidden", "Acme", "a/b", "a\\b", "a b", "a\n", "a\0", "ä", "a" * 64)


@pytest.fixture(params=KINDS)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> StreamPlace:
    return StreamPlace(request.param, tmp_path)


@pytest.fixture
async def store(place: StreamPlace) -> AsyncIterator[StreamStore]:
    async with place.opened() as opened:
        yield opened


@pytest.fixture
async def elsewhere(place: StreamPlace) -> AsyncIterator[StreamStore]:
    async with place.opened() as opened:
        yield opened


async def test_a_stream_is_shown_elsewhere_as_it_was_written(store: StreamStore, elsewhere: StreamStore) -> None:
    """Protects a reconnect to another gateway: head, segments and end are there, and cursors go on where they were."""
    writer = await started(store, STREAM, b"one", b"two")
    assert await elsewhere.head(STREAM) == HEAD and await elsewhere.ending(STREAM) is None
    segments, cursor = await elsewhere.read(STREAM, 0)
    assert list(segments) == [b"one", b"two"] and await elsewhere.read(STREAM, cursor) == ([], cursor)
    writer.append(b"three")
    await writer.flush()
    assert await all_of(store, STREAM, cursor) == [b"three"] and writer.unstored == 0
    writer.close()
    assert await store.end(STREAM, b"the end") == b"the end" == await elsewhere.ending(STREAM)
    assert await all_of(elsewhere) == [b"one", b"two", b"three"]


async def test_what_is_not_stored_yet_is_counted_and_told(store: StreamStore) -> None:
    """Protects replay behind the live stream: who appends knows what is stored, at once or by being told, in order."""
    told: list[int] = []
    writer = await store.create(STREAM, HEAD, told.append)
    at_once = [writer.append(b"x" * size) for size in (10, 20, 30)]
    assert writer.unstored == (0 if all(at_once) else 60) and len(set(at_once)) == 1
    await writer.flush()
    assert writer.unstored == 0 and (told == [] if all(at_once) else told[-1] == 3 and told == sorted(told))
    assert [len(segment) for segment in await all_of(store)] == [10, 20, 30]
    writer.close()


async def test_a_name_is_taken_once(store: StreamStore, elsewhere: StreamStore) -> None:
    """Protects a stream from a second owner: of all that begin it at once, one does, and the others change nothing."""
    begun = [one.create(STREAM, b"%d" % number, lambda _: None) for number, one in enumerate((store, elsewhere) * 4)]
    outcomes = await asyncio.gather(*begun, return_exceptions=True)
    won = [number for number, outcome in enumerate(outcomes) if not isinstance(outcome, BaseException)]
    assert len(won) == 1 and await store.head(STREAM) == b"%d" % won[0]
    assert {type(outcome) for outcome in outcomes if isinstance(outcome, BaseException)} == {errors.StreamStoreUnavailable}


async def test_two_ends_at_once_are_one(store: StreamStore, elsewhere: StreamStore) -> None:
    """Protects one ending per stream: whoever ends it, all are told the same end, which stays."""
    (await started(store, STREAM, b"x")).close()
    lasts = [b"end %d" % number for number in range(8)]
    told = await asyncio.gather(*(one.end(STREAM, last) for one, last in zip((store, elsewhere) * 4, lasts, strict=True)))
    assert len(set(told)) == 1 and told[0] in lasts
    assert await store.end(STREAM, b"later") == told[0] == await elsewhere.ending(STREAM)


async def test_what_was_never_begun_is_nowhere(store: StreamStore) -> None:
    """Protects a look-up of any name: nothing is there, nothing is made by asking, and it cannot be ended."""
    assert await store.head(STREAM) is None and await store.ending(STREAM) is None and await store.read(STREAM, 0) == ([], 0)
    with pytest.raises(errors.StreamStoreUnavailable):
        await store.end(STREAM, b"end")
    await store.delete(STREAM)
    assert await store.streams("acme") == [] and await store.tenants() == []


async def test_a_tenants_streams_are_its_own(store: StreamStore, elsewhere: StreamStore) -> None:
    """Protects tenants from each other: the same generation, or a name that begins alike, is another stream."""
    for name in (STREAM, OTHER, THEIRS):
        await ended(store, name, name.tenant.encode())
    assert await elsewhere.tenants() == ["acme", "acme2"]
    assert {stream.name for stream in await elsewhere.streams("acme")} == {STREAM, OTHER}
    assert [stream.name for stream in await elsewhere.streams("acme2")] == [THEIRS]
    await store.delete(STREAM)
    assert await all_of(elsewhere, THEIRS) == [b"acme2"] and await all_of(elsewhere, OTHER) == [b"acme"]
    await store.delete(THEIRS)
    assert await elsewhere.tenants() == ["acme"] and await elsewhere.streams("acme2") == []


async def test_a_store_says_how_much_it_has_and_since_when(store: StreamStore, place: StreamPlace) -> None:
    """Protects bounds and ages: a listing has every byte, a growing time, the end, and the oldest first."""
    (await started(store, STREAM, b"x" * 1_000)).close()
    (before,) = await store.streams("acme")
    assert 1_000 + len(HEAD) <= before.size <= 1_100 and before.changed_ms > 0 and not before.is_ended
    place.clock.now_ms += 5
    await ended(store, OTHER, b"y" * 300)
    place.clock.now_ms += 5
    await store.end(STREAM, b"z" * 50)
    streams = await store.streams("acme")
    sizes = {stream.name: stream.size for stream in streams}
    assert before.size + 50 <= sizes[STREAM] <= before.size + 60 and 300 + len(HEAD) + len(b"end") <= sizes[OTHER] <= 350
    assert all(stream.is_ended for stream in streams)
    assert [stream.changed_ms for stream in streams] == sorted(stream.changed_ms for stream in streams)
    if "memory" in place.kind and "bucket" not in place.kind:
        assert streams == [
            StoredStream(OTHER, sizes[OTHER], before.changed_ms + 5, True),
            StoredStream(STREAM, sizes[STREAM], before.changed_ms + 10, True),
        ]


async def test_one_read_is_bounded_and_never_stuck(store: StreamStore) -> None:
    """Protects memory, and progress: a read returns about 256 KiB, and a longer segment whole."""
    large = [bytes([number]) * 300_000 for number in range(1, 9)]
    huge = b"h" * (READ_BYTES + READ_BYTES // 2)
    (await started(store, STREAM, *large, huge, b"last")).close()
    found: list[bytes] = []
    cursor = 0
    while True:
        segments, cursor = await store.read(STREAM, cursor)
        if not segments:
            break
        assert len(segments) == 1 or sum(map(len, segments)) <= READ_BYTES
        found += segments
    assert found == [*large, huge, b"last"]


@pytest.mark.parametrize("moment", ["begun", "appended", "ended", "twice", "while it is appended to"])
async def test_a_deleted_stream_is_gone_at_any_moment(store: StreamStore, elsewhere: StreamStore, moment: str) -> None:
    """Protects deletion: nothing of it is shown any more, it can't be ended, and its owner is not disturbed."""
    writer = await started(store, STREAM, *([] if moment == "begun" else [b"one"]))
    await ended(store, OTHER, b"other")
    if moment == "ended":
        await store.end(STREAM, b"end")
    if moment == "while it is appended to":
        writer.append(b"two")
    await asyncio.gather(*(elsewhere.delete(STREAM) for _ in range(4 if moment == "twice" else 1)))
    writer.append(b"three")
    await writer.flush()
    assert await store.head(STREAM) is None and await store.ending(STREAM) is None
    with pytest.raises(errors.StreamStoreUnavailable):
        await store.end(STREAM, b"late")
    writer.close()
    await elsewhere.delete(STREAM)
    assert await store.read(STREAM, 0) == ([], 0) and [stream.name for stream in await store.streams("acme")] == [OTHER]
    assert await store.ending(STREAM) is None and await all_of(store, OTHER) == [b"other"]


async def test_a_reader_meets_a_deletion_as_the_end_of_what_is_there(store: StreamStore, elsewhere: StreamStore) -> None:
    """Protects a reader: what it gets while the stream is deleted is a beginning of it, then nothing."""
    texts = [b"%d" % number for number in range(20)]
    await ended(store, STREAM, *texts)

    async def read() -> list[bytes]:
        segments, _ = await store.read(STREAM, 0)
        return list(segments)

    reads, _ = await asyncio.gather(asyncio.gather(*(read() for _ in range(6))), elsewhere.delete(STREAM))
    for found in reads:
        assert found == texts[: len(found)]
    assert await read() == []


async def test_a_deletion_does_not_disturb_the_next_stream(store: StreamStore, elsewhere: StreamStore) -> None:
    """Protects a new stream of a tenant whose last other one is deleted in the same moment."""
    for number in range(12):
        before, after = StreamName("acme", f"gen-{number}"), StreamName("acme", f"gen-{number + 1}")
        if number == 0:
            (await started(store, before)).close()
        writer, _ = await asyncio.gather(started(store, after, b"text"), elsewhere.delete(before))
        writer.close()
        assert await store.head(after) == HEAD and [stream.name for stream in await store.streams("acme")] == [after]


@pytest.mark.parametrize("word", WRONG)
async def test_what_is_no_name_is_refused(store: StreamStore, word: str) -> None:
    """Protects everything outside the store: no name can lead elsewhere, whatever is asked of it."""
    for name in (StreamName(word, "gen-1"), StreamName("acme", word)):
        for asked in (store.head(name), store.read(name, 0), store.end(name, b"x"), store.ending(name), store.delete(name)):
            with pytest.raises(ValueError):
                await asked
        with pytest.raises(ValueError):
            await store.create(name, HEAD, lambda _: None)
    with pytest.raises(ValueError):
        await store.streams(word)


async def test_closing_takes_nothing_away(place: StreamPlace) -> None:
    """Protects what is stored from the end of who stored it: writers and stores close, also twice; another one reads on."""
    first = place.open()
    writer = await started(first, STREAM, b"one")
    for _ in range(2):
        writer.close()
        await first.aclose()
    with pytest.raises(errors.StreamStoreUnavailable):
        writer.append(b"two")
    async with place.opened() as second:
        assert await all_of(second) == [b"one"] and await second.end(STREAM, b"end") == b"end"


async def test_a_writer_that_closes_at_once_leaves_a_beginning(place: StreamPlace) -> None:
    """Protects order at a crash: of what waited, a beginning is stored, and nothing after a gap."""
    async with place.opened() as store:
        writer = await started(store, STREAM, b"0")
        for number in range(1, 4):
            writer.append(b"%d" % number)
        writer.close()
    async with place.opened() as elsewhere:
        found = await all_of(elsewhere)
        assert found == [b"0", b"1", b"2", b"3"][: len(found)] and found


Step = tuple[str, int]
STEPS = st.lists(st.tuples(st.sampled_from(["append", "append", "read", "flush"]), st.integers(0, 50)), max_size=30)


@pytest.mark.parametrize("kind", KINDS)
def test_any_order_of_appends_and_reads_shows_all_without_a_gap(kind: str) -> None:
    """Protects replay from any event: from every cursor that was ever returned, the same segments follow in order."""

    @settings(max_examples=5 if kind == "bucket-s3" else 40)
    @given(STEPS)
    def holds(steps: list[Step]) -> None:
        with tempfile.TemporaryDirectory() as directory:
            asyncio.run(_follow(StreamPlace(kind, Path(directory)), steps))

    holds()


async def _follow(place: StreamPlace, steps: list[Step]) -> None:
    """Cursors with the number of segments before each; what was stored for sure is there at every look."""
    async with place.opened() as store, place.opened() as elsewhere:
        appended: list[bytes] = []
        stored = 0
        cursors = {0: 0}
        writer = await store.create(STREAM, HEAD, lambda _: None)
        for number, (step, draw) in enumerate([*steps, ("flush", 0), ("read", 0)]):
            if step == "append":
                appended.append(b"%d:" % number + b"x" * draw * draw)
                stored = len(appended) if writer.append(appended[-1]) else stored
            elif step == "flush":
                await writer.flush()
                stored = len(appended)
            else:
                cursor = sorted(cursors)[draw % len(cursors)]
                segments, after = await elsewhere.read(STREAM, cursor)
                before = cursors[cursor]
                assert list(segments) == appended[before : before + len(segments)]
                assert bool(segments) or stored <= before
                assert cursors.setdefault(after, before + len(segments)) == before + len(segments)
        for cursor, before in cursors.items():
            assert await all_of(elsewhere, STREAM, cursor) == appended[before:]
        writer.close()


# ── one stream, and who reads it ─────────────────────────────────────────────────────────────────────────────────────


async def test_one_stream_is_found_by_its_name(store: StreamStore) -> None:
    """Protects readers from a listing of everything: what is found is what the listing says of it, and nothing else is."""
    writer = await started(store, STREAM)
    writer.append(b"segment")
    await writer.flush()
    [listed] = await store.streams(STREAM.tenant)
    assert await store.find(STREAM) == listed and not listed.is_ended
    await store.end(STREAM, b"end")
    [listed] = await store.streams(STREAM.tenant)
    assert await store.find(STREAM) == listed and listed.is_ended
    assert await store.find(StreamName(STREAM.tenant, "gen-other")) is None
    await store.delete(STREAM)
    assert await store.find(STREAM) is None
    writer.close()


async def test_a_touch_is_seen_and_is_no_write(store: StreamStore) -> None:
    """Protects streams that are read elsewhere: each touch changes a number, and neither the time of the last write."""
    await store.touch(STREAM)
    assert await store.touched(STREAM) == 0 and await store.streams(STREAM.tenant) == []
    writer = await started(store, STREAM)
    before = await store.find(STREAM)
    assert before is not None and await store.touched(STREAM) == 0
    seen = [await store.touched(STREAM)]
    for _ in range(3):
        await store.touch(STREAM)
        seen.append(await store.touched(STREAM))
    after = await store.find(STREAM)
    assert len(set(seen)) == len(seen)
    assert after is not None and after.changed_ms == before.changed_ms
    await store.delete(STREAM)
    assert await store.touched(STREAM) == 0 and await store.streams(STREAM.tenant) == []
    writer.close()
