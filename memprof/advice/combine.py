"""Find changes that together make a run fit a GPU: guided by estimates, confirmed by simulation.

A run that cannot be simulated is answered by estimates alone, and the answer says so.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec

from memprof.advice.candidate import Candidate
from memprof.advice.estimate import Estimate, estimate
from memprof.advice.evaluate import run_of_row
from memprof.advice.ranking import MARGIN
from memprof.advice.recorded_run import AdvisedRun, PhaseMaximum, bounded, run_of
from memprof.config.fits import fits, margin_of
from memprof.config.gpus import find_gpu
from memprof.config.settings import Settings
from memprof.errors import UsageError
from memprof.report import Report
from memprof.report.advice import Combination, CombinedChange
from memprof.vocabulary import History, Phase

if TYPE_CHECKING:
    from memprof.analysis.views import Views
    from memprof.plan.simulations import SimulatedRow
    from memprof.plan.subprocess_runner import Runner

_ROUNDS = 10
# Of the changes that save at least this share of what the best one saves, the one that asks for least is taken.
_NEAR = 0.5
# A change that brings less than this share of the device's memory is not worth having in a set.
_LITTLE = 0.01


@dataclass(frozen=True)
class _State:
    """Settings with the changes that led there, and their simulation."""

    settings: Settings
    row: SimulatedRow
    changes: tuple[Candidate, ...]


class _Search:
    def __init__(self, machine: Runner, gpu: str, like: AdvisedRun, shift: int, more_time: Callable[[], bool]) -> None:
        self._machine, self._like, self._more_time = machine, like, more_time
        self.card, self.shift = find_gpu(gpu), shift
        self._spent: set[str] = set()

    def need(self, row: SimulatedRow) -> int:
        return (row.device_peak_bytes or 0) + self.shift

    def margin(self, state: _State) -> float:
        """Return the safety margin above the prediction: more where a part of the run was never compared."""
        return margin_of(state.settings.known, self.card)

    def fits(self, state: _State) -> bool:
        # Where the allocator has to give cached memory back, the simulation on the full card decides.
        if not self.shift:
            return bool(state.row.fits)
        return fits(self.need(state.row), self.card.total_bytes, self.margin(state))

    def simulate(self, settings: Settings, changes: tuple[Candidate, ...]) -> _State | None:
        row = self._machine.run_each([settings], {})[0]
        return None if row is None else _State(settings, row, changes)

    def step(self, state: _State) -> _State | None:
        """Take one more change and simulate it; None where no change is left that helps."""
        while self._more_time() and (choice := self._choice(state)) is not None:
            self._spent.add(choice.setting)
            tried = self._with(state, choice)
            if tried is None:
                continue
            if self.fits(tried) or self.need(state.row) - self.need(tried.row) > _LITTLE * self.card.total_bytes:
                return tried
        return None

    def _with(self, state: _State, choice: Candidate) -> _State | None:
        try:
            settings = state.settings.with_(**choice.changes)
        except UsageError:
            return None
        return self.simulate(settings, (*state.changes, choice))

    def _choice(self, state: _State) -> Candidate | None:
        """Choose the cheapest change that is enough; else the cheapest of those that save much."""
        run = run_of_row(state.row, self._like, state.settings)
        found = [e for e in estimate(run) if e.candidate.changes and e.candidate.setting not in self._spent]
        open_ = [e for e in found if e.saves]
        if not open_:  # what only a simulation can judge is tried last
            return next((e.candidate for e in found if e.saves is None and not e.candidate.device), None)
        over = self.need(state.row) * (1 + self.margin(state)) - self.card.total_bytes
        enough = [e for e in open_ if int(e.saves or 0) > 1.1 * over]
        if enough:
            return min(enough, key=_asks).candidate
        best = max(int(e.saves or 0) for e in open_)
        return min((e for e in open_ if int(e.saves or 0) >= _NEAR * best), key=_asks).candidate

    def pruned(self, state: _State, base: Settings) -> _State:
        """Drop every change that is not needed, the most costly first."""
        for spare in sorted(state.changes, key=lambda c: -c.cost_rank):
            if len(state.changes) < 2:
                break
            kept = tuple(c for c in state.changes if c.id != spare.id)
            settings = _applied(base, kept)
            tried = self.simulate(settings, kept) if settings is not None else None
            if tried is not None and self.fits(tried):
                state = tried
        return state


def combine(
    base: Settings,
    gpu: str,
    machine: Runner,
    like: AdvisedRun,
    *,
    shift: int = 0,
    seconds: float = 600.0,
    clock: Callable[[], float] = time.monotonic,
) -> Combination:
    """Add changes until the run fits, then leave out what is not needed.

    Args:
        base: the unchanged run, on CUDA.
        gpu: name or size of the card; ``machine`` must simulate on it.
        like: the recorded run, for its model's shape.
        shift: bytes the recorded run held on its device beyond its own simulation.

    Raises:
        InputError, UsageError: the unchanged run cannot be simulated.
    """
    start = clock()
    search = _Search(machine, gpu, like, shift, lambda: clock() - start <= seconds)
    first = _State(base, machine.run([base])[0], ())
    state = first
    for _ in range(_ROUNDS):
        if search.fits(state):
            break
        following = search.step(state)
        if following is None:
            break
        state = following
    if search.fits(state):
        state = search.pruned(state, base)
    return _combination(
        gpu=search.card.name,
        total_bytes=search.card.total_bytes,
        fits=search.fits(state),
        before_bytes=search.need(first.row),
        after_bytes=search.need(state.row),
        shift_bytes=shift,
        margin=search.margin(state),
        phase=state.row.peak_phase,
        changes=_final(state),
        settings=state.settings,
    )


def _combination(
    *,
    gpu: str,
    total_bytes: int,
    fits: bool,
    before_bytes: int,
    after_bytes: int,
    shift_bytes: int,
    margin: float,
    phase: Phase,
    changes: Sequence[Candidate],
    settings: Settings | None,
    unseen: str = "",
) -> Combination:
    """Describe the chosen changes in order, and the result of all together.

    Args:
        settings: the changed run; without them the figures are estimates from recorded sizes.
        unseen: what the recording lacks.
    """
    found = Combination(
        gpu=gpu,
        total_bytes=total_bytes,
        fits=fits,
        before_bytes=before_bytes,
        after_bytes=after_bytes,
        shift_bytes=shift_bytes,
        margin=margin,
        phase=phase,
        changes=tuple(
            CombinedChange(id=c.id, action=c.action, setting=c.setting, costs=c.costs, exact=c.exact) for c in changes
        ),
        settings=settings.to_dict() if settings else {},
        basis="simulated" if settings else "estimated",
        sentence="",
    )
    return msgspec.structs.replace(found, sentence=_sentence(found, unseen))


def _sentence(found: Combination, unseen: str) -> str:
    """Say whether the run fits, and with what."""
    from memprof.units import format_gib

    before, after, total = (format_gib(n) for n in (found.before_bytes, found.after_bytes, found.total_bytes))
    simulated = found.basis == "simulated"
    what = f"{after} GiB of {total} GiB on {found.gpu}"
    how = "simulated together" if simulated else f"estimated with {found.margin:.0%} margin, not simulated"
    more = f" {unseen}" if unseen else ""
    if not found.fits:
        words = f"the run needs {before} GiB; with the changes that save most it needs {what}"
        return f"Nothing found that fits: {words}{'' if simulated else f' ({how})'}.{more}"
    if not found.changes:
        who = "It" if simulated else "What was recorded"
        return f"{who} fits as it is: {what}{'' if simulated else f' ({how})'}.{more}"
    many = f"{len(found.changes)} changes make" if len(found.changes) > 1 else "One change makes"
    return f"{many} it fit: {what} instead of {before} GiB, {how}.{more}"


def combine_estimates(report: Report, gpu: str, analysis: Views | None = None) -> Combination:
    """Add estimated changes until the recorded run fits a card with a margin, for a run that cannot be simulated.

    Gaps between blocks and memory outside torch are assumed to stay as recorded; a request that failed is added.
    """
    card, run = find_gpu(gpu), run_of(report, analysis)
    outside = report.device_peak.non_torch_bytes
    outside = card.context_bytes if outside is None else outside
    reserved = max(report.peak.reserved_bytes or 0, report.device_peak.reserved_bytes or 0)
    failed = 0 if report.oom is None else report.oom.requested_bytes
    beyond = max(0, reserved - report.peak.active_bytes) + outside + failed
    before, changes = run.peak.bytes + beyond, list[Candidate]()
    while not fits(run.peak.bytes + beyond, card.total_bytes, MARGIN):
        taken = {change.id for change in changes}
        open_ = [e for e in estimate(run) if e.saves and e.candidate.id not in taken and not e.candidate.device]
        best = max((int(e.saves or 0) for e in open_), default=0)
        if best <= _LITTLE * card.total_bytes:
            break
        choice = min((e for e in open_ if int(e.saves or 0) >= _NEAR * best), key=_asks).candidate
        run, changes = _lowered(run, choice), [*changes, choice]
    after = run.peak.bytes + beyond
    return _combination(
        gpu=card.name,
        total_bytes=card.total_bytes,
        fits=fits(after, card.total_bytes, MARGIN),
        before_bytes=before,
        after_bytes=after,
        shift_bytes=0,
        margin=MARGIN,
        phase=run.peak.phase,
        changes=changes,
        settings=None,
        unseen=_unseen(report),
    )


def _unseen(report: Report) -> str:
    """Say what a recording lacks, so that the run may need more than it shows."""
    if report.source.history == History.NONE:
        return "The file shows one moment; the run's peak may be higher."
    if report.source.history == History.TRUNCATED or report.oom is not None:
        return "The recording does not show the whole run, which may need more."
    ended = any(span.phase == Phase.OPTIMIZER_STEP for span in report.phases)
    return "" if ended else "The recording has no optimizer step, which may need more."


def _lowered(run: AdvisedRun, change: Candidate) -> AdvisedRun:
    """Return the run with a change's estimate subtracted from every phase's peak."""
    peaks = []
    for peak in run.peaks:
        saved = bounded(peak, change.effect(run, peak)) if change.effect else {}
        left = {name: n - saved.get(name, 0) for name, n in peak.categories.items()}
        peaks.append(PhaseMaximum(peak.phase, peak.bytes - sum(saved.values()), left))
    return replace(run, peaks=tuple(peaks))


def _asks(found: Estimate) -> tuple[int, int]:
    return found.candidate.cost_rank, -int(found.saves or 0)


def _applied(base: Settings, changes: tuple[Candidate, ...]) -> Settings | None:
    """Apply all changes to the unchanged settings; None where they contradict each other."""
    settings = base
    try:
        for change in changes:
            settings = settings.with_(**change.changes)
    except UsageError:
        return None
    return settings


def _final(state: _State) -> list[Candidate]:
    """List the changes; a later one of the same settings replaces an earlier one."""
    kept: list[Candidate] = []
    for change in state.changes:
        kept = [*(c for c in kept if not set(c.changes) <= set(change.changes)), change]
    return kept
