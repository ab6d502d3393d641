"""What a replica has room for: KV tokens within its memory, prompts within its backlog, and sums that come back to nothing."""

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from weir.core.registry.model import DEFAULT_WORKLOAD_CLASSES, workload_class_of
from weir.core.routing.capacity import Need, Room
from weir.core.tenancy import ServiceClass
from weir.units import Millis

KV_MAX = 100
amounts = st.integers(0, 130)
backlogs = st.sampled_from([None, 1, 20, 60])


def prompt(kv_tokens: int = 0, input_tokens: int = 0, backlog_ms: Millis | None = None) -> Need:
    """What a request takes, its prompt not behind more than backlog_ms of others."""
    return Need(kv_tokens, input_tokens, backlog_ms=backlog_ms)


class RoomMachine(RuleBasedStateMachine):
    """A room beside plain dictionaries by lane: what is reserved, and what is still to be read."""

    def __init__(self) -> None:
        super().__init__()
        self.room = Room()
        self.kv: dict[int, int] = {}
        self.prefills: dict[int, int] = {}
        self.within = True  # nothing was taken alone that is larger than the memory, and nothing grew, since it was empty
        self.lanes = 0

    @rule(kv_max=st.sampled_from([None, KV_MAX]), input_ms=st.sampled_from([None, 0.0, 0.25, 1.0]))
    def learn(self, kv_max: int | None, input_ms: float | None) -> None:
        """What its engine says of itself may come late, and change."""
        self.room.kv_tokens_max, self.room.input_ms = kv_max, input_ms
        self.within = self.within and (kv_max is None or sum(self.kv.values()) <= kv_max)

    @rule(kv=amounts, prefill=amounts, backlog_ms=backlogs)
    def start(self, kv: int, prefill: int, backlog_ms: Millis | None) -> None:
        """What fits starts. Alone everything does; beside others the bounds hold, once they are known."""
        fits = self.room.fits(prompt(kv, prefill, backlog_ms))
        reserved, unread = sum(self.kv.values()), sum(self.prefills.values())
        kv_max, input_ms = self.room.kv_tokens_max, self.room.input_ms
        has_memory = kv_max is None or reserved + kv <= kv_max
        is_read_soon = input_ms is None or backlog_ms is None or unread == 0 or unread * input_ms < backlog_ms
        assert fits == (not self.kv or (has_memory and is_read_soon))
        if not fits:
            return
        self.within = (self.within or not self.kv) and has_memory
        self.lanes += 1
        self.room.take(self.lanes, kv, prefill, 0)
        self.kv[self.lanes], self.prefills[self.lanes] = kv, prefill

    @precondition(lambda self: self.kv)
    @rule(data=st.data(), to=amounts)
    def grow(self, data: st.DataObject, to: int) -> None:
        """It has more output than was expected, or less."""
        lane = data.draw(st.sampled_from(sorted(self.kv)))
        self.room.grew(lane, to)
        self.within = self.within and to <= self.kv[lane]
        self.kv[lane] = max(self.kv[lane], to)

    @precondition(lambda self: self.kv)
    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        """Its prompt is read; said again, it changes nothing."""
        lane = data.draw(st.sampled_from(sorted(self.kv)))
        self.room.prefilled(lane, 0)
        self.prefills.pop(lane, None)

    @precondition(lambda self: self.kv)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        """It leaves, with output or without."""
        lane = data.draw(st.sampled_from(sorted(self.kv)))
        self.room.free(lane)
        del self.kv[lane]
        self.prefills.pop(lane, None)

    @invariant()
    def sums_are_those_of_the_lanes(self) -> None:
        """What is reserved is what runs reserved, and nothing is left of what ended."""
        assert self.room.kv_tokens == sum(self.kv.values())
        assert {lane: self.room.taken(lane) for lane in self.kv} == self.kv
        assert self.room.prefill_tokens == sum(self.prefills.values())

    @invariant()
    def memory_suffices(self) -> None:
        """More than the memory is reserved only by one that began alone, or where an answer outgrew its expectation."""
        if self.room.kv_tokens_max is not None and self.within:
            assert self.room.kv_tokens <= self.room.kv_tokens_max


TestRoomMachine = RoomMachine.TestCase


@given(st.lists(st.tuples(amounts, amounts), min_size=1, max_size=40))
def test_more_than_the_memory_only_alone(asked: list[tuple[int, int]]) -> None:
    """Protects engines from preempting what runs: what is dispatched beside others fits in what the memory has left."""
    room = Room()
    room.kv_tokens_max = KV_MAX
    running: list[int] = []
    for lane, (kv, prefill) in enumerate(asked):
        while not room.fits(prompt(kv, prefill)):
            room.free(running.pop(0))
        room.take(lane, kv, prefill, 0)
        running.append(lane)
        assert room.kv_tokens <= KV_MAX or len(running) == 1
    for lane in running:
        room.free(lane)
    assert (room.kv_tokens, room.prefill_tokens) == (0, 0)


