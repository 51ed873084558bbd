"""Real texts with what an expert says of each, where the machine has them (``benchmarks/oom_texts.py`` scores them)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from memprof.reports.renderers import draw

from benchmarks.oom.texts import checked
from memprof.oom.explain import explain_log


def test_every_text_is_read_as_an_expert_reads_it(shared: Path) -> None:
    index = shared / "oom" / "INDEX.json"
    if not index.is_file():
        pytest.skip("the real texts are not here")
    wrong = []
    for entry in json.loads(index.read_text(encoding="utf-8")):
        answer = explain_log((shared / "oom" / f"{entry['n']:02d}.txt").read_text(encoding="utf-8"))
        draw("oom", answer)
        wrong += [(entry["n"], name) for name, right in checked(entry["expect"], answer.failures) if not right]
    assert wrong == []
