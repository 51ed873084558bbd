"""Weigh memory against estimated time: the Pareto front of a plan's rows, and the fastest row that fits."""

from __future__ import annotations

from collections.abc import Sequence

from memprof.plan.search import SearchRow

#: Times that differ by less than this share are a tie: estimates are not better than that.
ALIKE = 0.10


def pace_of(row: SearchRow) -> float | None:
    """Return the seconds a step takes for each token it trains on; None where no time is estimated.

    Rows with equal lengths and batches differ as their steps do; other rows (values of ``--vary``) do other work in
    a step, so that only this compares them.
    """
    s = row.settings
    tokens = s.per_device_train_batch_size * s.gradient_accumulation_steps * s.sequence_length * s.replicas
    return None if row.step_s is None else row.step_s / tokens


def front_of(rows: Sequence[SearchRow]) -> list[bool | None]:
    """Tell of each row whether it is on the front: no row is as fast and as small, and better in one of the two.

    A row that does not fit takes no row that fits off the front. None where no time is estimated.
    """
    return [None if pace_of(row) is None else not any(_beats(other, row) for other in rows) for row in rows]


def _beats(other: SearchRow, row: SearchRow) -> bool:
    theirs, own = pace_of(other), pace_of(row)
    if theirs is None or own is None or (row.fits and not other.fits):
        return False
    no_worse = theirs <= own and other.device_peak_bytes <= row.device_peak_bytes
    return no_worse and (theirs, other.device_peak_bytes) != (own, row.device_peak_bytes)


def fastest_of(rows: Sequence[SearchRow]) -> SearchRow | None:
    """Return the fastest row that fits; of those within :data:`ALIKE` of it, the first.

    Methods are listed with those first that train the most and round the least. None where no row both fits and has an
    estimated time.
    """
    timed = [(pace, row) for row in rows if row.fits and (pace := pace_of(row)) is not None]
    if not timed:
        return None
    best = min(pace for pace, _ in timed)
    return next(row for pace, row in timed if pace <= best * (1 + ALIKE))


def recommended_of(rows: Sequence[SearchRow]) -> SearchRow | None:
    """Return the row to recommend: of those that fit in stock TRL the fastest that trains the most; None if none fits.

    The whole model is more than an adapter, in float32 more than in half precision, whose rounding loses small updates;
    an adapter of whole weights is more than one of 4-bit weights. Without an estimated time the first is named: methods
    that round the least come first. The lean trainer's rows are recommended only if no other fits.
    """
    fitting = [row for row in rows if row.fits]
    stock = [row for row in fitting if not row.settings.lean] or fitting
    if not stock:
        return None
    most = max(_trained(row) for row in stock)
    alike = [row for row in stock if _trained(row) == most]
    return fastest_of(alike) or alike[0]


def _trained(row: SearchRow) -> int:
    """Rank how much of a model a row trains."""
    if not row.settings.has_adapter:
        return 3 if row.settings.weights_dtype == "float32" else 2
    return 0 if row.settings.load_in_4bit else 1
