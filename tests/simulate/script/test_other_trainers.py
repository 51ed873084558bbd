"""Scripts with trainers other than GRPO's: RLOO, SFT in a subclass, transformers' own, a sequence-to-sequence one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.trl, pytest.mark.slow]

RLOO = """
import sys
from datasets import Dataset
from transformers import AutoTokenizer
from trl import RLOOConfig, RLOOTrainer


class Mine(RLOOTrainer):
    pass


Mine(
    sys.argv[1],
    lambda completions, **_: [0.0] * len(completions),
    RLOOConfig(
        "out", per_device_train_batch_size=4, num_generations=4, max_completion_length=21, optim="adamw_torch",
        report_to="none",
    ),
    train_dataset=Dataset.from_list([{"prompt": "abcd" * 11}] * 8),
    processing_class=AutoTokenizer.from_pretrained(sys.argv[1]),
).train()
"""


def _simulated(text: str, folder: Path, model: str) -> dict[str, Any]:
    from memprof.simulate.script.script import simulate_script

    script = folder / "train.py"
    script.write_text(text)
    return simulate_script(script, [model], {}, stacks=False)


def _figures(raw: dict[str, Any]) -> dict[str, Any]:
    from memprof.analysis.analysis import analyze
    from memprof.snapshot.reader import snapshot_from_raw

    report = analyze(snapshot_from_raw(raw)).to_dict()
    return {name: report["peak"][name] for name in ("allocated_bytes", "reserved_bytes", "categories", "phase")}


def test_a_subclass_of_rloos_trainer(tiny: str, settings_for: Any, tmp_path: Path) -> None:
    from memprof.config.from_recording import settings_like
    from memprof.simulate.run import simulate_settings

    raw = _simulated(RLOO, tmp_path, tiny)
    assert any("own Mine was built and trained" in note for note in raw["memprof"]["notes"])
    settings = settings_for(trainer="rloo", beta=0.05)  # TRL's default, which the script leaves
    assert _figures(raw) == _figures(simulate_settings(settings, stacks=False))
    again = settings_like({"kind": "simulated", "config": raw["memprof"]["config"]}).settings
    assert (again.trainer, again.beta) == ("rloo", 0.05)
