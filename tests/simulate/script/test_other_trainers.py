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


def _simulated(text: str, folder: Path, model: str, **changes: Any) -> dict[str, Any]:
    from memprof.simulate.script.script import simulate_script

    script = folder / "train.py"
    script.write_text(text)
    return simulate_script(script, [model], changes, stacks=False, allow_unsimulated=True)


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

SFT = """
import sys
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig
from trl import SFTConfig, SFTTrainer


class Mine(SFTTrainer):
    def compute_loss(self, *args, **kwargs):
        return super().compute_loss(*args, **kwargs)


four = BitsAndBytesConfig(
    load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype="float16"
)
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], quantization_config=four, dtype=torch.bfloat16)
Mine(
    model,
    args=SFTConfig(
        "out", per_device_train_batch_size=4, optim="adamw_torch", report_to="none", max_length=None,
        torch_compile=True,
    ),
    train_dataset=Dataset.from_list([{"input_ids": [0] * 32}] * 8),
    processing_class=AutoTokenizer.from_pretrained(sys.argv[1]),
    peft_config=LoraConfig(r=4, lora_dropout=0.05, target_modules="all-linear"),
).train()
"""

PLAIN = """
import sys
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments
from transformers import DataCollatorForLanguageModeling

tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
Trainer(
    AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="float32"),
    TrainingArguments("out", per_device_train_batch_size=4, optim="adamw_torch", report_to="none", bf16=True),
    data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
    train_dataset=Dataset.from_list([{"input_ids": [1] * 32, "attention_mask": [1] * 32}] * 8),
).train()
"""

SEQ2SEQ = """
import sys
from datasets import Dataset
from transformers import AutoTokenizer, DataCollatorForSeq2Seq, Seq2SeqTrainer, Seq2SeqTrainingArguments
from transformers import T5Config, T5ForConditionalGeneration

tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
model = T5ForConditionalGeneration(
    T5Config(d_model=48, d_kv=8, d_ff=136, num_layers=2, num_heads=6, vocab_size=1000, decoder_start_token_id=0)
)
Seq2SeqTrainer(
    model,
    Seq2SeqTrainingArguments("out", per_device_train_batch_size=4, optim="adamw_torch", report_to="none"),
    data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
    train_dataset=Dataset.from_list([{"input_ids": [1] * 32, "labels": [1] * 9}] * 8),
).train()
"""


def _report(raw: dict[str, Any]) -> dict[str, Any]:
    from memprof.analysis.analysis import analyze
    from memprof.snapshot.reader import snapshot_from_raw

    found: dict[str, Any] = analyze(snapshot_from_raw(raw)).to_dict()
    return found


def test_a_subclass_of_sfts_trainer_in_4_bits(tiny: str, settings_for: Any, tmp_path: Path) -> None:
    from memprof.simulate.run import simulate_settings

    raw = _simulated(SFT, tmp_path, tiny)
    notes = " ".join(raw["memprof"]["notes"])
    assert "own Mine was built and trained" in notes
    assert "torch_compile is not simulated" in notes
    settings = settings_for(
        trainer="sft", max_length=32, dtype="bfloat16", lora_r=4, lora_dropout=0.05, load_in_4bit=True,
        bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype="float16",
    )  # fmt: skip
    mine, theirs = _report(raw), _report(simulate_settings(settings, stacks=False))
    for name in ("weights", "adapters", "optimizer_state", "gradients"):
        assert mine["own_peaks"][name] == theirs["own_peaks"][name], name
    assert mine["own_peaks"]["activations"] == theirs["own_peaks"]["activations"] > 0


def test_what_cannot_change_a_scripts_trainer_is_refused(tiny: str, tmp_path: Path) -> None:
    from memprof.errors import UsageError

    words = "--num-generations changes nothing here: the script trains with Trainer, whose arguments are its own"
    with pytest.raises(UsageError, match=words):
        _simulated(PLAIN, tmp_path, tiny, num_generations=4, padding="worst")


def test_transformers_own_trainer(tiny: str, tmp_path: Path) -> None:
    from tests.simulate.test_closed_forms import PARAMETERS, ROPE

    found = _report(_simulated(PLAIN, tmp_path, tiny))
    assert {p["phase"] for p in found["phases"]} >= {"forward", "backward", "optimizer_step"}
    assert found["own_peaks"]["optimizer_state"] >= 8 * PARAMETERS
    assert found["own_peaks"]["weights"] >= 4 * PARAMETERS + ROPE
    assert found["own_peaks"]["loss_logits"] >= 4 * 32 * 1000 * 4  # float32 logits, in full


def test_a_sequence_to_sequence_trainer(tiny: str, tmp_path: Path) -> None:
    found = _report(_simulated(SEQ2SEQ, tmp_path, tiny))
    assert any("own Seq2SeqTrainer was built and trained" in note for note in found["notes"])
    assert {p["phase"] for p in found["phases"]} >= {"forward", "backward", "optimizer_step"}
    assert found["own_peaks"]["weights"] > 0
    assert found["own_peaks"]["optimizer_state"] >= 2 * found["own_peaks"]["weights"]
