"""The lean trainer's techniques on CUDA's own allocator: each recording balances, late events or not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from memprof import analyze, load_snapshot
from tests.closed_forms import Facts
from tests.cuda.balance import Balance, report_of
from tests.cuda.emulated import device, run

pytestmark = [pytest.mark.slow, pytest.mark.trl]

Row = Callable[[str, Balance], None]
_CHECKPOINTED = {"gradient_checkpointing": True}
# bf16 weights under AdamW: stochastic rounding is on wherever all parameters are trained.
CASES: dict[str, dict[str, Any]] = {
    "offloaded": {"settings": {"checkpointing": "offloaded", "max_tokens_per_piece": 60, "tiled_mlp": 16}},
    "host-reference": {"settings": {"beta": 0.04, "reference": "host", "max_tokens_per_piece": 120}},
    "selective": {"lora": True, "settings": {"checkpointing": "selective"}},
    "selective, raises": {"lora": True, "settings": {"checkpointing": "selective", "on_oom": "raise"}},
    "generation": {"lora": True, "settings": {
        "generation_batch": 2, "cache_implementation": "offloaded", "checkpointing": "mlp"}},
    "rolling": {"lora": True, "settings": {
        "generation": "paged", "generation_batch": 2, "generation_kwargs": {}, "checkpointing": "mlp"}},
    "shared-prefix": {"lora": True, "settings": {"beta": 0.04, "prefix_sharing": True, "packing": True}},
}  # fmt: skip
LATE_US = 2000


def asked(name: str) -> dict[str, Any]:
    settings = {**_CHECKPOINTED, **CASES[name]["settings"]}
    return {"name": name, "lean": True, "prompt": 48, **CASES[name], "settings": settings}


def train(folder: Path, names: list[str], **emulated: Any) -> dict[str, Any]:
    told: dict[str, Any] = run(
        "grpo_runs", {"folder": str(folder), "cases": [asked(name) for name in names]}, env=device(**emulated)
    )
    return {"folder": folder, **told}


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return train(tmp_path_factory.mktemp("lean"), list(CASES))


@pytest.fixture(scope="module")
def late(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Copies to and from the host end after the main stream has gone on."""
    return train(tmp_path_factory.mktemp("late"), ["offloaded", "host-reference"], event_delay_us=LATE_US)


def report(told: dict[str, Any], name: str) -> dict[str, Any]:
    return report_of(snapshot(told, name))


def snapshot(told: dict[str, Any], name: str) -> Path:
    path: Path = told["folder"] / name / "_memprof" / "step-000002.rank-0.pickle"
    return path


@pytest.mark.parametrize("name", CASES)
def test_each_technique_balances(told: dict[str, Any], name: str, row: Row) -> None:
    balance = Balance.of(report(told, name), told[name]["counters"])
    row(f"lean {name}", balance)
    balance.check()
    assert {"generate", "reward", "forward", "backward", "optimizer_step"} <= set(balance.phases)


@pytest.mark.parametrize("name", ["offloaded", "host-reference"])
def test_with_late_copies_too(late: dict[str, Any], name: str, row: Row) -> None:
    balance = Balance.of(report(late, name), late[name]["counters"])
    row(f"lean {name}, late events", balance)
    balance.check()


@pytest.mark.parametrize("name", CASES)
def test_what_the_optimizer_step_holds_has_closed_forms(told: dict[str, Any], name: str) -> None:
    facts = Facts(**told[name]["facts"])
    steps = [p for p in analyze(load_snapshot(snapshot(told, name))).phases if p.phase == "optimizer_step"]
    assert [phase.step for phase in steps] == [1, 2]
    for phase in steps:
        held = phase.categories_requested
        assert held["weights"] == facts.policy_bytes
        assert held["adapters"] == facts.adapter_bytes
        assert held["gradients"] == facts.trainable_bytes
    # At the first step's peak some states are still to be made. With stochastic rounding counters are on the host.
    assert 0 <= facts.optimizer_bytes - held["optimizer_state"] <= 4 * facts.trainable_tensors


def test_a_run_that_would_survive_holds_what_one_that_raises_does(told: dict[str, Any]) -> None:
    """It had an optimizer's state of four bytes more: its last backward was recorded as the optimizer's step."""
    found, without = report(told, "selective"), report(told, "selective, raises")
    assert told["selective"]["counters"] == told["selective, raises"]["counters"]
    assert found["peak"]["categories_requested"] == without["peak"]["categories_requested"]
    assert found["own_peaks"] == without["own_peaks"]
    for one in (found, without):
        assert [phase["phase"] for phase in one["phases"]][-4:] == ["forward", "backward", "optimizer_step", "other"]


def test_a_reference_in_host_memory_is_on_the_device_by_layers_only(told: dict[str, Any]) -> None:
    found, facts = report(told, "host-reference"), Facts(**told["host-reference"]["facts"])
    assert found["host"]["offloaded"]["reference_model"] >= facts.policy_bytes - 128
    assert 0 < found["own_peaks"]["reference_model"] < facts.policy_bytes
    assert found["peak"]["categories"]["reference_model"] == 0


@pytest.mark.parametrize("name", CASES)
def test_a_run_that_is_over_leaves_nothing(told: dict[str, Any], name: str) -> None:
    assert told[name]["left"] < 2**16
