"""Write a report's headline: the verdict, its cause with the places that hold it, what to do, what was assumed.

Every renderer draws these sentences as they are and writes none of its own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from msgspec.structs import replace

from memprof.analysis.allocations.places import largest_places, listed_places, place_of
from memprof.analysis.peaks.device_balance import uneven_devices
from memprof.analysis.peaks.next_step import next_step
from memprof.report import Report
from memprof.report.advice import Advice, Headline, Place
from memprof.report.allocations import Finding
from memprof.report.base import known
from memprof.report.run import KnownSettings, OutOfMemory, Source
from memprof.units import GIB, amount, format_bytes, gib, percent
from memprof.vocabulary import CATEGORY_LABELS, Category, History, Kind, Phase, phase_words

if TYPE_CHECKING:
    from memprof.report.comparison import ComparedCapacity, ComparedCategory, ComparedGroup, ComparedRun, Comparison
    from memprof.report.simulation import Fit

    _Compared = ComparedCategory | ComparedGroup

# Categories that are in use in every phase; the others come and go.
_STANDING = {
    Category.WEIGHTS, Category.ADAPTERS, Category.REFERENCE_MODEL, Category.REWARD_MODEL, Category.VALUE_MODEL,
    Category.OPTIMIZER_STATE, Category.INFERENCE_ENGINE, Category.WORKSPACE,
}  # fmt: skip
# Name what comes and goes beside what stays, from this share of the peak on.
_WORTH = 0.05
# Where all named places hold less than this share of their category, write that there are many.
_TELLING = 0.25
# With this share of the card left a run fits with room: nothing has to change.
_ROOMY = 0.25
_LABELS = {category: label[:1].lower() + label[1:] for category, label in CATEGORY_LABELS.items()}
_LABELS[Category.KV_CACHE] = CATEGORY_LABELS[Category.KV_CACHE]
_PEAK = {Kind.TRACE: "Peak tensor memory", Kind.SIMULATED: "Simulated peak"}
# A category that gives this share of what a change saves is named with it.
_MUCH = 0.25
# Name the memory that lies idle from this share of what is reserved on, where it is worth naming at all.
_IDLE = 0.2
_IDLE_BYTES = GIB // 4
# Workspaces that are this share of the peak leave nothing to change.
_FIXED = 0.8
# A category whose lines are known is named beside guessed ones from this share of the peak on.
_KNOWN = 0.1
# With this share of the peak unattributed, no category is named.
_UNKNOWN = 0.9
# Next to next to nothing, how many times as much says nothing.
_MANY_TIMES = 1000
# Call a category guessed where at least this share of it is.
_GUESSED = 0.5


def with_headline(report: Report) -> Report:
    """Return the report with its headline written anew, as after its advice or its capacity changed."""
    return replace(report, headline=headline_of(report))


def headline_of(report: Report, places: Sequence[Place] | None = None) -> Headline:
    """Return the headline of a report.

    Args:
        report: the report, with its advice.
        places: where :func:`named_category` was allocated (see :mod:`memprof.analysis.allocations.places`); default:
            those of the report's headline, else of the allocations that it lists.
    """
    peak = report.peak
    category = named_category(report)
    if places is None and category is not None:
        whole = peak.categories.get(category, 0)
        known = report.headline.places if report.headline is not None else ()
        # Another first change may name another category: a place's share tells which it is of.
        if known and all(abs(place.bytes - place.share * whole) <= 1e-4 * whole for place in known):
            places = known
        else:
            places = listed_places(peak.largest or peak.allocations, category, whole)
    places = tuple(places or ())
    return Headline(
        verdict=_verdict(report),
        cause=_cause(report, category, places),
        places=places,
        action=_action(report),
        assumed=tuple(_assumed(report)),
    )


def _assumed(report: Report) -> list[str]:
    """List what was assumed where a simulated run's settings leave it open, or to simulate a recorded run for its
    advice; last, what a card named by its size is taken for.
    """
    words = list(report.unchanged.assumed) if report.unchanged is not None else []
    if report.source.kind == Kind.SIMULATED:
        from memprof.config.trl_arguments import assumed_words

        words = assumed_words(KnownSettings.of(report.source.config))
    judged = [part.gpu for part in (report.fit, report.combination) if part is not None]
    if not judged:
        return words
    from memprof.config.gpus import size_words

    return [*words, *filter(None, dict.fromkeys(map(size_words, judged)))]


def named_category(report: Report) -> Category | None:
    """Return the category whose places the cause names: what the first change takes most of; without one, the largest
    that comes and goes, where that holds enough.
    """
    held = _held(report)[0]
    if not held:
        return None
    if taken := _taken(report, held):
        return taken[-1]
    passing = {c: n for c, n in held.items() if c not in _STANDING}
    largest = max(held, key=lambda c: held[c])
    found = max(passing, key=lambda c: passing[c], default=largest)
    return found if held[found] >= _WORTH * report.peak.active_bytes else largest


def _held(report: Report) -> tuple[dict[Category, int], str]:
    """Return the bytes of each category at the moment that the headline is about, and what to call that moment."""
    if (following := next_step(report)) is not None:
        return dict(following.categories), f"these {gib(following.peak_bytes)} GiB"
    whole = "it" if is_dump(report.source) else "the peak"
    return {category: n for category, n in report.peak.categories.items() if n}, whole


def _taken(report: Report, held: Mapping[Category, int]) -> list[Category]:
    """Return the categories that the first change lowers much, the most last: the cause names the same bytes."""
    takes = (report.advice[0].takes or {}) if report.advice else {}
    much = [c for c, n in takes.items() if c in held and n >= _MUCH * sum(takes.values())]
    return sorted(much, key=lambda c: takes[c])


def missing_bytes(oom: OutOfMemory) -> int:
    """Return what was missing when memory ran out, for the request or the whole step; 0 where only pieces were free."""
    short = _short_bytes(oom)
    if oom.device_free_bytes is None or oom.fits_defragmented:
        return short
    return max(short, oom.requested_bytes - _room(oom))


def _short_bytes(oom: OutOfMemory) -> int:
    """Return what was missing for the whole step; 0 where that is not known."""
    ahead = known(oom.ahead)
    return 0 if ahead is None else ahead.short_bytes or 0


def _room(oom: OutOfMemory) -> int:
    """Return the bytes that torch could still have taken: a limit of the process counts what it has reserved."""
    free, limit = oom.device_free_bytes or 0, known(oom.limit_bytes)
    if limit is None:
        return 0 if oom.limited else free
    return min(free, max(0, limit - (known(oom.reserved_bytes) or 0)))


# ---- verdict ---------------------------------------------------------------------------------------------------------


def peak_words(source: Source) -> str:
    """Name the peak by what was recorded; without a history it is not known how high memory went."""
    if is_dump(source):
        return "Allocated at the dump"
    return _PEAK.get(source.kind, "Peak allocated memory")


def is_dump(source: Source) -> bool:
    """Tell whether only one instant is known; a dump of 2023 or 2024 may hold a single event, a block given back."""
    return source.history == History.NONE or (source.history != History.COMPLETE and source.events < 2)


def peak_phase(report: Report) -> Phase | None:
    """Return the phase of the peak; None where nothing tells one phase from another."""
    phase, known_by = report.peak.phase, report.source.phases_known_by
    told_apart = known_by == "marks" or any(p.phase != Phase.OTHER for p in report.phases)
    return phase if phase != Phase.OTHER or (told_apart and known_by != "none") else None


def _where(phase: Phase | None, step: int | None) -> str:
    known = phase_words(phase).lower() if phase else "an unknown phase"
    return f"{known}, step {step}" if step is not None else known


def _in(phase: Phase | None, step: int | None) -> str:
    """Write where something happened; "" where no phase is known."""
    return f" in {_where(phase, step)}" if phase else ""


def _verdict(report: Report) -> str:
    if oom := report.oom:
        return _out_of_memory(oom)
    source, peak = report.source, report.peak
    if fit := report.fit:
        return _judged(fit)
    held = f"{amount(peak.allocated_bytes)}{_in(peak_phase(report), peak.step)}"
    words = f"{peak_words(source)}: {held}"
    capacity = _capacity(report)
    words += f", {percent(peak.allocated_bytes, capacity)} of the device" if capacity else ""
    if is_dump(source):
        return f"{words}; the peak before it is not known"
    most = report.device_peak.reserved_bytes or 0
    if _idle(most, peak.active_bytes) and not _handed_back(report):
        words += f"; {gib(most)} GiB reserved at most"
    return words + _from_the_next_step(report)


def _from_the_next_step(report: Report) -> str:
    """Say how high a phase rises in the next step, where the only step seen makes the optimizer's state."""
    if (following := next_step(report)) is None:
        return ""
    phase, needed = following.phase, following.peak_bytes
    return f"; about {amount(needed)} in {_where(phase, None)} from the next step on, beside the optimizer's state"


