"""The words of the changes: every row is complete, and some run is advised so."""

from __future__ import annotations

import re
from typing import Any

import pytest

from memprof.advice.candidate import CostRank, change_texts
from memprof.advice.candidates import candidates_for
from memprof.advice.recorded_run import AdvisedRun, PhaseMaximum
from memprof.config.settings import Settings

# Together these are advised everything.
_RUNS: tuple[dict[str, Any], ...] = (
    {"gradient_checkpointing": False, "beta": 0.1, "attn": "math", "recipe": "trl-full-logits", "gpus": 2},
    {"optim": "adamw_torch"},
    {"padding": "worst", "prompt_length": 4096, "steps_per_generation": 8},
    {"recipe": "lean", "max_tokens_per_piece": 8192, "prompt_length": 256, "completion_length": 256, "lora_r": 8},
    {"generation": "vllm"},
    {"trainer": "dpo"},
)


@pytest.mark.parametrize("name", change_texts())
def test_a_row_has_what_the_head_of_the_file_says(name: str) -> None:
    row = change_texts()[name]
    assert isinstance(getattr(CostRank, row.cost_rank), int)
    assert not row.action.endswith(".")
    assert row.costs.endswith((".", "]]", "}"))


def test_every_row_is_advised_to_some_run() -> None:
    runs = [
        AdvisedRun((PhaseMaximum("forward", 1, {}),), Settings(model="m", **settings), idle_bytes=1)
        for settings in _RUNS
    ]
    found = [candidate for run in runs for candidate in candidates_for(run)]
    names = {re.sub(r"micro_batch_\d+", "micro_batch", candidate.id) for candidate in found}
    names |= {"bf16_frozen_weights" for candidate in found if "(they are frozen)" in candidate.action}
    assert set(change_texts()) <= names
    assert not re.search(r"\[\[|\]\]|{[a-z]+}", " ".join(c.action + c.costs + c.setting for c in found))
