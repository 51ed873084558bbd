"""One warning, and one call, when memory comes near its limit."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from memprof.integrations.trackers.alerts import Alert, HighMemory, parse_threshold

from memprof import MemProfCallback
from memprof.errors import MemprofError, UsageError
from memprof.report.counters import StepCounters

GB = 10**9


@pytest.mark.parametrize(
    ("given", "parsed"), [("90%", 0.9), (" 12.5% ", 0.125), ("20GB", 20 * GB), (7, 7), (None, None)]
)
def test_what_a_limit_may_be(given: Any, parsed: Any) -> None:
    assert parse_threshold(given) == parsed


@pytest.mark.parametrize("given", ["0%", "101%", "much", "9x%", 0, -3, True, 0.9])
def test_what_is_no_limit(given: Any) -> None:
    with pytest.raises(MemprofError):
        parse_threshold(given)


def test_a_callback_refuses_what_cannot_be() -> None:
    with pytest.raises(UsageError, match="leave scalars=True"):
        MemProfCallback(warn_above="90%", scalars=False)
    with pytest.raises(UsageError, match="give that too"):
        MemProfCallback(on_high_memory=print)


def test_the_first_step_above_warns_and_calls() -> None:
    told: list[HighMemory] = []
    alert = Alert(0.9, 10 * GB, 3, on_device=True, hook=told.append)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        alert.look(StepCounters(step=1, peak_reserved=8 * GB, non_torch=GB))
        alert.look(StepCounters(step=2, host_rss=20 * GB))  # the device's figures are not known
    with pytest.warns(UserWarning, match="rank 3 used 8.85 GiB of 9.31 GiB up to step 3, more than warn_above allows"):
        alert.look(StepCounters(step=3, peak_reserved=8 * GB, non_torch=GB + GB // 2))
    alert.look(StepCounters(step=4, peak_reserved=10 * GB))
    assert told == [HighMemory(3, 3, 9 * GB + GB // 2, 9 * GB, 10 * GB)]


def test_without_a_device_the_process_counts_and_a_failing_function_ends_nothing() -> None:
    def broken(_: HighMemory) -> None:
        raise ConnectionError("no network")

    alert = Alert(5 * GB, None, 0, on_device=False, hook=broken)
    with pytest.warns(UserWarning, match="on_high_memory raised ConnectionError"):
        alert.look(StepCounters(step=1, host_rss=6 * GB, peak_reserved=None))
    with pytest.raises(UsageError, match="give a size"):
        Alert(0.5, None, 0, on_device=True, hook=None)
