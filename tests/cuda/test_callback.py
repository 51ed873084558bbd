"""The callback on CUDA's own allocator: TRL's trainer, full and LoRA, checkpointed and not, against the counters."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from memprof import analyze, load_snapshot
from memprof.snapshot.unpickle import read_plain
from memprof.snapshot.writer import save_snapshot
from tests.closed_forms import Facts
from tests.cuda.balance import Balance, report_of
from tests.cuda.emulated import device, run

pytestmark = [pytest.mark.slow, pytest.mark.trl]

_CHECKPOINTED = {"gradient_checkpointing": True}
WATCHED: dict[str, dict[str, Any]] = {
    "full": {},
    "full-fp32-kl": {"dtype": "float32", "settings": {"beta": 0.04, **_CHECKPOINTED}},
    "lora": {"lora": True, "settings": _CHECKPOINTED},
    "lora-kl": {"lora": True, "settings": {"beta": 0.04}},
    "accumulated": {
        "sequences": 8, "settings": {"gradient_accumulation_steps": 2, "max_grad_norm": 0.5, **_CHECKPOINTED}
    },
}  # fmt: skip
EXPANDABLE = {"full-expandable": WATCHED["full"], "lora-kl-expandable": WATCHED["lora-kl"]}
_COMMON = {"load", "generate", "reward", "forward", "backward", "optimizer_step"}

# These run once more without the callback.
TWINS = ("full", "full-fp32-kl", "lora")

Runs = dict[str, dict[str, Any]]


def train(folder: Path, cases: dict[str, dict[str, Any]], *, alone: bool = False, expandable: bool = False) -> Runs:
    """Run the cases in one process; with ``alone`` the ``TWINS`` once more without the callback."""
    asked: list[dict[str, Any]] = [{"name": name, **case} for name, case in cases.items()]
    if alone:
        asked += [{**case, "name": f"{case['name']}-alone", "watch": False} for case in asked if case["name"] in TWINS]
    runs: Runs = run("grpo_runs", {"folder": str(folder), "cases": asked}, env=device(expandable=expandable))
    return {name: {**told, "snapshot": snapshot_of(folder, name)} for name, told in runs.items()}


def snapshot_of(folder: Path, name: str) -> Path:
    return folder / name / "_memprof" / "step-000002.rank-0.pickle"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return train(tmp_path_factory.mktemp("runs"), WATCHED, alone=True)


@pytest.fixture(scope="module")
def expandable(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return train(tmp_path_factory.mktemp("expandable"), EXPANDABLE, expandable=True)


def facts_of(told: dict[str, Any]) -> Facts:
    return Facts(**told["facts"])


@pytest.mark.parametrize("name", WATCHED)
def test_categories_add_up_and_the_peak_is_the_counters(
    runs: Runs, name: str, row: Callable[[str, Balance], None]
) -> None:
    balanced(name, runs[name], row)


@pytest.mark.parametrize("name", EXPANDABLE)
def test_with_expandable_segments_too(expandable: Runs, name: str, row: Callable[[str, Balance], None]) -> None:
    balanced(name, expandable[name], row)
    assert report_of(expandable[name]["snapshot"])["source"]["alloc_conf"] == "expandable_segments:True"


def balanced(name: str, told: dict[str, Any], row: Callable[[str, Balance], None]) -> None:
    report = report_of(told["snapshot"])
    balance = Balance.of(report, told["counters"])
    row(f"callback {name}", balance)
    balance.check()
    assert report["source"]["kind"] == "cuda"
    assert report["max_requested_bytes"] == told["counters"]["requested_bytes"]
    assert report["device_peak"]["reserved_bytes"] == told["counters"]["reserved_bytes"]
    wanted = _COMMON | ({"reference_logprobs"} if "kl" in name else set())
    assert wanted <= set(balance.phases)
    for phase in report["phases"]:
        assert sum(phase["categories"].values()) == phase["peak_bytes"], phase["phase"]


@pytest.mark.parametrize("name", WATCHED)
def test_what_has_a_closed_form_equals_it(runs: Runs, name: str) -> None:
    facts, found = facts_of(runs[name]), analyze(load_snapshot(runs[name]["snapshot"]))
    steps = [phase for phase in found.phases if phase.phase == "optimizer_step"]
    assert [phase.step for phase in steps] == [1, 2]
    for phase in steps:
        held = phase.categories_requested
        assert held["weights"] == facts.policy_bytes
        assert held["adapters"] == facts.adapter_bytes
        assert held["gradients"] == facts.trainable_bytes
        assert held["optimizer_state"] == facts.optimizer_bytes
        reference = facts.policy_bytes if "kl" in name and not facts.adapter_bytes else 0
        assert held["reference_model"] == reference


@pytest.mark.parametrize("name", ["full", "lora", "lora-kl", "accumulated"])
def test_the_cache_of_keys_and_values_equals_its_closed_form(runs: Runs, name: str) -> None:
    facts = facts_of(runs[name])
    assert report_of(runs[name]["snapshot"])["own_peaks"]["kv_cache"] == facts.kv_cache_bytes


@pytest.mark.parametrize("name", WATCHED)
def test_a_bare_pickle_gets_the_same_categories(runs: Runs, name: str) -> None:
    """Neither memprof's own key nor its tags are in the file."""
    path = runs[name]["snapshot"]
    told = analyze(load_snapshot(path)).peak.categories
    guessed = analyze(load_snapshot(bare(path))).peak.categories
    assert sum(guessed.values()) == sum(told.values())
    assert guessed["workspace"] == told["workspace"]
    # The head's fp32 gradient [vocabulary, hidden] may be read as one of hidden states: 1 MiB of these small runs.
    stray = sum(abs(guessed[category] - size) for category, size in told.items()) // 2
    assert stray <= 2**20 + 4096, {category: (told[category], guessed[category]) for category in told}


def bare(path: Path) -> Path:
    """Write the snapshot as somebody without memprof would have."""
    data = read_plain(path)
    del data["memprof"]
    entries = [entry for trace in data["device_traces"] for entry in trace]
    blocks = [block for segment in data["segments"] for block in segment["blocks"]]
    tagged = [thing for thing in (*entries, *blocks) if thing.pop("user_metadata", "")]
    assert tagged
    return save_snapshot(data, path.with_suffix(".bare.pickle"))


@pytest.mark.parametrize("name", TWINS)
def test_training_is_the_same_to_the_bit_without_the_callback(runs: Runs, name: str) -> None:
    watched, alone = runs[name], runs[f"{name}-alone"]
    assert watched["logs"] == alone["logs"]
    assert watched["parameters"] == alone["parameters"]
    assert watched["counters"] == alone["counters"]


@pytest.mark.parametrize("name", WATCHED)
def test_there_was_something_to_learn(runs: Runs, name: str) -> None:
    steps = [line for line in runs[name]["logs"] if "reward_std" in line]
    assert len(steps) == 2
    for step in steps:
        assert step["reward_std"] > 0
        assert step["grad_norm"] > 0
    assert runs[name]["moved"]
