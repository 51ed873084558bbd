"""Study what completion lengths do to the peak: execute a few lengths, and read the rest off between them.

TRL pads every completion of a generation batch to the longest of them, so a step needs what its longest completion
needs. With the lengths independent and drawn from the given ones, a batch of ``n`` is no longer than ``L`` with the
probability ``F(L) ** n``, where ``F`` is the share of lengths no longer than ``L``.
"""

from __future__ import annotations

import json
import math
import re
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist

from msgspec.structs import replace

from memprof.config.settings import Settings
from memprof.errors import InputError, UsageError
from memprof.plan.simulations import SimulatedRow
from memprof.report.simulation import LengthPoint
from memprof.report.simulation import Lengths as LengthReport
from memprof.snapshot.remote import place_of

_PERCENTILES = {"p50": 0.5, "p95": 0.95}
_SAMPLES = 1000  # of a mean and a deviation: its own quantiles, so that nothing is drawn by chance
_CLOSE = 16  # tokens: lengths nearer to one another than this are not executed apart


@dataclass(frozen=True)
class CompletionLengths:
    """Hold completion lengths in tokens, sorted, none above ``longest`` (where generation is cut)."""

    source: str
    values: tuple[int, ...]
    longest: int

    def share_below(self, length: int, batch: int) -> float:
        """Return the share of batches of ``batch`` completions in which none is longer than ``length``."""
        return float((bisect_right(self.values, length) / len(self.values)) ** batch)

    def quantile(self, share: float, batch: int) -> int:
        """Return the least length that ``share`` of the batches do not exceed."""
        place: int = math.ceil(share ** (1 / batch) * len(self.values) - 1e-9)
        return self.values[min(max(place, 1), len(self.values)) - 1]


def read_lengths(text: str, longest: int) -> CompletionLengths:
    """Read lengths as ``--completion-lengths`` gives them, cut at ``longest`` tokens.

    ``mean:deviation`` (a normal distribution's quantiles), ``120,300,512``, or a file: a JSON list, numbers one a line,
    or a recorded snapshot (each at a path or a URL), whose steps' own tokens are taken.

    Raises:
        UsageError: the text is neither a file nor lengths.
        InputError: the file cannot be used.
    """
    path = place_of(text)
    if path.is_file():
        return _lengths(path.name, _from_file(path), longest)
    if match := re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*:\s*(\d+(?:\.\d+)?)\s*", text):
        mean, deviation = float(match.group(1)), float(match.group(2))
        values = [round(mean)]
        if deviation:
            normal = NormalDist(mean, deviation)
            values = [round(normal.inv_cdf((i + 0.5) / _SAMPLES)) for i in range(_SAMPLES)]
        return _lengths(f"normal, {mean:g} ± {deviation:g}", [max(value, 1) for value in values], longest)
    if re.fullmatch(r"[\d,\s]+", text) and any(c.isdigit() for c in text):
        return _lengths("given", [int(part) for part in re.findall(r"\d+", text)], longest)
    raise UsageError(
        f"--completion-lengths {text!r}: no such file, and neither mean:deviation (300:80) nor lengths (120,300,512)."
    )


def _lengths(source: str, values: list[int], longest: int) -> CompletionLengths:
    if not values or min(values) < 1:
        raise InputError(f"{source}: completion lengths must be whole numbers of tokens, at least 1 each.")
    return CompletionLengths(source, tuple(sorted(min(value, longest) for value in values)), longest)


def _from_file(path: Path) -> list[int]:
    with path.open("rb") as stream:
        head = stream.read(2)
    if head[:1] == b"\x80" or head == b"\x1f\x8b" or path.suffix in (".pickle", ".pkl"):
        return lengths_of_steps(path)
    try:
        text = path.read_text(encoding="utf-8").strip()
        values = json.loads(text) if text.startswith("[") else [line for line in text.split() if line]
        if isinstance(values, list) and all(isinstance(v, (int, str)) and not isinstance(v, bool) for v in values):
            return [int(value) for value in values]
    except (OSError, UnicodeDecodeError, ValueError):
        pass
    raise InputError(f"{path}: expected a JSON list of completion lengths, or one whole number a line.")


def lengths_of_steps(path: Path) -> list[int]:
    """Read the completion lengths a recorded run wrote down.

    Raises:
        InputError: the file cannot be read, or says nothing of lengths.
    """
    from memprof.snapshot import load_snapshot

    seen = (load_snapshot(path).run.setup or {}).get("lengths")
    rows = seen if isinstance(seen, list) else []
    # Rows of step, prompt and completion, as the callback writes them.
    found = [row[2] for row in rows if isinstance(row, list) and len(row) > 2 and type(row[2]) is int and row[2] > 0]
    if found:
        return found
    raise InputError(f"{path}: this recording does not contain the lengths of its completions; give lengths instead.")


# -- what they do to the peak ----------------------------------------------------------------------------------------


