"""Repeat a generation's decoding steps from the logs of a few of them: thousands of steps, none of which is executed.

A decoding step does what the step before did, with tensors that are one token longer. Two logged steps give every step
between them: sizes and shapes grow by the same number of elements at every token, and what kernels ask for beside their
results follows from the shapes. A quantised cache that quantises all of itself every so many tokens makes jumps, which
follow from the first and the last of them in the same way. The allocator's model runs each step
(:mod:`memprof.simulate.shortcuts.decoding.repeated_steps`); the trace holds the steps that were logged, and now and
then where the others' blocks lie.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from memprof.allocator.model import CachingAllocator
from memprof.simulate.recorder.decode_log import Given, Kernel, Logged, LoggedOwner, Rehearsal, Taken, Workspace
from memprof.simulate.recorder.flops import Tally
from memprof.simulate.recorder.recorder import FakeRecorder
from memprof.simulate.shortcuts.decoding.identical_steps import (
    BEFORE,
    KEPT,
    OWN,
    Jumps,
    PatternMismatch,
    Periods,
    StepSpan,
    kind,
)
from memprof.simulate.shortcuts.decoding.repeated_steps import repeat_periods, repeat_span

#: Steps around a jump that are executed: the one after it finds nothing unquantised, the third is like all others.
AROUND = range(-2, 4)


class DecodingLog(NamedTuple):
    """Hold the log of a few tokens generated after a prompt of ``prompt`` tokens: the prompt's forward, each token, and
    what follows the last. ``work`` is what each of these parts computes."""

    prompt: int
    rehearsal: Rehearsal
    work: list[Tally]


class _Rest(NamedTuple):
    """All is given back that is left of the prompt's forward, of the first token, and of what the last jump kept."""


@dataclass(frozen=True)
class Decoding:
    """Hold a whole generation: the logs of the steps that are known, by number, the spans between them, and the end.

    ``kept``: the places of what the prompt's forward (0) and each logged jump leave for the next jump. ``jumps`` are
    all of the generation's.
    """

    logs: dict[int, list[Logged]]
    spans: dict[int, StepSpan]
    end: list[Logged | _Rest]
    runs: tuple[DecodingLog, ...]
    kept: dict[int, list[int]]
    jumps: Jumps | None
    periods: Periods | None

    @property
    def repeated(self) -> int:
        """Count the steps that are in no log."""
        between = 0 if self.periods is None else self.periods.last - self.periods.first + 1
        return sum(span.last - span.first + 1 for span in self.spans.values()) + between

    def jump_work(self) -> list[tuple[Tally, Tally]]:
        """Return what each executed jump computes, and what the step before it does."""
        numbers = self.jumps.numbers if self.jumps is not None else range(0)
        found = []
        for run in self.runs:
            parts = (number - run.prompt + self.runs[0].prompt for number in numbers)
            found += [(run.work[part], run.work[part - 1]) for part in parts if 3 < part < len(run.work) - 1]
        return found


def learn(runs: Sequence[DecodingLog], tokens: int, jumps: Jumps | None = None) -> Decoding:
    """Put together a generation of ``tokens`` after the first run's prompt.

    ``jumps``: the steps that keep something for all steps up to the next of them.

    Raises:
        PatternMismatch: the steps between two runs cannot be read off these.
    """
    prompt = runs[0].prompt
    logs: dict[int, list[Logged]] = {}
    kept: dict[int, list[int]] = {}
    places: dict[int, dict[int, int]] = {}
    for run in runs:
        if not run.rehearsal.usable:
            raise PatternMismatch("it does more than take and give back memory")
        if run.rehearsal.alive:
            raise PatternMismatch("something that it made outlives it")
        offset = run.prompt - prompt
        places = _kept(run.rehearsal, {number - offset for number in jumps.numbers} if jumps is not None else set())
        kept |= {part + offset: list(found) for part, found in places.items() if part}
        if 0 in places and 0 not in kept:
            kept[0] = list(places[0]) if not offset else _alike(runs[0].rehearsal, run.rehearsal, places[0])
        for part in range(0 if run is runs[0] else 3, len(run.rehearsal.parts) - 1):
            logs[part + offset] = _placed(run.rehearsal.parts[part], part, run is runs[0], places)
    end = _end_of(runs[-1], runs[-1] is runs[0], places)
    periods = _periods(logs, jumps) if jumps is not None else None
    spans = {}
    for number, after in zip(sorted(logs), sorted(logs)[1:], strict=False):
        if after > number + 1 and (periods is None or number + 1 != periods.first):
            spans[number + 1] = _span(logs, number, after)
    logs = {n: log for n, log in logs.items() if n <= tokens}
    return Decoding(logs, spans, end, tuple(runs), kept, jumps, periods)


