"""Execute a few rounds of a loop whose rounds ask the allocator for the same, and repeat their events for the others.

A tile of an MLP, or a chunk of tokens before the head, makes the same allocations as the one before it, and no values
are computed here. The second round gives back what the first one left; every round after it repeats the second's
events. They are recorded once and repeated, stacks and tags included. All rounds are executed where the second does not
leave as much as it gives back, or does anything but take and give device memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from memprof.simulate.recorder.recorder import FakeRecorder
from memprof.simulate.recorder.round_log import LoggedAllocation, RoundLog

_EXECUTED = 3  # at most, until one is known to repeat the one before it


def identical_iterations(recorder: FakeRecorder, rounds: Sequence[slice]) -> Iterator[slice]:
    """Yield the rounds of a loop that are to be executed; repeat the events of those alike in length in between."""
    first: RoundLog | None = None
    pattern: _Pattern | None = None
    length = None
    for number, rows in enumerate(rounds):
        if pattern is not None and rows.stop - rows.start == length:
            pattern.repeat()
            continue
        if pattern is not None:
            pattern.settle()
            pattern = None
        blocks, noted = recorder.blocks, None
        if number < _EXECUTED and len(rounds) > 2 and blocks.round is None and blocks.rehearsal is None:
            noted = RoundLog()
        with contextlib.nullcontext() if noted is None else _logged(recorder, noted):
            yield rows
        if noted is not None and first is not None and rows.stop - rows.start == length:
            pattern = _Pattern.of(recorder, first, noted)
        first, length = noted, rows.stop - rows.start
    if pattern is not None:
        pattern.settle()


@contextlib.contextmanager
def _logged(recorder: FakeRecorder, log: RoundLog) -> Iterator[None]:
    """Log what is taken, given back and computed while open."""
    owners = recorder.blocks.owners
    claims = owners.claims if owners is not None else 0
    recorder.blocks.round = log
    recorder.work.also.append(log.work)
    try:
        yield
    finally:
        recorder.blocks.round = None
        recorder.work.also.remove(log.work)
        if owners is not None and owners.claims != claims:
            log.only_device = False


class _Pattern:
    """Hold a round's events, with what it takes by number: its own, and what the round before had left."""

    def __init__(
        self,
        recorder: FakeRecorder,
        steps: list[LoggedAllocation | tuple[bool, int]],
        left: dict[int, int],
        log: RoundLog,
    ) -> None:
        self._recorder, self._steps, self._log = recorder, steps, log
        self._left = left  # by number, where it is
        self._watches = {number: recorder.storages.watch_at(address) for number, address in left.items()}

    @classmethod
    def of(cls, recorder: FakeRecorder, first: RoundLog, second: RoundLog) -> _Pattern | None:
        """Make a pattern of two rounds; None where the second is not known to be one that goes on for ever."""
        before = {address: number for address, number in first.left.items() if address in second.given}
        left = {number: address for address, number in second.left.items()}
        if not second.only_device or len(second.given) != len(before):
            return None
        sizes = [second.sizes[number] for number in left]
        if [first.sizes[number] for number in before.values()] != sizes:
            return None
        if first.sizes == second.sizes:
            if list(before.values()) != list(left):
                return None
        elif len(set(sizes)) < len(sizes):
            return None  # which of the first round's is which of the second's?
        place = dict(zip(before, left, strict=True))
        steps = [
            step
            if isinstance(step, LoggedAllocation)
            else (False, place[step[0]])
            if step[1] is None
            else (True, step[1])
            for step in second.steps
        ]
        found = cls(recorder, steps, left, second)
        return found if all(watch is not None for watch in found._watches.values()) else None

    def repeat(self) -> None:
        """Take and give back what one more round does."""
        recorder, work = self._recorder, self._log.work
        if work.kernels or work.fused or work.host_bytes:
            recorder.work.add(work, 1)
        mine: dict[int, int] = {}
        count = 0
        for step in self._steps:
            if isinstance(step, LoggedAllocation):
                mine[count] = recorder.blocks.take(step.nbytes, step.stream, step.captured, step.tag)
                count += 1
            else:
                own, number = step
                recorder.blocks.release(mine.pop(number) if own else self._left[number])
        self._left = mine

    def settle(self) -> None:
        """Let the tensors that are alive stand for what the last round left."""
        for number, watch in self._watches.items():
            watch.address = self._left[number]