def test_an_unknown_memory_bounds_nothing() -> None:
    """Protects engines that do not say what they hold: lanes alone bound them."""
    room = Room()
    for lane in range(50):
        assert room.fits(prompt(10**6, 10**6, 1))
        room.take(lane, 10**6, 10**6, 0)


def test_a_prompt_waits_for_those_before_it_and_never_for_its_own_length() -> None:
    """Protects first outputs: behind prompts that take as long as is allowed nobody starts; its own never keeps one out."""
    room = Room()
    room.input_ms = 0.5
    room.take(0, 0, 39, 0)
    assert room.fits(prompt(0, 10**6, 20)), "19.5 ms are before it"
    room.take(1, 0, 1, 0)
    assert not room.fits(prompt(0, 1, 20)) and not room.fits(prompt(0, 0, 20)), "20 ms are"
    assert room.fits(prompt(0, 1, 21)) and room.fits(prompt(0, 1))
    room.prefilled(0, 0)
    assert room.fits(prompt(0, 10**6, 20))


def test_an_unknown_pace_and_an_unbounded_class_keep_nobody_out() -> None:
    """Protects pools without a warm-up and classes without a bound: prompts bound nothing then, memory still does."""
    room = Room()
    room.kv_tokens_max = KV_MAX
    room.take(0, 50, 10**6, 0)
    assert room.fits(prompt(50, 1, 1)) and not room.fits(prompt(51, 1, 1))
    room.input_ms = 1.0
    assert not room.fits(prompt(50, 1, 1)) and room.fits(prompt(50, 1)) and not room.fits(prompt(51, 1))


def test_a_backlog_that_is_too_long_for_a_short_one_is_not_for_a_long_one() -> None:
    """Protects both kinds of interactive requests: short ones are read within a step, long ones find their replica."""
    room = Room()
    room.input_ms = 0.2
    room.take(0, 0, 100, 0)  # 20 ms
    kinds = ((ServiceClass.INTERACTIVE, 100), (ServiceClass.INTERACTIVE, 8_000), (ServiceClass.BATCH, 100))
    bounds = [workload_class_of(DEFAULT_WORKLOAD_CLASSES, *kind).backlog_ms for kind in kinds]
    assert [room.fits(prompt(0, 100, backlog_ms)) for backlog_ms in bounds] == [False, True, True]
    room.take(1, 0, 9_900, 0)  # 2,000 ms
    assert [room.fits(prompt(0, 100, backlog_ms)) for backlog_ms in bounds] == [False, False, False]


def test_an_answer_that_outgrows_its_reservation_keeps_others_out() -> None:
    """Protects what runs from newcomers: what an answer holds by now counts, also beyond the memory, until it ends."""
    room = Room()
    room.kv_tokens_max = KV_MAX
    room.take(0, 40, 0, 0)
    room.grew(0, 30)
    assert room.kv_tokens == 40 and room.fits(prompt(60))
    room.grew(0, KV_MAX + 1)
    assert room.kv_tokens == KV_MAX + 1 and not room.fits(prompt())
    room.free(0)
    assert room.fits(prompt(2 * KV_MAX))


def test_what_is_left_to_read_falls_as_it_is_read() -> None:
    """Protects a true Retry-After: the prompts that a replica has take their time from when the first of them was begun."""
    room = Room()
    assert room.unread_ms(5) == 0
    room.take(0, 0, 1_000, 10**9)
    assert room.unread_ms(2 * 10**9) == 0, "nobody knows how fast it reads"
    room.input_ms = 2.0
    assert room.unread_ms(2 * 10**9) == 1_000
    room.take(1, 0, 500, 2 * 10**9)
    assert room.unread_ms(2 * 10**9) == 2_000
    room.prefilled(0, 3 * 10**9)
    assert room.unread_ms(3 * 10**9) == 1_000 and room.unread_ms(9 * 10**9) == 0
    room.free(1)
    assert room.unread_ms(3 * 10**9) == 0 == room.prefill_tokens


@given(st.none() | st.integers(1, 10_000), st.none() | st.integers(1, 10_000))
def test_one_of_many_asks_for_a_backlog_of_its_own(backlog_ms: Millis | None, of_many_ms: Millis | None) -> None:
    """Protects who asks for little: where one of many has a bound of its own it counts, and nothing else changes."""
    need = Need(7, 5, (b"mark",), 400, backlog_ms, of_many_ms)
    counts_ms = backlog_ms if of_many_ms is None else of_many_ms
    assert need.of_many() == Need(7, 5, (b"mark",), 400, counts_ms, of_many_ms)