def _sentence(found: LengthReport) -> str:
    words = f"{found.count} completion lengths ({found.source}), mean {found.mean:.0f} tokens; each step pads its "
    words += f"{found.batch} completions to the longest."
    share = found.share_of_steps_fitting
    if share is None:
        return words
    if found.worst_case.fits:
        return f"{words} Even with every completion at {found.worst_case.length} tokens it fits: every step does."
    if not found.largest_fitting:
        return f"{words} No length that was tried fits."
    return (
        f"{words} Steps whose longest completion has at most {found.largest_fitting} tokens fit: "
        f"{100 * share:.1f}% of them; all of 1000 steps do with a probability of {100 * share**1000:.1f}%."
    )


_Execute = Callable[["list[Settings]"], "list[SimulatedRow]"]


def study(
    settings: Settings, lengths: CompletionLengths, execute: _Execute, known: dict[int, SimulatedRow]
) -> LengthReport:
    """Execute the run at a few lengths and read the rest off between them.

    Args:
        settings, lengths: the run and its distribution; ``completion_length`` is the maximum and the worst case.
        execute: simulates settings and returns their rows (:func:`memprof.simulate.evaluate.summary_of`).
        known: rows by completion length that are executed already; the worst case should be there.
    """
    batch = settings.per_device_train_batch_size * settings.generation_steps
    named = {name: lengths.quantile(share, batch) for name, share in _PERCENTILES.items()}
    named["longest"] = lengths.values[-1]
    rows = dict(known)

    def run(wanted: list[int]) -> None:
        new = [length for length in wanted if length not in rows]
        rows.update(zip(new, execute([settings.with_(completion_length=length) for length in new]), strict=True))

    top = settings.completion_length
    run(_apart([top, *rows], sorted(named.values(), reverse=True)))
    fitting = _largest_fitting(rows, run, lengths.values[0])
    points = [
        _point(rows, length, lengths.share_below(length, batch), [n for n, at in named.items() if at == length])
        for length in sorted(set(named.values()))
    ]
    worst = _point(rows, top, 1.0, ["worst case"])
    report = LengthReport(
        source=lengths.source,
        count=len(lengths.values),
        mean=sum(lengths.values) / len(lengths.values),
        batch=batch,
        points=tuple(points if any(point.length == top for point in points) else [*points, worst]),
        worst_case=worst,
        largest_fitting=fitting,
        share_of_steps_fitting=None if fitting is None else lengths.share_below(fitting, batch),
        sentence="",
    )
    return replace(report, sentence=_sentence(report))


def _apart(first: list[int], more: list[int]) -> list[int]:
    """Add to ``first`` those of ``more`` that are not next to one that is there; at least one below the top."""
    chosen = list(first)
    for length in more:
        if all(abs(length - other) >= _CLOSE for other in chosen):
            chosen.append(length)
    return chosen if min(chosen) <= min(more) + _CLOSE else [*chosen, min(more)]


def _largest_fitting(rows: dict[int, SimulatedRow], run: Callable[[list[int]], None], shortest: int) -> int | None:
    """Find the longest completion that fits: 0 where none does, None where there is no GPU to fit.

    Read off between two executed lengths, then executed; once more from there if it does not fit after all.
    """
    if next(iter(rows.values())).fits is None:
        return None
    if all(found.fits for found in rows.values()):
        return max(rows)
    if not any(found.fits for found in rows.values()) and shortest not in rows:
        run([shortest])
    for _ in range(3):
        good = max((length for length, found in rows.items() if found.fits), default=0)
        bad = min(length for length, found in rows.items() if not found.fits)
        if not good or bad - good <= _CLOSE:
            return good if good < bad else 0
        run([_between(rows, good, bad)])
    return max(length for length, found in rows.items() if found.fits)


def _between(rows: dict[int, SimulatedRow], good: int, bad: int) -> int:
    """Find where the line between a length that fits and one that does not meets the card's limit."""
    low, high, limit = rows[good].needed_bytes, rows[bad].needed_bytes, rows[bad].limit_bytes or 0
    share = (limit - low) / (high - low) if high > low else 0.5
    guess = good + int((bad - good) * min(max(share, 0.05), 0.95))
    return min(max(guess, good + 1), bad - 1)


def _point(rows: dict[int, SimulatedRow], length: int, share: float, names: list[str]) -> LengthPoint:
    if length in rows:
        found = rows[length]
        peak, needed, fits = found.peak_bytes, found.needed_bytes, found.fits
    else:
        peak = _read_off({n: row.peak_bytes for n, row in rows.items()}, length)
        needed = _read_off({n: row.needed_bytes for n, row in rows.items()}, length)
        limit = rows[min(rows, key=lambda other: abs(other - length))].limit_bytes
        fits = None if limit is None else needed <= limit
    return LengthPoint(
        length=length,
        share_below=share,
        peak_bytes=peak,
        needed_bytes=needed,
        fits=fits,
        executed=length in rows,
        names=tuple(names),
    )


def _read_off(sizes: dict[int, int], length: int) -> int:
    """Read off a line between the two executed neighbours; beyond the last one, take that one's."""
    below = max((other for other in sizes if other <= length), default=min(sizes))
    above = min((other for other in sizes if other >= length), default=max(sizes))
    low, high = sizes[below], max(sizes[above], sizes[below])
    return low if below == above else int(low + (high - low) * (length - below) / (above - below))
