"""The judge of the isolation probe: it sees a leak where there is one, and only there."""

import pytest
from tests.isolation_probe import Finding, Probe, Send


class Cache:
    """A prefix cache of whole prompts, and senders that share it. leaks: whether a cached prompt is any faster."""

    def __init__(self, *, leaks: bool) -> None:
        self._leaks = leaks
        self._kept: set[str] = set()

    def sender(self, *, faster: bool = True) -> Send:
        """A way to send; not faster: it neither fills nor meets the cache."""

        async def send(prompt: str) -> float:
            met = prompt in self._kept and faster and self._leaks
            self._kept |= {prompt} if faster else set()
            return 1.0 if met else 2.0

        return send


@pytest.mark.parametrize(
    ("rounds", "hits", "p_value"), [(8, 8, 2 / 256), (8, 0, 2 / 256), (8, 4, 1.0), (8, 7, 18 / 256), (1, 1, 1.0)]
)
def test_the_p_value_is_two_sided_and_exact(rounds: int, hits: int, p_value: float) -> None:
    """Protects the verdict: being wrong too often gives the secret away as well."""
    finding = Finding(rounds, hits)
    assert finding.p_value == p_value and finding.is_at_chance is (p_value >= 0.01)
    assert finding.is_certain is (hits == 8)


async def test_a_shared_cache_is_seen() -> None:
    """Protects against a probe that could see nothing: where the cache is shared, each guess is right, as both checks say."""
    send = Cache(leaks=True).sender()
    probe = Probe(send, send, words=20)
    assert await probe.find(20, seed=1) == Finding(20, 20)
    await probe.check_finds_out(20, seed=3)
    with pytest.raises(AssertionError, match="timing tells"):
        await probe.check_finds_nothing(20, seed=5)


@pytest.mark.parametrize("faster", [False, True])
async def test_equal_times_are_a_coin(faster: bool) -> None:
    """Protects against false alarms: where nothing differs, nothing is found, and a control that finds nothing fails."""
    cache = Cache(leaks=not faster)
    probe = Probe(cache.sender(), cache.sender(faster=faster), words=20)
    await probe.check_finds_nothing(200, seed=3)
    with pytest.raises(AssertionError, match="no leak"):
        await probe.check_finds_out(200, seed=4)
