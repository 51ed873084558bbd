"""Columns are sorted, told apart and looked up as numpy does it, only with fewer passes."""

from __future__ import annotations

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from memprof.snapshot.model import distinct, is_among, order_by_event, order_of

# Few values that come again, and those of addresses and times, up to the ends of 64 bits.
_COLUMN = st.lists(st.one_of(st.integers(-3, 3), st.integers(-(2**63), 2**63 - 1)), max_size=40)


def column(values: list[int]) -> np.ndarray:
    return np.array(values, np.int64)


@given(_COLUMN)
def test_distinct_values(values: list[int]) -> None:
    np.testing.assert_array_equal(distinct(column(values)), np.unique(column(values)))


@given(_COLUMN, _COLUMN)
def test_membership(values: list[int], wanted: list[int]) -> None:
    np.testing.assert_array_equal(is_among(column(values), wanted), np.isin(column(values), column(wanted)))


@given(st.lists(st.tuples(st.integers(-3, 3), st.integers(0, 2**47), st.integers(-(2**63), 2**63 - 1)), max_size=40))
@example([(0, 0, 2**63 - 1), (0, 0, -(2**63))])
@example([(-k % 3, -k % 7, k - (k in (20, 21))) for k in range(30)][::-1])  # few rows are alike in the last
def test_order(rows: list[tuple[int, int, int]]) -> None:
    table = np.array(rows, np.int64).reshape(-1, 3).T
    for keys in (table[:1], table[1:2], table[:2], table[1::-1], table):
        np.testing.assert_array_equal(order_of(*keys), np.lexsort(list(keys)))


@given(st.permutations(range(12)), st.lists(st.tuples(st.integers(-3, 3), st.integers(-1, 12)), max_size=20))
def test_order_by_an_event_that_mostly_one_row_has(events: list[int], more: list[tuple[int, int]]) -> None:
    others = np.array([(place, event) for place, event in more if event in (-1, 12)], np.int64).reshape(-1, 2)
    one_each = np.concatenate([np.array([(-event % 5, event) for event in events], np.int64)[:8], others])
    for rows in (one_each, np.array(more, np.int64).reshape(-1, 2)):
        for keys in ((rows[:, 1],), (rows[:, 0], rows[:, 1])):
            np.testing.assert_array_equal(order_by_event(*keys, n_events=12), np.lexsort(list(keys)))
