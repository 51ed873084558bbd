"""The first thing to change on real recordings of other people, as an expert would have it."""

from __future__ import annotations

from pathlib import Path

import pytest

from memprof import analyze
from memprof.advice.estimate import estimated_advice
from memprof.cli.advising import estimated

SHARED = Path(__file__).parents[3] / "shared"
# The kind of advice for each file, and words of the line that a reader sees; None where nothing is worth changing.
FIRST = {
    "SYNTHETIC-mosaic-output": (None, ""),  # fabricated: one kind of block, from a hundred lines alike
    "cs336-2.7b-fullstep-ctx128-t26": ("adamw_8bit", "saves 18.95 GiB (an estimate)"),
    "cs336-2.7b-fullstep-ctx512-t26": ("checkpointing", "saves 15.51 GiB of the 66.73 GiB that the next step needs"),
    "cs336-2.7b-fwd-ctx256-amp-t26": ("no_grad", "autocast without its cache"),
    "cs336-2.7b-fwd-ctx512-t26": ("no_grad", "if it trains, turn gradient checkpointing on"),
    "cs336-compile-fwd-ctx256-t26": ("no_grad", "saves 7.44 GiB (an estimate). How"),
    "cs336-medium-infer-ctx512-t211": ("smaller_weights", "bfloat16 instead of float32"),
    "cs336-medium-train-ctx1024-t211": ("checkpointing", "gradients stay the same"),
    "cs336-medium-train-ctx256-t211": ("checkpointing", "gradients stay the same"),
    "cs336-state-only-51g-t26": ("adamw_8bit", "8 bits"),
    "flexgen-opt-oom-t20": ("smaller_weights", "4 bits instead of 16. It saves 7.93 GiB"),
    "flexgen-opt1.3b-a-t20": ("two_copies", "saves 2.64 GiB"),
    "linear-grad-t24": ("left_over", "saves 1.12 GiB"),
    "linear-nograd-t24": ("left_over", "saves 954 MiB"),
    "resnet50-pytorchblog-t22": ("brief_workspace", "It saves at most 128 MiB"),
    "sd-guidance-legacy-list-t22": ("kept_by_passes", "25 passes"),
    "select_n-llama-infer-offload-t21": ("left_over", "saves 1.95 GiB"),
    "sketchkv-llama-kvcache-t24": ("smaller_weights", "saves 6.28 GiB"),  # half of the model alone, not of its cache
    "tomi-opt-toy-t23": (None, ""),  # 17 MiB, nearly all cuBLAS's workspace
}
TRAINED = {
    "r2_full_bf16_tied.after_load": ("checkpointing", "gradients stay the same"),
    "r2_full_bf16_tied.normal": ("checkpointing", "gradients stay the same"),
    "r7_nano_loop.normal": ("checkpointing", "gradients stay the same"),
}
CASES = {
    "min_report_vs_advise": ("made_here", "It saves 2.09 GiB"),
    "min_forward_only_rebound": ("no_grad", "run the forward without gradients"),
    "min_foreach_scratch_advice": ("fused_step", "fused=True"),
}
SETTINGS = {"flexgen-opt-oom-t20": "--compress-weight", "cs336-2.7b-fwd-ctx512-t26": "torch.inference_mode()"}


def _listed() -> list[tuple[str, str | None, str]]:
    folders = (("snapshots", FIRST), ("truth", TRAINED), ("cases4", CASES))
    return [(f"{folder}/{name}", *expected) for folder, rows in folders for name, expected in rows.items()]


@pytest.mark.parametrize(("name", "kind", "words"), _listed())
def test_the_first_thing_to_change_is_an_experts(name: str, kind: str | None, words: str) -> None:
    path = SHARED / f"{name}.pickle"
    if not path.exists():
        pytest.skip("other people's recordings are not here")
    report = analyze(path).to_dict()
    advice = report["advice"]
    assert (advice[0]["id"] if advice else None) == kind
    assert words in report["headline"]["action"]
    assert SETTINGS.get(path.stem, "") in (advice[0]["setting"] if advice else "")


@pytest.mark.parametrize(("name", "kind", "words"), _listed())
def test_report_and_advise_give_one_answer(name: str, kind: str | None, words: str) -> None:
    path = SHARED / f"{name}.pickle"
    if not path.exists():
        pytest.skip("other people's recordings are not here")
    analysis = analyze(path)
    advised = estimated(analysis.report, analysis=analysis)
    assert advised.advice == analysis.report.advice == estimated(analysis.report).advice
    assert advised.headline == analysis.report.headline
    assert estimated_advice(analysis.report, analysis) == analysis.report.advice


def test_every_recording_is_listed() -> None:
    found = {p.stem for folder in ("snapshots", "truth") for p in (SHARED / folder).glob("*.pickle")}
    if not found:
        pytest.skip("other people's recordings are not here")
    assert found <= FIRST.keys() | TRAINED.keys()
