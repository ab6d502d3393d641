"""The heap behind every order: the smallest keys of a plain dictionary, whatever was put, changed and discarded."""

from hypothesis import given
from hypothesis import strategies as st

from weir.core.scheduling.lazy_heap import LazyHeap

steps = st.tuples(st.sampled_from("abcdef"), st.one_of(st.none(), st.integers(0, 5)))


@given(st.lists(steps, max_size=200), st.integers(0, 8))
def test_the_smallest_are_those_of_a_dictionary(played: list[tuple[str, int | None]], number: int) -> None:
    """Protects turns: the first and the next ones in order, asked again the same, also where a key was put twice."""
    heap: LazyHeap[int, str] = LazyHeap()
    known: dict[str, int] = {}
    for key, priority in played:
        if priority is None:
            heap.discard(key)
            known.pop(key, None)
        else:
            heap.put(key, priority)
            known[key] = priority
        expected = sorted((each, name) for name, each in known.items())
        assert heap.smallest(number) == expected[:number] == heap.smallest(number)
        assert heap.first() == (expected[0] if expected else None)
        assert len(heap) == len(known) and (key in heap) == (key in known)


def test_what_was_put_twice_is_there_once() -> None:
    """Protects turns from a flow that would be named twice: stale and repeated entries count for nothing."""
    heap: LazyHeap[int, str] = LazyHeap()
    for priority in (2, 1, 2, 2):
        heap.put("a", priority)
    heap.put("b", 3)
    assert heap.smallest(5) == [(2, "a"), (3, "b")] == heap.smallest(5)