def _judged(fit: Fit) -> str:
    """Write a simulation's verdict, with its reason where the need alone does not explain it."""
    need, total = fit.needed_bytes, fit.total_bytes
    words = f"{fit.gpu}: needs {gib(need)} of {gib(total)} GiB"
    if fit.fits:
        how = ", because cached memory is freed when the GPU is full" if fit.flushes else ""
        return f"Fits {words}{how}"
    if need > total:
        return f"Does not fit {words}"
    if need > fit.limit_bytes:
        return f"Does not fit {words}, and {100 * fit.margin:.0f}% is kept as a margin"
    host, variants = fit.host, fit.ensemble
    if host is not None and host.fits is False:
        return f"Does not fit: the host needs {gib(host.needed_bytes)} of {gib(host.total_bytes or 0)} GiB"
    if variants is not None and variants.failed:
        return f"Does not fit {words}, and {variants.failed} of {variants.members} variants of the run need more"
    return f"Does not fit {words}"


def _capacity(report: Report) -> int | None:
    """Return the bytes of the card; None where it is not known, or for a tensor trace, which reserves nothing."""
    if report.peak.reserved_bytes is None:
        return None
    return report.capacity.bytes if report.capacity is not None else report.source.device_total_bytes


def _out_of_memory(oom: OutOfMemory) -> str:
    where = _in(None if oom.phase == Phase.OTHER else oom.phase, oom.step)
    asked = format_bytes(oom.requested_bytes) if oom.requested_bytes else ""
    if missing := missing_bytes(oom):
        whole = " for the whole step" if missing == _short_bytes(oom) else ""
        return f"Out by {amount(missing)}{whole}{where}"
    if oom.fits_defragmented and asked:
        return f"Out of memory{where}: {asked} would have fitted in one contiguous block"
    return f"Out of memory{where}" + (f": {asked} did not fit" if asked else "")


