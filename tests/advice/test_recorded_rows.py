"""Real runs of TRL's SFT and DPO trainers, recorded by the callback, and simulated from the recording alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.trl, pytest.mark.slow, pytest.mark.usefixtures("only_new_tensors")]

TOKENS = 40
COMMON = {
    "max_steps": 2, "per_device_train_batch_size": 4, "use_cpu": True, "bf16": False, "save_strategy": "no",
    "report_to": "none", "disable_tqdm": True, "dataloader_pin_memory": False, "max_length": 128,
}  # fmt: skip


def _trainer(kind: str, folder: Path, callbacks: list[Any], **settings: Any) -> Any:
    """A subclass, as users write them: its name says nothing."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM
    from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

    from tests.integrations.runs import checkpoint, tokenizer

    path = checkpoint(folder)
    answer = " ".join(["w5"] * 9)
    rows: dict[str, list[Any]] = {
        "sft": [{"input_ids": [7] * TOKENS}],
        "dpo": [{"prompt": "w3 " * 30, "chosen": answer, "rejected": answer}],
    }
    base, config = {"sft": (SFTTrainer, SFTConfig), "dpo": (DPOTrainer, DPOConfig)}[kind]
    mine = type("Mine", (base,), {})
    return mine(
        model=AutoModelForCausalLM.from_pretrained(path, dtype="float32"),
        args=config(str(folder / "out"), **COMMON, **settings),
        train_dataset=Dataset.from_list(rows[kind] * 8),
        processing_class=tokenizer(),
        callbacks=callbacks,
    )


def _recorded(kind: str, folder: Path) -> dict[str, Any]:
    """The report of the second step."""
    import torch

    from memprof import MemProfCallback, analyze

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    watch = MemProfCallback(output_dir=folder / "watched", steps=[2], report=False)
    try:
        _trainer(kind, folder, [watch], gradient_checkpointing=False).train()
    finally:
        torch.set_num_threads(threads)
    report: dict[str, Any] = analyze(next((folder / "watched").glob("*.pickle"))).to_dict()
    return report


@pytest.mark.parametrize(("kind", "rows"), [("sft", 4), ("dpo", 8)])
def test_a_recording_is_simulated_as_it_was(
    kind: str, rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from click.testing import CliRunner

    from memprof.cli import main

    report = _recorded(kind, tmp_path)
    config, setup = report["source"]["config"], report["source"]["setup"]
    assert (config["trainer"], config["trainer_kind"]) == ("Mine", kind)
    assert setup["batches"] == [[2, rows, TOKENS, 0]]
    assert setup.get("completion_share") == (0.25 if kind == "dpo" else None)
    monkeypatch.setenv("MEMPROF_CACHE", str(tmp_path / "cache"))
    source = tmp_path / "report.json"
    source.write_text(json.dumps(report))
    done = CliRunner().invoke(main, ["simulate", "--like", str(source), "--set", "max_length=20", "--json", "-"])
    assert done.exit_code == 0, done.output
    answer = json.loads(done.stdout)
    assert answer["unchanged"]["assumed"] == []
    measured, unchanged, shorter = next(row for row in answer["rows"] if row["id"] == "total")["at_peak"]
    assert unchanged == pytest.approx(measured, abs=256)  # a few scalars of this process are not the run's
    assert shorter < unchanged
    refused = CliRunner().invoke(main, ["simulate", "--like", str(source), "--set", "num_generations=4"])
    assert refused.exit_code == 2
    assert f"--num-generations 4 changes nothing here: --trainer {kind} generates nothing." in refused.stderr
