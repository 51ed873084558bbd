"""What a progress bar says of the time left."""

from __future__ import annotations

import pytest

from memprof.cli.progress import time_left


@pytest.mark.parametrize(
    ("seconds", "done", "asked", "words"),
    [
        (10.0, 0, 5, ""),
        (10.0, 5, 5, ""),
        (10.0, 2, 5, "at most 15 s left"),
        (0.1, 1, 2, "at most 1 s left"),
        (60.0, 4, 40, "at most 9 min left"),
    ],
)
def test_the_time_left_follows_the_speed_so_far(seconds: float, done: int, asked: int, words: str) -> None:
    assert time_left(seconds, done, asked) == words
