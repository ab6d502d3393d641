"""What another coordinator would have to be told of a request: what was asked, what was granted, what was reported and unheard.

It keeps this while one coordinator has it all, and tells it where another one leads. It decides nothing, and sends nothing.
"""

from collections.abc import Sequence

import msgspec

from weir.gateway.attempt import Attempt
from weir.messages import Acquire, AttemptUsage, Finish, GenerationRecord, Reattach, Up, later
from weir.ports import Clock
from weir.units import Nanos, ceil_ms_from_ns


class Retelling:
    """One request's."""

    __slots__ = ("_asked", "_asked_ns", "_clock", "_earlier", "_left", "_reported")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._asked: Acquire | None = None
        self._asked_ns: Nanos = 0
        self._reported: tuple[Attempt, Finish] | None = None  # what no grant followed
        self._left: Finish | None = None  # that none is waited for any more, after a failure was reported
        self._earlier: tuple[Attempt, Finish] | None = None  # the attempt before, which failed

    # ── what happens ─────────────────────────────────────────────────────────────────────────────────────────────────

    def asked(self, acquire: Acquire) -> None:
        """A grant was asked for."""
        self._asked, self._asked_ns = acquire, self._clock.monotonic_ns()

    def granted(self) -> None:
        """An attempt begins: what was reported of the one before is answered."""
        self._earlier, self._reported = self._reported, None

    def reported(self, attempt: Attempt, report: Finish) -> None:
        """An attempt ended, or the request did while none was granted."""
        if attempt.granted is None and self._reported is not None:
            self._left = report
        else:
            self._reported = attempt, report

    def begin_again(self, ref: int) -> Acquire:
        """Nothing of it is known any more: the question as it is asked now, under another reference."""
        assert self._asked is not None
        asked = msgspec.structs.replace(self._now(self._asked), ref=ref)
        self._reported = self._left = self._earlier = None
        return asked

    # ── what is told ─────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def is_stopping(self) -> bool:
        """Whether the engine of an attempt that was reported has not confirmed that it stopped."""
        ended = (self._reported, self._earlier)
        return any(each[0].granted is not None and each[0].stopped is None for each in ended if each is not None)

    def told(self, running: Attempt, record: GenerationRecord | None, *, first_output: bool) -> Sequence[Up]:
        """All of it. running: the last attempt; record: of its end, as the former coordinator decided it, if it did."""
        if self._asked is None:
            return ()
        now_ns = self._clock.monotonic_ns()
        attempt, finish = self._reported or (running, None)
        former = self._earlier
        reattach = Reattach(
            acquire=self._now(self._asked),
            run=attempt.told(now_ns, first_output=first_output),
            earlier=former[0].told(now_ns, first_output=False) if former is not None else None,
            lost=_used(former),
            finish=finish if record is None else _ended_as(record, finish, self._asked.ref),
            is_ended=record is not None,
        )
        attempts = (attempt,) if former is None else (former[0], attempt)
        in_doubt = [each.stopped for each in attempts if each.stopped is not None and not each.stopped.confirmed]
        left = [self._left] if self._left is not None and record is None else []
        return [reattach, *in_doubt, *left]

    def _now(self, asked: Acquire) -> Acquire:
        return later(asked, ceil_ms_from_ns(self._clock.monotonic_ns() - self._asked_ns))


def _used(former: tuple[Attempt, Finish] | None) -> AttemptUsage | None:
    return former[1].usage if former is not None else None


def _ended_as(record: GenerationRecord, finish: Finish | None, ref: int) -> Finish | None:
    """What was reported, with the end that the coordinator made of it."""
    reason = record.finish_reason
    if reason is None:
        return finish
    return msgspec.structs.replace(finish, reason=reason) if finish is not None else Finish(ref, 0, reason)
