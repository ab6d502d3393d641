"""One attempt's output: nothing leaves unbooked, nothing is lost or reordered, and little is booked ahead."""

from hypothesis import given
from hypothesis import strategies as st

from weir.core.output import Delta, ShapedDelta, ToolCallPart, Vectors, text_of
from weir.core.stream import TokenStream

WORDS = st.sampled_from([" a", "", " übrig", "水", " water"])


@given(
    words=st.lists(WORDS, max_size=80),
    counted=st.booleans(),
    step=st.integers(1, 20),
    durable=st.lists(st.integers(0, 3), max_size=80),
)
def test_what_leaves_is_booked_and_nothing_is_lost(words: list[str], counted: bool, step: int, durable: list[int]) -> None:
    """Protects money and text: delivered ≤ booked at every moment; in the end the text is whole and in order."""
    most = 2_000
    stream = TokenStream(most, min(step, most), step)
    out: list[Delta] = []
    asked = [stream.asked]
    for number, word in enumerate(words):
        out += stream.arrive([Delta(word, number + 1 if counted else None)], number)
        if (wanted := stream.ask()) is not None:
            asked.append(wanted)
        for _ in range(durable[number] if number < len(durable) else 0):
            if asked:
                out += stream.book(asked.pop(0))
        assert stream.delivered <= stream.booked <= stream.asked <= most
        assert stream.delivered <= stream.arrived
        if counted:  # tokens without text wait with the piece behind them, which is asked for whole
            next_piece = next((index + 1 for index in range(stream.delivered, number + 1) if words[index]), 0)
            assert stream.asked <= max(stream.delivered + 2 * step, next_piece)
    for _ in range(500):
        if asked:
            out += stream.book(asked.pop(0))
        if (wanted := stream.ask()) is not None:
            asked.append(wanted)
    assert text_of(out) == "".join(words)
    assert not stream.is_held and stream.held_bytes == 0 and stream.drain() == []


@given(words=st.lists(WORDS, max_size=40), cuts=st.lists(st.integers(1, 5), max_size=40))
def test_reads_may_be_cut_anywhere(words: list[str], cuts: list[int]) -> None:
    """Protects coalescing: how output is grouped into reads changes neither text nor counts."""
    whole, cut = TokenStream(500, 500), TokenStream(500, 500)
    whole.book(500)
    cut.book(500)
    pieces = [Delta(word) for word in words]
    texts = whole.arrive(pieces, 5) if pieces else []
    again: list[Delta] = []
    while pieces:
        size = cuts.pop() if cuts else 1
        head, pieces = pieces[:size], pieces[size:]
        again += cut.arrive(head, 5)
    assert texts == again and (whole.delivered, whole.arrived) == (cut.delivered, cut.arrived)


def test_bytes_count_where_the_engine_does_not() -> None:
    """Protects estimates: without counts n is the UTF-8 bytes relayed, at most max_output."""
    stream = TokenStream(5, 5)
    stream.book(5)
    assert text_of(stream.arrive([Delta("水")], 1)) == "水" and stream.delivered == 3
    assert text_of(stream.arrive([Delta("abcdef")], 2)) == "abcdef" and stream.delivered == 5


def test_a_count_never_falls() -> None:
    """Protects watermarks from an engine that counts back or too far."""
    stream = TokenStream(10, 10)
    stream.book(10)
    stream.arrive([Delta("a", 6), Delta("b", 2), Delta("c", 99)], 1)
    assert stream.arrived == stream.delivered == 10


def test_the_next_step_is_asked_one_step_early() -> None:
    """Protects streams from waiting: the write hides behind the generation, and nothing is asked beyond max_output."""
    stream = TokenStream(100, 16, 16)
    stream.book(16)
    stream.arrive([Delta("a", 1)], 1)
    assert stream.ask() == 32 and stream.ask() is None
    stream.book(32)
    stream.arrive([Delta("b", 17)], 1)
    assert stream.ask() == 48
    stream.book(48)
    stream.arrive([Delta("c", 40)], 1)
    assert stream.ask() == 64
    stream.book(64)
    stream.arrive([Delta("d", 64)], 1)
    assert stream.ask() == 80
    stream.book(80)
    stream.arrive([Delta("e", 79)], 1)
    assert stream.ask() == 96
    stream.book(96)
    stream.arrive([Delta("f", 95)], 1)
    assert stream.ask() == 100 and stream.ask() is None