def _kept(rehearsal: Rehearsal, jumps: set[int]) -> dict[int, dict[int, int]]:
    """Find what the first part and each jump leave for the next jump: part -> place -> its number among those."""
    found: dict[int, list[int]] = {}
    for part, log in enumerate(rehearsal.parts):
        for entry in log:
            if isinstance(entry, Given) and (
                (entry.part == 0 and part in jumps) or (entry.part in jumps and part > entry.part + 1)
            ):
                found.setdefault(entry.part, []).append(entry.place)
    return {part: {place: number for number, place in enumerate(sorted(places))} for part, places in found.items()}


def _alike(first: Rehearsal, other: Rehearsal, places: dict[int, int]) -> list[int]:
    """Find what the first prompt's forward leaves for the first jump: as what another run's cache was filled with."""

    def looks(entry: Taken) -> tuple[object, ...]:
        return entry.stream, entry.born.dtype, entry.born.func, len(entry.born.shape)

    filled = [entry for entry in other.parts[0] if isinstance(entry, Taken)]
    wanted = [looks(filled[place]) for place in places]
    left = {entry.place for entry in first.parts[-1] if isinstance(entry, Given) and entry.part == 0}
    taken = [entry for entry in first.parts[0] if isinstance(entry, Taken)]
    found = [place for place in sorted(left) if looks(taken[place]) in wanted]
    if [looks(taken[place]) for place in found] != wanted:
        raise PatternMismatch("what the prompt's forward leaves behind cannot be told apart")
    return found


def _end_of(run: DecodingLog, first: bool, kept: dict[int, dict[int, int]]) -> list[Logged | _Rest]:
    """Return what follows the last token; a later run's first parts stand for those of the first run."""
    log, part = run.rehearsal.parts[-1], len(run.rehearsal.parts) - 1
    found: list[Logged | _Rest] = []
    for entry in log:
        if isinstance(entry, Given) and not first and (entry.part <= 1 or entry.place in kept.get(entry.part, {})):
            if not any(isinstance(known, _Rest) for known in found):
                found.append(_Rest())
        else:
            found += _placed([entry], part, first, kept)
    return found


def _placed(log: list[Logged], part: int, first: bool, kept: dict[int, dict[int, int]]) -> list[Logged]:
    """Say whose block is given back in terms that hold for every step."""
    found: list[Logged] = []
    for entry in log:
        if isinstance(entry, (Given, LoggedOwner)):
            whose, number = part - entry.part, kept.get(entry.part, {}).get(entry.place)
            if isinstance(entry, Given) and number is not None:
                whose, entry = KEPT, entry._replace(place=number)
            elif whose not in (OWN, BEFORE):
                if entry.part > 1 or not first:
                    raise PatternMismatch("what a step makes outlives the step after it")
                whose = -1 - entry.part
            entry = entry._replace(part=whose)
        found.append(entry)
    return found


def _span(logs: dict[int, list[Logged]], before: int, after: int) -> StepSpan:
    span = StepSpan(before + 1, after - 1, logs[before], logs[after])
    if [kind(entry) for entry in span.before] != [kind(entry) for entry in span.after]:
        raise PatternMismatch(f"token {before} and token {after} are not made in the same way")
    for row in span.rows:
        span.read(before, row)
    for known in (before - 1, after + 1):
        mine = [span.read(known, row) for row in span.rows if isinstance(row[0], Taken)]
        if known in logs and [entry.born.nbytes for entry in mine] != _sizes(logs[known]):
            raise PatternMismatch(f"tensors do not grow evenly from token {before} to token {after}")
    return span