# ---- cause -----------------------------------------------------------------------------------------------------------


def _cause(report: Report, category: Category | None, places: Sequence[Place]) -> str:
    """Say what explains most; then name the largest category, and the ones that the first change takes from."""
    held, whole = _held(report)
    if category is None:
        return "Nothing was allocated."
    unknown = held.get(Category.UNATTRIBUTED, 0)
    if unknown > _UNKNOWN * sum(held.values()):
        where = f": {_places(places)}" if places else ""
        return f"The purpose of {amount(unknown)} ({percent(unknown, sum(held.values()))}) is unknown{where}."
    peak, active = report.peak, sum(held.values())
    largest = max(held, key=lambda c: held[c])
    named = list(dict.fromkeys([largest, *_taken(report, held), category]))
    named = [c for c in named if c != category] + [category]
    beside = _to_half(held, named, active)
    parts = [f"{amount(held[c])} of {_label(c)} ({percent(held[c], active)})" for c in (*named, *beside)]
    parts[0] = f"{parts[0][:-1]} of {whole})"
    of_it = "" if len(named) == 1 else f" of the {_label(named[-1])}"
    made = f", {_places(places, of_it)}" if places else ""
    more = f"; also {_and(parts[len(named) :])}" if beside else ""
    sentence = f"{_explained(report)}{_and(parts[: len(named)])}{made}{more}.{_known_beside(report, (*named, *beside))}"
    counted = peak.guessed
    told = [c for c in (*named, *beside) if c != Category.UNATTRIBUTED]
    if _handed_back(report):
        sentence += f" {_idle_words(report)}".rstrip()
    if guessed := [_label(c) for c in told if counted.get(c, 0) >= _GUESSED * held[c]]:
        sentence += f" Inferred: {_and(guessed)}."
    if waiting := peak.pending_free_bytes:
        sentence += f" {gib(waiting)} GiB more were freed by the program and wait for a stream: phases, shares and the"
        sentence += f" total, {gib(peak.active_bytes)} GiB, count them."
    return sentence