def test_a_piece_larger_than_two_steps_is_asked_for_whole() -> None:
    """Protects progress: a single read of many tokens is let out once its own count is booked."""
    stream = TokenStream(1_000, 4, 4)
    stream.book(4)
    assert stream.arrive([Delta("many", 50)], 1) == [] and stream.is_held
    assert stream.ask() == 50 and stream.ask() is None
    assert text_of(stream.book(50)) == "many" and stream.delivered == 50


def test_a_whole_answer_is_held_until_it_is_drained() -> None:
    """Protects answers that are not streamed: nothing leaves before the settlement."""
    stream = TokenStream(100, 0)
    assert stream.arrive([Delta("a", 1), Delta("é", 2)], 1) == []
    assert stream.held_bytes == 3 and stream.delivered == 0
    assert text_of(stream.drain()) == "aé" and stream.held_bytes == 0


def test_a_whole_answer_keeps_what_has_no_tokens() -> None:
    """Protects vectors and other pieces that no token counts: a step of 0 that becomes durable lets nothing out on its own."""
    vectors = Vectors("", vectors=(b"abcd", b"efgh"))
    stream = TokenStream(1, 0, is_whole=True)
    assert stream.arrive([vectors], 1) == [] == stream.book(0)
    assert stream.is_held and stream.held_bytes == 8 and stream.first_ns == 1
    assert stream.drain() == [vectors] and stream.arrived == stream.delivered == 0


def test_times() -> None:
    """Protects TPOT: from the first to the last output, undefined for fewer than two tokens or without output."""
    stream = TokenStream(100, 100)
    assert stream.tpot_ms(5) is None
    stream.arrive([Delta("", 0)], 1_000_000)
    assert stream.first_ns is None and stream.last_ns is None
    stream.arrive([Delta("a", 1)], 2_000_000)
    stream.arrive([Delta("b", 3)], 8_000_000)
    assert stream.tpot_ms(1) is None
    assert stream.tpot_ms(3) == 3.0


def test_what_is_not_text_is_booked_and_kept_in_order_too() -> None:
    """Protects tool calls and reasoning: they leave in their place, once booked, and count where the engine counts nothing."""
    call = ShapedDelta("", tool_calls=(ToolCallPart(0, "c", "find", '{"a"'),))
    stream = TokenStream(100, 4, 4)
    stream.book(4)
    assert stream.arrive([Delta("ab"), call, ShapedDelta("", reasoning="x"), ShapedDelta("")], 1) == [Delta("ab")]
    assert stream.arrived == 2 + len('find{"a"') + 1 and stream.held_bytes == call.extra_bytes + 1
    assert stream.book(100) == [call, ShapedDelta("", reasoning="x")] and stream.held_bytes == 0


CHOICES = 3


@given(
    made=st.lists(st.tuples(st.integers(0, CHOICES - 1), WORDS), max_size=60),
    counted=st.booleans(),
    step=st.integers(1, 20),
    durable=st.lists(st.integers(0, 3), max_size=60),
)
def test_several_choices_are_booked_together(made: list[tuple[int, str]], counted: bool, step: int, durable: list[int]) -> None:
    """Protects money with several choices: delivered ≤ booked in tokens of all; each choice's pieces keep their order."""
    most = 40 * CHOICES
    stream = TokenStream(most, min(step, most), step)
    pieces = [
        ShapedDelta(word, number + 1 if counted else None, choice=choice, reasoning=str(number))
        for number, (choice, word) in enumerate(made)
    ]
    out: list[Delta] = []
    asked = [stream.asked]
    for number, piece in enumerate(pieces):
        out += stream.arrive([piece], number)
        if (wanted := stream.ask()) is not None:
            asked.append(wanted)
        for _ in range(durable[number] if number < len(durable) else 0):
            if asked:
                out += stream.book(asked.pop(0))
        assert stream.delivered <= stream.booked <= stream.asked <= most
        if counted:
            assert len(out) <= stream.booked
    for _ in range(500):
        if asked:
            out += stream.book(asked.pop(0))
        if (wanted := stream.ask()) is not None:
            asked.append(wanted)
    assert out == pieces and stream.delivered <= most and stream.held_bytes == 0
