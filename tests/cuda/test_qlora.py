"""QLoRA on the emulated GPU: bitsandbytes' 4-bit weights and 8-bit optimizer, with their values."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("bitsandbytes")

from tests.cuda.balance import Balance, report_of
from tests.cuda.emulated import device, run
from tests.cuda.test_callback import Runs, facts_of, snapshot_of

pytestmark = [pytest.mark.slow, pytest.mark.trl]

_FOUR: dict[str, Any] = {"lora": True, "four_bits": {}}
WATCHED: dict[str, dict[str, Any]] = {
    "qlora": {**_FOUR, "settings": {"gradient_checkpointing": True}},
    "qlora-double-kl": {**_FOUR, "four_bits": {"bnb_4bit_use_double_quant": True}, "settings": {"beta": 0.04}},
    "qlora-8bit-adamw": {**_FOUR, "settings": {"optim": "adamw_bnb_8bit"}},
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("qlora")
    asked = [{"name": name, **case} for name, case in WATCHED.items()]
    # Second: bitsandbytes keeps the embedding of a model that its 8-bit optimizer has stepped, for good.
    asked.insert(1, {**asked[0], "name": "alone", "watch": False})
    told: Runs = run("grpo_runs", {"folder": str(folder), "cases": asked}, env=device())
    return {name: {**one, "snapshot": snapshot_of(folder, name)} for name, one in told.items()}


@pytest.mark.parametrize("name", WATCHED)
def test_it_learns_from_losses_that_are_numbers(runs: Runs, name: str) -> None:
    assert runs[name]["error"] is None
    steps = [line for line in runs[name]["logs"] if "reward_std" in line]
    assert len(steps) == 2
    for step in steps:
        assert math.isfinite(step["loss"])
        assert step["reward_std"] > 0
        assert 0 < step["grad_norm"] < 1e3
    assert runs[name]["moved"]


def test_training_is_the_same_to_the_bit_without_the_callback(runs: Runs) -> None:
    watched, alone = runs["qlora"], runs["alone"]
    for told in ("logs", "parameters", "counters"):
        assert watched[told] == alone[told]


@pytest.mark.parametrize("name", WATCHED)
def test_categories_add_up_and_weights_are_packed(
    runs: Runs, name: str, row: Callable[[str, Balance], None]
) -> None:
    facts, report = facts_of(runs[name]), report_of(runs[name]["snapshot"])
    balance = Balance.of(report, runs[name]["counters"])
    row(f"callback {name}", balance)
    balance.check()
    assert not [note for note in report["notes"] if "bitsandbytes" in note]
    held = next(p for p in report["phases"] if p["phase"] == "optimizer_step")["categories"]
    assert facts.policy_bytes <= held["weights"] <= facts.policy_bytes + 512 * 200  # blocks are rounded up