def _periods(logs: dict[int, list[Logged]], jumps: Jumps) -> Periods | None:
    """Read off the steps between the first and the last jump, and hold them against those that are known.

    Return None where no jump lies between two that are known, so that spans are enough.
    """
    whole = [n for n in jumps.numbers if all(n + offset in logs for offset in AROUND)]
    if len(whole) < 2 or whole[-1] - whole[0] <= jumps.length:
        return None
    between = Jumps(whole[0], jumps.length, (whole[-1] - whole[0]) // jumps.length + 1)
    first, last = ({offset: logs[number + offset] for offset in AROUND} for number in (whole[0], whole[-1]))
    alike = [(first[offset], last[offset]) for offset in AROUND] + [(first[AROUND[0]], first[AROUND[-1]])]
    if any([kind(entry) for entry in one] != [kind(entry) for entry in other] for one, other in alike):
        raise PatternMismatch(f"token {whole[0]} and token {whole[-1]} are not made in the same way")
    periods = Periods(between, first, last)
    for offset in AROUND:
        for row in periods.rows(offset):
            periods.read(between.numbers[1] + offset, row)
    for number in (whole[0] + AROUND[-1] - 1, whole[-1] + AROUND[0] + 1):
        mine = [periods.read_inner(number, row) for row in periods.inner_rows if isinstance(row[0], Taken)]
        if [entry.born.nbytes for entry in mine] != _sizes(logs[number]):
            raise PatternMismatch(f"tensors do not grow evenly from token {whole[0]} to token {whole[-1]}")
    return periods


def _sizes(log: list[Logged]) -> list[int]:
    return [entry.born.nbytes for entry in log if isinstance(entry, Taken)]


class Player:
    """Repeat a generation on a recorder's device: ``whole``, or of each span of repeated steps the last one only."""

    def __init__(self, recorder: FakeRecorder, decoding: Decoding, *, whole: bool = True) -> None:
        self._recorder, self._whole = recorder, whole
        self._decoding = decoding
        self._first: list[dict[int, int]] = []  # addresses of the first two steps' blocks, by place
        self._before: dict[int, int] = {}
        self._kept: dict[int, int] = {}  # addresses of what the last jump kept, by number

    def play(self) -> None:
        """Take and give back what the whole generation does.

        Raises:
            OutOfMemory: the simulated device is full.
        """
        decoding = self._decoding
        last = max(decoding.logs)
        number = 0
        while number <= last:
            span = decoding.spans.get(number)
            if decoding.periods is not None and number == decoding.periods.first:
                self._repeat_periods(decoding.periods)
                number = decoding.periods.last + 1
            elif span is None:
                self._tell(decoding.logs[number], decoding.kept.get(number))
                number += 1
            else:
                self._repeat(span)
                number = span.last + 1
        self._tell(decoding.end)

    def _tell(self, log: Sequence[Logged | _Rest], keeps: Sequence[int] | None = None) -> None:
        """Do what a log says, and let the trace tell it; ``keeps``: the places of what it leaves for the next jump."""
        blocks, kernels = self._recorder.blocks, self._recorder.kernels
        own: dict[int, int] = {}
        place = 0
        for entry in log:
            if isinstance(entry, Taken):
                own[place] = blocks.take(entry.born.nbytes, entry.stream, entry.captured, blocks.tag_of(entry.born))
                place += 1
            elif isinstance(entry, Given):
                blocks.release(self._of(entry.part, own).pop(entry.place))
            elif isinstance(entry, LoggedOwner):
                address = self._of(entry.part, own)[entry.place]
                blocks.claim(address, entry.category, entry.detail, entry.name)
            elif isinstance(entry, Kernel):
                kernels.run(entry)
            elif isinstance(entry, Workspace):
                kernels.claim_workspace()
            elif isinstance(entry, _Rest):
                self._give_back_rest()
        if keeps is not None:
            self._kept = {number: own.pop(place) for number, place in enumerate(keeps)}
        if len(self._first) < 2:
            self._first.append(own)
        self._before = own

    def _give_back_rest(self) -> None:
        for blocks in (*self._first, self._kept):
            for address in blocks.values():
                self._recorder.blocks.release(address)
            blocks.clear()

    def _of(self, whose: int, own: dict[int, int]) -> dict[int, int]:
        near = {OWN: own, BEFORE: self._before, KEPT: self._kept}
        return near[whose] if whose in near else self._first[-1 - whose]

    def _repeat(self, span: StepSpan) -> None:
        if not self._whole or not isinstance(self._recorder.allocator, CachingAllocator):
            # Without an allocator a block is what was asked for: the span's last step leaves what all of them leave.
            self._tell([span.read(span.last, row) for row in span.rows])
            return
        repeat_span(self._recorder, self._recorder.allocator, span, self._before)

    def _repeat_periods(self, periods: Periods) -> None:
        """Repeat the steps between the first and the last jump; or the last but one jump, and the last step."""
        jumps = periods.jumps
        keeps = self._decoding.kept[jumps.first]
        if self._whole and isinstance(self._recorder.allocator, CachingAllocator):
            repeat_periods(self._recorder, self._recorder.allocator, periods, self._before, self._kept, keeps)
            return
        for offset in AROUND:
            log = [periods.read(jumps.numbers[-2] + offset, row) for row in periods.rows(offset)]
            self._tell(log, None if offset else keeps)
        self._tell([periods.read_inner(periods.last, row) for row in periods.inner_rows])
