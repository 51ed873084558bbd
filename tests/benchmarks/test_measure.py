"""The arithmetic behind the benchmarks' ratios."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.measure import environment, interleaved, ratio, write_result


def test_tasks_take_turns_and_each_leads_a_round() -> None:
    order: list[str] = []

    def task(name: str) -> dict[str, float]:
        order.append(name)
        return {"wall": float(len(order))}

    results = interleaved({name: lambda n=name: task(n) for name in "abc"}, rounds=3)
    assert "".join(order) == "abcbcacab"
    assert results["a"] == [{"wall": 1.0}, {"wall": 6.0}, {"wall": 8.0}]


def test_ratio_is_the_median_over_rounds_not_the_ratio_of_medians() -> None:
    results = {
        "base": [{"cpu": 1.0}, {"cpu": 10.0}, {"cpu": 2.0}],
        "more": [{"cpu": 2.0}, {"cpu": 11.0}, {"cpu": 3.0}],
    }
    assert ratio(results, "more", "base", "cpu") == 1.5


def test_results_name_versions_and_no_place(tmp_path: Path) -> None:
    target = tmp_path / "new" / "result.json"
    write_result({"what": "nothing"}, target)
    written = json.loads(target.read_text(encoding="utf-8"))
    assert written["environment"] == environment()
    assert {"numpy", "click"} <= set(written["environment"]["versions"])
    assert str(Path.home()) not in target.read_text(encoding="utf-8")