def _and(parts: Sequence[str]) -> str:
    return f"{', '.join(parts[:-1])} and {parts[-1]}" if len(parts) > 1 else "".join(parts)


def _known_beside(report: Report, told: Sequence[Category]) -> str:
    """Name the largest category whose lines are known, where all that is named of a dump is guessed."""
    peak, counted = report.peak, report.peak.guessed
    held = {c: n for c, n in peak.categories.items() if n >= _KNOWN * peak.active_bytes}
    guessed = {c for c, n in held.items() if counted.get(c, 0) >= _GUESSED * n}
    rest = sorted(set(held) - guessed - set(told) - {Category.UNATTRIBUTED}, key=lambda c: -held[c])
    if not rest or not guessed.issuperset(told) or not is_dump(report.source):
        return ""
    places = listed_places(peak.largest, rest[0], held[rest[0]])
    share = percent(held[rest[0]], peak.active_bytes)
    return f" {amount(held[rest[0]])} of {_label(rest[0])} ({share}), {_places(places)}." if places else ""


def _explained(report: Report) -> str:
    """Say what explains at least half of a category, or what the first change is about; "" where nothing does."""
    peak, words = report.peak, uneven_devices(report, missing_bytes(report.oom)) if report.oom else ""
    first = report.advice[0].id if report.advice else ""
    for found in peak.findings:
        is_first = first in (found.kind, "kept_by_passes")
        if not is_first and found.bytes < peak.categories.get(found.category, 0) / 2:
            continue
        words += _EXPLAINED[found.kind](found, percent(found.bytes, peak.active_bytes))
    return words + ("" if _handed_back(report) else _idle_words(report))


def _idle_words(report: Report) -> str:
    """Say how much of what is reserved lies idle, where it is much: at a dump, or when most was reserved."""
    peak, device = report.peak, report.device_peak
    if is_dump(report.source):
        reserved = peak.reserved_bytes or 0
        if not (idle := _idle(reserved, peak.active_bytes)):
            return ""
        words = f"{gib(idle)} of the {gib(reserved)} GiB reserved are idle "
        words += f"({percent(idle, reserved)}): more was allocated before, or requests do not fit the gaps. "
        return words
    most, used = device.reserved_bytes, device.active_bytes
    if most is None or used is None or not _idle(most, peak.active_bytes):
        return ""
    if _handed_back(report):
        now = gib(peak.reserved_bytes or 0)
        return f"{gib(most)} GiB were reserved before the peak and handed back: {now} are reserved at it. "
    return f"Of the {gib(most)} GiB reserved at most, {gib(most - used)} were idle then. "


def _handed_back(report: Report) -> bool:
    """Tell whether torch gave much of the reserved memory back before the peak, so that it does not lie idle there."""
    peak, device = report.peak, report.device_peak
    if device.reserved_bytes is None or (device.time_us or 0) >= peak.time_us:
        return False
    return _idle(device.reserved_bytes, peak.reserved_bytes or 0) > 0


def _left_over(found: Finding, share: str) -> str:
    place = ":".join(_file_and_line(found.frame))
    passes = "the pass before" if found.passes == 1 else f"{found.passes} passes"
    words = f"{amount(found.bytes)} of {_label(found.category)} ({share}), allocated at {place}"
    words += f"{' with what they hold' if found.holds_bytes else ''}, are left from {passes}"
    return f"{words}, freed only when the next had made its own. " if found.passes == 1 else f"{words}. "


def _two_copies(found: Finding, share: str) -> str:
    words = "Each size of weight is there an even number of times"
    if found.frame:
        place = ":".join(_file_and_line(found.frame))
        each = f"ran once for each of two copies, {amount(found.bytes)} each. "
        return f"{words}, made by the same line: {place} {each}"
    return f"{words}: these may be two copies of one model (or one and its gradients), {amount(found.bytes)} each. "


def _brief_workspace(found: Finding, share: str) -> str:
    return f"{amount(found.bytes)} ({share}) are workspace that a convolution's plan allocates while it runs. "


