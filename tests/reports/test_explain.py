"""``memprof explain``: the frames that all its allocations share stand once."""

from __future__ import annotations

from typing import Any

import pytest
from memprof.reports.document.tables import brief_stack, fold_shared
from memprof.reports.renderers import draw

from tests.reports.typed import rows_of

OUTER = ("train.py:9 step", "train.py:31 main")


def listed(*stacks: tuple[str, ...]) -> list[dict[str, Any]]:
    return [
        {
            "address": 0x7F00_0000_0000 + i, "bytes": 2**20, "category": "activations", "detail": None, "name": None,
            "evidence": "stack", "rule": None, "alternatives": [], "phase": "forward", "born_us": 1, "died_us": 2,
            "retained": False, "tag": None, "stack": list(stack),
        }
        for i, stack in enumerate(stacks)
    ]  # fmt: skip


@pytest.mark.parametrize("style", ["text", "markdown"])
def test_frames_that_all_share_stand_once_above_the_list(style: str) -> None:
    rows = rows_of(listed(("a.py:1 f", *OUTER), ("b.py:2 g", *OUTER), ()), 3 * 2**20)
    text = draw("explain", rows, style)
    assert text.startswith("All share:\n")
    assert [text.count(frame) for frame in (*OUTER, "a.py:1 f", "b.py:2 g")] == [1, 1, 1, 1]
    assert text.index(OUTER[1]) < text.index("Activations")


def test_the_innermost_frame_stays_and_one_allocation_is_left_whole() -> None:
    same = rows_of(listed(OUTER, OUTER), 2 * 2**20)
    shared, rows = fold_shared(same)
    assert (shared, [row.stack for row in rows]) == (OUTER[1:], [OUTER[:1]] * 2)
    assert fold_shared(same[:1]) == ((), same[:1])
    apart = rows_of(listed(("a.py:1 f", "x.py:1 main"), ("a.py:1 f", "y.py:1 main")), 2 * 2**20)
    assert fold_shared(apart) == ((), apart)


def test_what_was_left_out_of_a_stack_stays_said_with_it() -> None:
    deep = ("a.py:1 f", *OUTER, "<frozen runpy>:1 a", "<frozen runpy>:2 b")
    rows = rows_of(listed(deep, ("b.py:2 g", *OUTER, "<frozen runpy>:1 a")), 2 * 2**20, brief_stack)
    shared, folded = fold_shared(rows)
    assert shared == OUTER
    assert [row.stack[0] for row in folded] == ["a.py:1 f", "b.py:2 g"]
    assert [row.stack[1].split(" of")[0] for row in folded] == ["… 2 more", "… 1 more"]
