"""A script that trains with the lean trainer: simulated as the recipe is, and kept as it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.simulate.test_closed_forms import PARAMETERS

pytestmark = pytest.mark.slow

SCRIPT = """
import sys
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoTokenizer
from memprof.grpo import LeanGRPOConfig, LeanGRPOTrainer

name, lora, more = sys.argv[1], sys.argv[2] == "lora", eval(sys.argv[3])
trainer = LeanGRPOTrainer(
    name,
    lambda completions, **_: [0.0] * len(completions),
    LeanGRPOConfig(
        "out", per_device_train_batch_size=4, num_generations=4, max_completion_length=200, beta=0.1,
        optim="adamw_torch", report_to="none", **more,
    ),
    train_dataset=Dataset.from_list([{"prompt": "abcd" * 11}] * 8),
    processing_class=AutoTokenizer.from_pretrained(name),
    peft_config=LoraConfig(r=3, lora_alpha=6, target_modules=["q_proj", "v_proj"]) if lora else None,
)
trainer.train()
"""

# LeanGRPOConfig's and those of the simulation.
GIVEN = [
    ("lora", {}, {"lora_r": 3, "lora_target_modules": ("q_proj", "v_proj"), "dtype": "bfloat16"}, False),
    (
        "lora",
        {"checkpointing": "full", "prefix_sharing": True, "max_tokens_per_piece": 422, "generation_batch": 2},
        {"lora_r": 3, "lora_target_modules": ("q_proj", "v_proj"), "dtype": "bfloat16", "prefix_sharing": True,
         "gradient_checkpointing": "full", "max_tokens_per_piece": 422, "generation_batch": 2},
        True,
    ),
    pytest.param(
        "full", {"checkpointing": "offloaded", "tiled_mlp": 64},
        {"gradient_checkpointing": "offloaded", "tiled_mlp": 64}, True, marks=pytest.mark.heavy,
    ),
]  # fmt: skip


def _figures(raw: dict[str, Any]) -> dict[str, Any]:
    from memprof.analysis.analysis import analyze
    from memprof.snapshot.reader import snapshot_from_raw

    report = analyze(snapshot_from_raw(raw)).to_dict()
    peak = {name: report["peak"][name] for name in ("allocated_bytes", "reserved_bytes", "categories", "phase", "step")}
    phases: dict[tuple[int, str], int] = {}
    for part in report["phases"]:
        if part["step"]:
            key = (part["step"], part["phase"])
            phases[key] = max(phases.get(key, 0), part["peak_bytes"])
    host = {name: report["host"][name] for name in ("pinned_bytes", "rss_bytes")} if report["host"] else None
    return {**peak, "own_peaks": report["own_peaks"], "phases": phases, "host": host, "report": report}


@pytest.mark.parametrize(("kind", "given", "changes", "card"), GIVEN, ids=["defaults", "pieces", "reference"])
def test_the_scripts_lean_trainer_is_the_recipes(
    tiny: str,
    tmp_path: Path,
    settings_for: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    given: dict[str, Any],
    changes: dict[str, Any],
    card: bool,
) -> None:
    from memprof.advice.candidates import candidates_for
    from memprof.config.from_recording import settings_like
    from memprof.config.gpus import find_gpu
    from memprof.grpo.techniques import apply as defaults
    from memprof.simulate.run import simulate_settings
    from memprof.simulate.script.script import simulate_script
    from tests.report.plain import run_of

    monkeypatch.setattr(defaults, "OFFLOAD_FROM_BYTES", 0)  # the defaults of long completions
    monkeypatch.setattr(defaults, "TILE_TOKENS", 64)
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    gpu = find_gpu("1GB") if card else None
    raw = simulate_script(script, [tiny, kind, repr(given)], {}, gpu=gpu, stacks=False)
    settings = settings_for(recipe="lean", beta=0.1, completion_length=200, **changes)
    expected = _figures(simulate_settings(settings, gpu=gpu, stacks=False))
    found = _figures(raw)
    report = found.pop("report")
    expected.pop("report")
    assert found == expected
    if not given or "offloaded" in given.values():
        assert found["host"]["pinned_bytes"] > 0
    told = [note for note in raw["memprof"]["notes"] if note.startswith("generation")]
    assert ["rolling batch" in note for note in told] == [True] * ("generation_batch" in given)  # all have room else

    kept = settings_like(report["source"]).settings
    assert kept == settings.with_(steps_per_generation=1, vllm_enable_sleep_mode=True, model=kept.model)
    assert "lean" not in {candidate.id for candidate in candidates_for(run_of(report))}


def test_what_is_not_kept_is_said_and_nothing_is_searched(
    tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from memprof.grpo import trainer
    from memprof.simulate.script.script import simulate_script

    def search(*_: Any) -> None:
        raise AssertionError("a search began")

    monkeypatch.setattr(trainer, "keep_within_budget", search)
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    given = {"memory_budget": "1GB", "packing": True, "loss_chunk_tokens": 50}
    raw = simulate_script(script, [tiny, "lora", repr(given)], {"completion_length": 9}, device="cpu", stacks=False)
    told = " ".join(raw["memprof"]["notes"])
    assert "own LeanGRPOTrainer was built and trained" in told
    assert "memory_budget='1GB': no settings were searched for" in told
    assert "so the trainer's defaults are used: loss_chunk_tokens=50, packing=True" in told
    config = raw["memprof"]["config"]
    assert (config["recipe"], config["device"], config["completion_length"]) == ("lean", "cpu", 9)


def test_gradients_summed_in_fp32_are_held_while_a_later_piece_runs(tiny: str, tmp_path: Path) -> None:
    from memprof.simulate.script.script import simulate_script

    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    peaks, parts = {}, {}
    for sums in ("never", "fp32"):
        given = {"weights": "bf16", "max_tokens_per_piece": 250, "gradient_sums": sums, "checkpointing": "none"}
        report = _figures(simulate_script(script, [tiny, "full", repr(given)], {}, stacks=True))["report"]
        peaks[sums] = max(part["peak_bytes"] for part in report["phases"] if part["phase"] == "backward")
        parts[sums] = report["peak"]["categories"]
    # Sums of 4 bytes in place of gradients of 2; blocks are multiples of 512 bytes.
    assert peaks["fp32"] - peaks["never"] == pytest.approx(2 * PARAMETERS, rel=0.05)
    assert parts["fp32"]["gradients"] == pytest.approx(4 * PARAMETERS, rel=0.01)