_EXPLAINED = {"left_over": _left_over, "two_copies": _two_copies, "brief_workspace": _brief_workspace}


def _idle(reserved: int | None, active: int) -> int:
    """Return the bytes reserved and not in use, where they are much; 0 elsewhere."""
    idle = (reserved or 0) - active
    return idle if idle >= _IDLE_BYTES and idle > _IDLE * (reserved or 0) else 0


def _to_half(held: Mapping[Category, int], named: Sequence[Category], active: int) -> list[Category]:
    """Return up to two of the next largest categories, where those named hold less than half of the peak."""
    found: list[Category] = []
    for category in sorted(held, key=lambda c: -held[c]):
        if sum(held[c] for c in (*named, *found)) >= active / 2 or len(found) == 2:
            break
        if category not in named and held[category] >= _WORTH * active:
            found.append(category)
    return found


def _label(category: Category) -> str:
    return _LABELS[category]


def _places(places: Sequence[Place], of_it: str = " of it") -> str:
    """Write ``6.00 GiB of it in softmax (nn_utils.py:6) and 3.05 GiB in forward (:181)``: sizes add up to the whole.

    A file is named once where places follow each other in it.
    """
    of_it = of_it or " of it"
    if sum(place.share for place in places) < _TELLING:
        whose = of_it.removeprefix(" of ") if of_it != " of it" else ""
        return f"{whose} from many places, at most {amount(places[0].bytes)} from one".lstrip()
    words: list[str] = []
    before = ""
    for place in places:
        file, line = _file_and_line(place.frame)
        found = f"{'' if file == before else file}:{line}"
        function = _function(place.frame)
        inside = f"in {function} ({found})" if function else f"from {found}"
        words.append(f"{amount(place.bytes)}{'' if words else of_it} {inside}")
        before = file
    return _and(words)


def _function(frame: str) -> str:
    """Return the function of ``file:line function``; "" where the frame names none, or a lambda or module."""
    found = re.match(r".*?:\d+ ([\w.]+)$", frame, re.DOTALL)
    return found[1] if found else ""


def _file_and_line(frame: str) -> tuple[str, str]:
    found = re.match(r"(.*):(\d+)(?: |$)", frame, re.DOTALL)
    path, line = found.groups() if found else (frame, "?")
    return re.split(r"[/\\]", path)[-1], line


# ---- action ----------------------------------------------------------------------------------------------------------


def _action(report: Report) -> str:
    """Name the change to begin with, row 1 of the advice; where the run fits easily, say that nothing has to change."""
    if not report.advice:
        return _nothing_to_change(report)
    if spare := _to_spare(report):
        return spare
    first = report.advice[0]
    how = "simulated" if first.basis == "simulated" else "an estimate"
    stays = "gradients stay" if report.own_peaks.get(Category.GRADIENTS) else "results stay"
    # One of two changes is right, and the other is not: nothing is promised of both, and the saving is the first's.
    either = first.action.startswith("If this run only infers")
    same = f"; {stays} the same" if first.exact and not either else ""
    action = first.action[:1].lower() + first.action[1:]
    enough = f" {first.enough_words}" if first.enough_words else ""
    most = "at most " if first.id == "brief_workspace" else ""
    saves = most + amount(first.saves_bytes) + _of_whole_step(first, report)
    how_to = (first.setting or "").split("  #")[0].removesuffix(": ...")
    setting = f" How: {how_to}." if how_to else ""
    it = "In inference it" if either else "It"
    words = f"Try first: {action}. {it} saves {saves} ({how}{same}).{enough}{setting}"
    return _from_a_dump(report, words) if is_dump(report.source) else words


def _nothing_to_change(report: Report) -> str:
    """Say that a peak of workspaces is the libraries' own; "" elsewhere."""
    peak = report.peak
    if peak.categories.get(Category.WORKSPACE, 0) < _FIXED * max(1, peak.active_bytes):
        return ""
    return "Nothing to change: libraries such as cuBLAS allocate these once, in a fixed size."


