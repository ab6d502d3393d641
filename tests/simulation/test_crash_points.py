"""A process that dies, or is superseded, at any of its await points leaves money and limits as the rules say."""

import pytest

from weir.sim.crash_points import Interruption, Way, run_interrupted, turns_of_story

STORIES = (1, 4)
SOAK_STORIES = range(100, 140)
RECOVERY_TURNS = range(1, 13)


def _interrupt_everywhere(story: int, way: Way) -> None:
    for turn in range(1, 1 + turns_of_story(story)):
        run_interrupted(story, Interruption(turn, way))


@pytest.mark.parametrize("way", [Way.DIES, Way.LANDS, Way.SUPERSEDED])
@pytest.mark.parametrize("story", STORIES)
def test_an_interruption_at_every_point(story: int, way: Way) -> None:
    """Protects money through any crash: before, in and after each write, look-up and message; refused if it lives on."""
    _interrupt_everywhere(story, way)


@pytest.mark.parametrize("turn", [20, 30, 40])
@pytest.mark.parametrize("story", STORIES)
def test_recovery_dies_at_every_point(story: int, turn: int) -> None:
    """Protects recovery: it dies at each of its own points, once and then again, and the next one ends the rest, once."""
    for death in RECOVERY_TURNS:
        run_interrupted(story, Interruption(turn, Way.AGAIN, (death,)))
        run_interrupted(story, Interruption(turn, Way.AGAIN, (death, 1 + death // 2)))


@pytest.mark.slow
@pytest.mark.parametrize("story", SOAK_STORIES)
def test_more_stories_at_every_point(story: int) -> None:
    """Protects the same in other small worlds: one and two lanes, with limits and without."""
    for way in (Way.DIES, Way.LANDS, Way.SUPERSEDED):
        _interrupt_everywhere(story, way)
