"""Train with TRL on the CPU, follow the advice of the recording, and compare what it saves with what was predicted.

    python -m benchmarks.advice real --cache FOLDER --out benchmarks/results/cpu/advice.json

The advice of ``memprof advise`` is taken from the recording alone: model, adapter and lengths come out of the file.
Then every change is made and the run is trained again, recorded again, and its peak taken.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from benchmarks.advice.results import FIRST, ONLY, OUT, Rows, fill, row_of

WORDS = [f"w{i}" for i in range(400)]

# Trained for real. Sizes are small, and all different.
REAL: dict[str, dict[str, Any]] = {
    "small Llama, full with a reference": {
        "args": {"beta": 0.05, "gradient_checkpointing": False, "optim": "adamw_torch"},
    },
    "small Llama, LoRA": {
        "lora": 8, "args": {"beta": 0.05, "gradient_checkpointing": False, "per_device_train_batch_size": 8},
    },
    "small Llama, checkpointing, accumulated, two generations a batch": {
        "args": {
            "gradient_checkpointing": True, "gradient_accumulation_steps": 2, "steps_per_generation": 4, "beta": 0.0,
        },
    },
    "SmolLM2-135M, full with a reference": {
        "smollm2": True, "args": {"beta": 0.05, "gradient_checkpointing": False, "max_completion_length": 40},
    },
}  # fmt: skip


def _model(cache: Path, smollm2: bool) -> Path:
    if smollm2:
        from memprof.demo.model import prepare_checkpoint

        found = prepare_checkpoint(cache)
        if not found.real:
            sys.exit(f"no SmolLM2 here: {found.note}")
        return found.path
    path = cache / "small-llama"
    if not path.is_dir():
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=4096, hidden_size=192, intermediate_size=520, num_hidden_layers=6, num_attention_heads=6,
            num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=True, bos_token_id=1,
            eos_token_id=2, pad_token_id=0,
        )  # fmt: skip
        LlamaForCausalLM(config).save_pretrained(path)
        _words().save_pretrained(path)
    return path


def _words() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["<pad>", "<s>", "</s>", "<unk>", *WORDS]
    core = Tokenizer(models.WordLevel(vocab={word: i for i, word in enumerate(names)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def _reward(completions: list[str], **_: Any) -> list[float]:
    return [sum(map(ord, text)) % 97 / 97 for text in completions]


def train(case: Mapping[str, Any], changes: Mapping[str, Any], cache: Path) -> dict[str, Any]:
    """Train two steps of a case with changes of advice made, the second one recorded; returns the report."""
    from memprof import analyze

    with tempfile.TemporaryDirectory(prefix="memprof-advice-") as folder:
        return analyze(_train(case, changes, cache, Path(folder))).to_dict()


def _train(case: Mapping[str, Any], changes: Mapping[str, Any], cache: Path, folder: Path) -> Path:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    from memprof import MemProfCallback

    values = {
        "output_dir": str(folder), "max_steps": 2, "per_device_train_batch_size": 4, "num_generations": 4,
        "max_completion_length": 96, "learning_rate": 1e-4, "bf16": False, "use_cpu": True, "optim": "adamw_torch",
        "dataloader_pin_memory": False, "seed": 3, "save_strategy": "no", "report_to": "none", "disable_tqdm": True,
        **case["args"],
    }  # fmt: skip
    changed = dict(changes)
    rank = changed.pop("lora_r", case.get("lora"))
    changed.pop("lora_target_modules", None)
    if (length := changed.pop("completion_length", None)) is not None:
        values["max_completion_length"] = length
    values |= changed
    selective = values["gradient_checkpointing"] == "selective"
    values["gradient_checkpointing"] = bool(values["gradient_checkpointing"])
    # Completions end at their limit, so that the runs differ in nothing but what was changed.
    values["generation_kwargs"] = {"min_new_tokens": values["max_completion_length"]}
    adapter = None
    if rank is not None:
        from peft import LoraConfig

        adapter = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
    prompts = [" ".join(WORDS[(7 * i + 3 * j) % 400] for j in range(24)) for i in range(32)]
    trainer = GRPOTrainer(
        model=str(_model(cache, bool(case.get("smollm2")))),
        reward_funcs=[_reward],
        args=GRPOConfig(**values),
        train_dataset=Dataset.from_list([{"prompt": p} for p in prompts]),
        callbacks=[MemProfCallback(output_dir=folder / "out", steps=[2], report=False)],
        peft_config=adapter,
    )
    if selective:
        from trl.models import enable_selective_activation_checkpointing

        enable_selective_activation_checkpointing(trainer.model)
    trainer.train()
    return next((folder / "out").glob("*.pickle"))


def real(cache: Path, first: int, wanted: Sequence[str], rows: Rows, keep: Callable[[Rows], None]) -> None:
    """Train each case, take advice, and train again with each change (the ``first`` of each run).

    What is in ``rows`` is not done again.
    """
    from memprof.advice.evaluate import evaluate_advice
    from memprof.config.from_recording import place_model, settings_like
    from memprof.plan.subprocess_runner import runner
    from memprof.report import Report
    from memprof.report.codec import from_builtins

    for name, case in REAL.items():
        if wanted and not any(word in name for word in wanted):
            continue
        report = train(case, {}, cache)
        likeness = settings_like(report["source"])
        settings = place_model(likeness, cache / "models")
        with runner(None, workers=1) as machine:
            found = evaluate_advice(from_builtins(report, Report), settings, machine, seconds=1e9)
        changes = _changes(report)
        measured = report["peak"]["allocated_bytes"]
        for place, entry in enumerate([e for e in found.entries if e.basis == "simulated"][:first]):
            if any((r["run"], r["id"]) == (name, entry.id) for r in rows):
                continue
            after = train(case, changes[entry.id], cache)["peak"]["allocated_bytes"]
            rows.append(row_of(name, "trained", entry, place, measured, found.base.peak_bytes, measured - after))
            keep(rows)


def _changes(report: dict[str, Any]) -> dict[str, Mapping[str, Any]]:
    from memprof.advice.candidates import candidates_for
    from memprof.advice.recorded_run import run_of
    from memprof.report import Report
    from memprof.report.codec import from_builtins

    return {c.id: c.changes for c in candidates_for(run_of(from_builtins(report, Report)))}


@click.command(help=__doc__)
@ONLY
@click.option("--cache", type=click.Path(path_type=Path), default=Path(tempfile.gettempdir()) / "memprof-advice-cache")
@FIRST
@OUT
def main(only: tuple[str, ...], cache: Path, first: int, out: Path | None) -> None:
    fill("real", out, lambda rows, keep: real(cache, first, only, rows, keep))