def _from_a_dump(report: Report, words: str) -> str:
    """Add how to give back what lies idle, and how to see the peak that a dump does not show."""
    peak = report.peak
    free = peak.cached_bytes if _idle(peak.reserved_bytes, peak.active_bytes) else 0
    first = f"torch.cuda.empty_cache() gives {gib(free)} GiB back to the device at once. " if free else ""
    return (
        f"{first}{words} To see the peak, call torch.cuda.memory._record_memory_history(max_entries=100000) before the "
        "run and _dump_snapshot() after it."
    )


def _of_whole_step(entry: Advice, report: Report) -> str:
    """Say what a step needs in all, where the saving counts from that and not from the peak: of one that ran out of
    memory, and of the next one after a first.
    """
    after = entry.peak_after_bytes
    if after is None or entry.basis != "estimated":
        return ""
    whole = entry.saves_bytes + after
    if next_step(report) is not None:
        return f" of the {gib(whole)} GiB that the next step needs"
    if report.oom is None or known(report.oom.ahead) is None:
        return ""
    return f" of the {gib(whole)} GiB that the step needs in all" if whole > report.peak.allocated_bytes else ""


def _to_spare(report: Report) -> str:
    """Say that a run fits its card with room to spare, as far as it was seen; else return ""."""
    capacity, device, fit = _capacity(report), report.device_peak, report.fit
    if not capacity or report.oom or (fit and not fit.fits):
        return ""
    held = (device.reserved_bytes or 0) + (device.non_torch_bytes or 0)
    left = capacity - max(held, report.peak.active_bytes)
    if fit:  # the verdict's own figures
        capacity, left = fit.total_bytes, fit.headroom_bytes
    if left < _ROOMY * capacity:
        return ""
    if not fit and not any(phase.phase == Phase.OPTIMIZER_STEP for phase in report.phases):
        return f"{gib(left)} of {gib(capacity)} GiB were left in what was seen; no optimizer step is in it."
    return f"Nothing has to change: {gib(left)} of {gib(capacity)} GiB are left."


# ---- a comparison ----------------------------------------------------------------------------------------------------


def headline_of_comparison(comparison: Comparison) -> Headline:
    """Return the headline of a comparison: how large each run is beside the first, what differs most and the places of
    it, and who fits the capacity asked about.

    A place's ``bytes`` are how much more one run allocates there; its ``share`` is of the category in that run.
    """
    labels, total = [run.label for run in comparison.runs], comparison.rows[-1].at_peak
    what = "comes to" if any(run.report is None for run in comparison.runs) else "allocates at its peak"
    verdicts, causes = [], []
    places: list[Place] = []
    for i, other in enumerate(total[1:], 1):
        if total[0] is None or other is None:
            continue
        than = _beside_words(change_words(total[0], other))
        verdicts.append(f"{labels[i]} {what} {gib(other)} GiB, {than} {labels[0]} ({gib(total[0])} GiB)")
        largest = _most_different(comparison.rows[:-1], i)
        if largest is None:
            continue
        found = _changed_places(comparison, largest, i)
        of = f"Largest difference of {labels[i]}" if len(labels) > 2 else "Largest difference"
        causes.append(f"{of}: {_difference(largest.label, largest.difference[i] or 0, found)}")
        places += found if len(labels) == 2 else []
    capacity = comparison.capacity
    if capacity is not None and capacity.source == "option":
        told = "; ".join(f"{label}: {fit_words(capacity, i)}" for i, label in enumerate(labels))
        verdicts.append(f"Does it fit {gib(capacity.bytes)} GiB? {told}")
    return Headline(
        verdict=". ".join(verdicts),
        cause=" ".join([*causes, *_peaks_apart(comparison.runs)]),
        places=tuple(places),
        action="",
        assumed=(),
    )


def _beside_words(change: str) -> str:
    """Write a change before the run that it is relative to: ``31% less than``, ``2.7× as much as``."""
    if change.endswith(("less", "more")):
        return f"{change} than"
    return "as much as" if change == "same" else f"{change.removesuffix(' as much')} as much as"


def _most_different(rows: Iterable[ComparedGroup], index: int) -> _Compared | None:
    """Return what differs most between the first run and another: a category, or a group where none is known."""
    lines: list[_Compared] = []
    for row in rows:
        categories = [line for line in row.categories if line.difference[index] is not None]
        lines += categories or ([row] if row.difference[index] is not None else [])
    largest = max(lines, key=lambda line: abs(line.difference[index] or 0), default=None)
    return largest if largest is not None and largest.difference[index] else None


