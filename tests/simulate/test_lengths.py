"""Lengths of completions, and what they do to the peak; with a run's memory known in advance."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from memprof.config.settings import Settings
from memprof.errors import InputError, UsageError
from memprof.plan.simulations import SimulatedRow
from memprof.simulate.lengths import CompletionLengths, read_lengths, study
from tests.plan.rows import simulated_row

MIB = 2**20
SETTINGS = Settings(model="m", per_device_train_batch_size=4, num_generations=4, completion_length=1000)


def _known(limit: int, asked: list[int]) -> Any:
    """Memory that grows with the length, and more than linearly."""

    def need(length: int) -> int:
        return 100 * MIB + length * MIB + length * length * 100

    def execute(wanted: list[Settings]) -> list[SimulatedRow]:
        rows = []
        for settings in wanted:
            length = settings.completion_length
            asked.append(length)
            size = need(length)
            verdict = {"limit_bytes": limit} if limit else None
            rows.append(
                simulated_row(
                    peak_bytes=size - MIB,
                    device_peak_bytes=size,
                    fits=size <= limit if limit else None,
                    verdict=verdict,
                )
            )
        return rows

    return execute


@pytest.mark.parametrize("limit", [150, 400, 700, 2000, 50])
def test_the_longest_that_fits_is_found_and_executed(limit: int) -> None:
    asked: list[int] = []
    lengths = CompletionLengths("given", tuple(range(50, 1000)), 1000)
    found = study(SETTINGS, lengths, _known(limit * MIB, asked), {})
    truth = max((n for n in range(1, 1001) if 100 * MIB + n * MIB + n * n * 100 <= limit * MIB), default=0)
    if truth < 50:
        assert found.largest_fitting == 0
    else:
        assert found.largest_fitting is not None
        assert truth - 60 <= found.largest_fitting <= truth  # never above it: a length is executed before it is said
        assert found.largest_fitting in asked
    assert len(asked) <= 8
    assert len(asked) == len(set(asked))
    peaks = [point.needed_bytes for point in sorted(found.points, key=lambda p: p.length)]
    assert peaks == sorted(peaks)
    assert {name for point in found.points for name in point.names} >= {"p50", "p95", "longest"}


def test_the_share_of_steps_is_that_of_batches_drawn() -> None:
    draw = random.Random(7)
    values = sorted(draw.randint(10, 500) for _ in range(300))
    lengths = CompletionLengths("given", tuple(values), 500)
    batches = [max(draw.choice(values) for _ in range(4)) for _ in range(20_000)]
    for length in (100, 300, 450):
        drawn = sum(longest <= length for longest in batches) / len(batches)
        assert lengths.share_below(length, 4) == pytest.approx(drawn, abs=0.015)
    for share in (0.5, 0.95):
        least = lengths.quantile(share, 4)
        assert lengths.share_below(least, 4) >= share
        assert lengths.share_below(least - 1, 4) < share


def test_without_a_gpu_there_is_no_verdict() -> None:
    found = study(SETTINGS, read_lengths("300:50", 1000), _known(0, []), {})
    assert found.largest_fitting is None
    assert found.share_of_steps_fitting is None
    assert all(point.fits is None for point in found.points)


def test_lengths_are_read_in_every_form(tmp_path: Path) -> None:
    (tmp_path / "list.json").write_text(json.dumps([5, 9, 2000]))
    (tmp_path / "lines.txt").write_text("7\n3\n")
    assert read_lengths(str(tmp_path / "list.json"), 1000).values == (5, 9, 1000)
    assert read_lengths(str(tmp_path / "lines.txt"), 1000).values == (3, 7)
    assert read_lengths("30, 10,20", 1000).values == (10, 20, 30)
    drawn = read_lengths("300:50", 350).values
    assert max(drawn) == 350
    assert sorted(drawn)[len(drawn) // 2] == pytest.approx(300, abs=1)
    assert read_lengths("300:0", 350).values == (300,)


def test_a_recordings_own_lengths_are_taken(tmp_path: Path) -> None:
    from memprof.snapshot.writer import save_snapshot

    raw: dict[str, Any] = {"segments": [], "device_traces": [[]]}
    raw["memprof"] = {"kind": "trace", "setup": {"lengths": [[1, 12, 40], [1, 9, 25]]}}
    save_snapshot(raw, tmp_path / "run.pickle")
    assert read_lengths(str(tmp_path / "run.pickle"), 1000).values == (25, 40)
    del raw["memprof"]["setup"]
    save_snapshot(raw, tmp_path / "bare.pickle")
    with pytest.raises(InputError, match="does not contain the lengths"):
        read_lengths(str(tmp_path / "bare.pickle"), 1000)


def test_mistakes_are_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text('{"a": 1}')
    (tmp_path / "zero.txt").write_text("0\n3\n")
    with pytest.raises(UsageError, match="no such file"):
        read_lengths("nowhere.txt", 100)
    for name in ("bad.json", "zero.txt"):
        with pytest.raises(InputError):
            read_lengths(str(tmp_path / name), 100)
