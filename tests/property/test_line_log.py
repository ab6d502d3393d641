"""What became of a batch's lines, as any worker reads it after any crash: what was added is there, each line counts once."""

import asyncio
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weir import errors
from weir.batches.kept_pieces import pack_pieces, unpack_pieces
from weir.batches.line_log import Entry, LineLog, Lines, Made, Told
from weir.core.endings import FinishReason
from weir.core.output import Delta, ShapedDelta, TokenLogprob, ToolCallPart, Vectors, text_of
from weir.storage.file_memory import FileMemory

LINE = st.integers(1, 6)
ENTRY: st.SearchStrategy[Entry] = st.one_of(
    st.builds(Made, LINE, st.sampled_from(["gen-a", "gen-b"]), st.binary(max_size=20)),
    st.builds(Told, LINE, st.booleans(), st.binary(max_size=20)),
)
SHAPED = st.builds(
    ShapedDelta,
    st.text(max_size=8),
    st.none() | st.integers(0, 9),
    choice=st.integers(0, 2),
    reasoning=st.text(max_size=4),
    tool_calls=st.lists(st.builds(ToolCallPart, st.integers(0, 3), st.none() | st.just("id"), st.none() | st.just("f"))).map(
        tuple
    ),
    logprobs=st.lists(st.builds(TokenLogprob, st.text(max_size=2), st.floats(-9, 0), st.none() | st.just((1, 2)))).map(tuple),
    finish=st.none() | st.sampled_from(FinishReason),
)
PIECES = st.lists(st.one_of(st.builds(Delta, st.text(max_size=8)), SHAPED))


def log(store: FileMemory, worker: str) -> LineLog:
    """One worker's."""
    return LineLog(store, "acme", "batch_1", worker)


async def told_in(store: FileMemory) -> list[Told]:
    """What the result files would have, in their order."""
    lines, found = Lines(), []
    reader = log(store, "reader")
    async for entry in reader.entries(await reader.groups()):
        if isinstance(entry, Told) and lines.add(entry):
            found.append(entry)
    return found


@given(st.lists(st.tuples(st.integers(0, 2), ENTRY), max_size=40))
def test_every_line_counts_once_whoever_told_it(added: Sequence[tuple[int, Entry]]) -> None:
    """Protects results where workers believe each other dead: no reading tells a line twice or loses one."""

    async def script() -> None:
        store = FileMemory(lambda: 0)
        workers = [log(store, f"w{number}") for number in range(3)]
        for number, entry in added:
            before = await told_in(store)
            await workers[number].add(entry)
            after = await told_in(store)
            assert {told.line for told in before} <= {told.line for told in after}
        check_read(await told_in(store), await log(store, "next").read(), [entry for _, entry in added])

    asyncio.run(script())


def check_read(told: list[Told], lines: Lines, added: list[Entry]) -> None:
    """Both readings say the same, and all that was added."""
    numbers = {entry.line for entry in told}
    assert len(numbers) == len(told) and numbers == {entry.line for entry in added if isinstance(entry, Told)}
    assert lines.told == numbers and lines.failed == sum(entry.is_error for entry in told)
    assert set(lines.made) == {entry.line for entry in added if isinstance(entry, Made)} - lines.told


async def test_what_waits_is_written_in_one_group() -> None:
    """Protects the store from a write per line: while one is under way, everything else gathers for the next."""
    store = FileMemory(lambda: 0)
    entries = [Told(number, False, b"%d" % number) for number in range(1, 65)]
    mine = log(store, "w")
    await asyncio.gather(*(mine.add(entry) for entry in entries))
    assert len(store.keys) <= 2 and await told_in(store) == entries


async def test_only_what_is_new_is_read_again() -> None:
    """Protects two workers on one batch from reading all of it for each line that the other one finished."""
    store, reads = FileMemory(lambda: 0), 0

    def count(operation: str) -> bool:
        nonlocal reads
        reads += operation == "read"
        return False

    theirs, mine = log(store, "theirs"), log(store, "mine")
    for number in range(1, 21):
        await theirs.add(Made(number, f"gen-{number}", b"x"))
    lines = await mine.read()
    await mine.add(Made(21, "gen-21", b"mine"))
    await theirs.add(Made(22, "gen-a", b"first"))
    await theirs.add(Made(22, "gen-b", b"second"))
    await theirs.add(Told(1, False, b"told"))
    store.fault = count
    await asyncio.gather(*(mine.catch_up(lines) for _ in range(8)))
    assert reads == 3 and lines.told == {1}
    found = [lines.output_of(line, name) for line, name in ((22, "gen-a"), (22, "gen-b"), (20, "gen-20"), (1, "gen-1"))]
    assert [made and made.pieces for made in found] == [b"first", b"second", b"x", None]


async def test_a_failed_write_is_told_to_who_waits_and_to_nobody_later() -> None:
    """Protects charging: an output that could not be stored is not taken for stored, and the next one can be."""
    store = FileMemory(lambda: 0)
    mine = log(store, "w")
    store.fault = lambda operation: True
    with pytest.raises(errors.FileStoreUnavailable):
        await mine.add(Told(1, False, b"lost"))
    store.fault = None
    await mine.add(Told(1, False, b"kept"))
    assert [told.text for told in await told_in(store)] == [b"kept"]


async def test_damage_is_no_line() -> None:
    """Protects results: a group that cannot be read stops the reading, and is told from a store that is away."""
    store = FileMemory(lambda: 0)
    await log(store, "w").add(Told(1, False, b"x"))
    await store.replace(store.keys[0], b"\xc1")
    with pytest.raises(errors.BatchDamaged):
        await log(store, "reader").read()
    store.fault = lambda operation: operation == "read"
    with pytest.raises(errors.FileStoreUnavailable):
        await log(store, "reader").read()


@given(PIECES)
def test_an_output_is_what_it_was(pieces: list[Delta]) -> None:
    """Protects an answer that is made after a crash: the text and every other part, in order."""
    unpacked = unpack_pieces(pack_pieces(pieces))
    assert text_of(unpacked) == text_of(pieces)
    shaped = [piece for piece in pieces if isinstance(piece, ShapedDelta)]
    assert [piece for piece in unpacked if isinstance(piece, ShapedDelta)] == shaped
    assert msgspec.msgpack.encode(pack_pieces(unpacked)) == msgspec.msgpack.encode(pack_pieces(pieces))


@pytest.mark.parametrize("content", [b"\xc1", b"\x91\x05", b"\x91\x92\x01\x05", b"\x91\x93\x01\x02\x03"])
def test_a_damaged_output_is_damage(content: bytes) -> None:
    """Protects the worker and the batch: an output that cannot be read is no bug, and its batch ends with its time."""
    with pytest.raises(errors.BatchDamaged):
        unpack_pieces(content)


def test_vectors_are_what_they_were() -> None:
    """Protects embeddings."""
    vectors = Vectors("", None, (b"\x00\x00\x80?", b"\x00\x00\x00@"))
    assert unpack_pieces(pack_pieces([vectors])) == [vectors]