def _changed_places(comparison: Comparison, largest: _Compared, index: int) -> list[Place]:
    """List the two places that add most to the difference of a category, of the blocks that are listed.

    The other run may allocate blocks of another size there, which are subtracted.
    """
    from memprof.analysis.allocations.differences import by_stack  # here, so that --help loads no numpy

    here, there = (index, 0) if (largest.difference[index] or 0) > 0 else (0, index)
    entries = {(e.in_run, e.not_in_run): e.allocations for e in comparison.allocations_only_in}
    sums: dict[str, int] = {}
    for change in by_stack(entries.get((there, here), ()), entries.get((here, there), ())):
        found = change.largest
        if found.category == largest.id and (frame := place_of(found.stack)):
            sums[frame] = sums.get(frame, 0) + change.difference
    more = sorted(((frame, n) for frame, n in sums.items() if n > 0), key=lambda item: -item[1])
    return largest_places(dict(more), largest.at_peak[here] or 0)[:2]


def _difference(label: str, difference: int, places: Sequence[Place]) -> str:
    inside = label if label[1:2].isupper() else label[:1].lower() + label[1:]
    words = f"{inside}, {'+' if difference >= 0.005 * GIB else ''}{gib(difference)} GiB"
    if not places:
        return f"{words}."
    sign, made = "+" if difference > 0 else "−", []
    for place in places:
        function, line = _function(place.frame), ":".join(_file_and_line(place.frame))
        made.append(f"{sign}{amount(place.bytes)} {f'in {function} ({line})' if function else f'from {line}'}")
    return f"{words}, of it {' and '.join(made)}."


def _peaks_apart(runs: Sequence[ComparedRun]) -> list[str]:
    """Say where each run peaks, where they peak in different phases: rows at the peak then compare two moments."""
    peaks = [(run.label, run.report.peak) for run in runs if run.report is not None and run.report.peak.phase]
    if len({peak.phase for _, peak in peaks}) < 2:
        return []
    where = "; ".join(f"{label} in {_where(peak.phase, peak.step)}" for label, peak in peaks)
    return [f"The peaks are at different moments: {where}. What one holds at its peak is compared with that."]


def fit_words(capacity: ComparedCapacity, index: int) -> str:
    """Say whether a run of a comparison fits, and by how much: ``yes, 3.10 GiB free``."""
    left, need, total = capacity.left[index], capacity.needs[index], capacity.bytes
    margin = capacity.margins[index] if capacity.margins else 0
    fits = capacity.fits[index]
    words = f"no, {gib(-left)} GiB too much" if left < 0 else f"no, only {gib(left)} GiB free, {margin:.0%} margin"
    if fits:
        words = f"yes, {gib(left)} GiB free" if left >= 0 else "yes, it ran there"
    elif need >= 2 * total:
        words = f"no, {gib(need)} GiB, {need / total:.1f}× the device"
    return words + ("" if capacity.basis[index] == "device_peak" else ", by its total")


def change_words(
    first: int | None,
    other: int | None,
    first_most: int | None = None,
    other_most: int | None = None,
    write: Callable[[int], str] = gib,
) -> str:
    """Say ``90% less``, ``12% more``, ``9.4× as much`` or ``same``; ``–`` where one is not known.

    A category that is 0 at one peak may be there at another time: ``0 then, 3.05 at most``, ``0 before, ...``;
    ``write`` says how a size is written there.
    """
    if first is None or other is None:
        return "–"
    if first == other:
        return "same"
    if not other:
        return f"0 then, {write(other_most)} at most" if other_most else "none"
    if not first:
        return f"0 before, {write(first_most)} at most" if first_most else "new"
    if other >= 2 * first:
        return f"{other / first:.1f}× as much" if other < _MANY_TIMES * first else f">{_MANY_TIMES:,}× as much"
    share = 100 * abs(other - first) / first
    number = "<0.1" if share < 0.05 else f"{share:.1f}" if share < 9.95 else f"{share:.0f}"
    return f"{'>99' if share >= 99.5 else number}% {'less' if other < first else 'more'}"
