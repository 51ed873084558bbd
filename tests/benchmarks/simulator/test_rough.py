"""The rough math agrees with what the simulation holds, and the page shows it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.simulator.rough import rough
from memprof.config.model_shape import ModelShape
from tests.simulate.conftest import TINY, settings_for, tiny  # noqa: F401

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(
    "changes",
    [
        {"gradient_checkpointing": False, "beta": 0.1},
        {"dtype": "bfloat16", "optim": "adamw_8bit"},
        {"dtype": "bfloat16", "lora_r": 3},
        {"dtype": "bfloat16", "lora_r": 3, "load_in_4bit": True},
    ],
    ids=["full", "8-bit", "LoRA", "QLoRA"],
)
def test_a_simulation_holds_what_the_formulas_say(
    settings_for: Callable[..., Any],  # noqa: F811
    changes: dict[str, Any],
) -> None:
    from memprof.analysis.analysis import analyze
    from memprof.simulate.run import simulate_settings
    from memprof.snapshot.reader import snapshot_from_raw

    settings = settings_for(**changes)
    analysis = analyze(snapshot_from_raw(simulate_settings(settings)))
    stepping = max((p for p in analysis.phases if p.phase == "optimizer_step"), key=lambda p: p.allocated_bytes)
    paper = rough(ModelShape.of(TINY), settings)
    # The small model's projections are below what 8-bit Adam takes; the page's 1B model holds that formula.
    skipped = "optimizer_state" if "8bit" in settings.optim else ""
    for name in ("weights", "adapters", "gradients", "optimizer_state", "reference_model"):
        if name in paper and name != skipped:
            # Buffers, scales of the last block, step counters: some bytes of a tensor, of which there are dozens.
            assert stepping.categories_requested[name] == pytest.approx(paper[name], rel=0.03, abs=6_000), name
    held = analysis.own_peaks["kv_cache"]
    layers = 2 * TINY["num_hidden_layers"]  # type: ignore[operator]
    # One layer's keys or values once more, while a token is appended; blocks are rounded up to 512 bytes.
    assert paper["kv_cache"] <= held <= paper["kv_cache"] * (1 + 1 / layers) + 512 * (layers + 1)


def test_the_page_shows_what_was_executed() -> None:
    import json

    from benchmarks.simulator.rough import RESULTS, RUNS, compared, table

    found = json.loads(RESULTS.read_text())
    results = {name: found[name] for name in RUNS if name in found}
    assert results
    assert table(results).strip() in (ROOT / "benchmarks" / "measurements.md").read_text(encoding="utf-8")
    for run, row in results.items():
        for name, paper, there in compared(row):
            near = 0.06 if name in ("kv_cache", "weight_casts") else 0.03
            assert there == pytest.approx(paper, rel=near), (run, name)
