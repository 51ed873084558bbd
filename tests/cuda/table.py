"""The table of recordings at the end of a run: what each case's recording holds against the allocator's counters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.cuda.balance import Balance, lines

_KEY = "recording"
Row = Callable[[str, Balance], None]


@pytest.fixture
def row(record_property: Callable[[str, object], None]) -> Row:
    """Enter a recording into the table; properties travel from pytest-xdist's workers by themselves."""
    return lambda case, balance: record_property(_KEY, balance.columns(case))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    reports = [r for outcome in ("passed", "failed") for r in terminalreporter.stats.get(outcome, [])]
    rows = [value for report in reports for key, value in getattr(report, "user_properties", []) if key == _KEY]
    if rows:
        terminalreporter.section("recordings on the emulated device")
        for line in lines(sorted(map(list, rows))):
            terminalreporter.write_line(line)
