"""What advice predicts beside what happens when it is followed.

    python -m benchmarks.advice real --cache FOLDER --out benchmarks/results/cpu/advice.json
    python -m benchmarks.advice simulated --out benchmarks/results/cpu/advice.json
    python -m benchmarks.advice combination --out benchmarks/results/cpu/advice.json

``real`` trains with TRL on the CPU, callback attached, and takes the advice of ``memprof advise`` from that recording
alone: model, adapter and lengths come out of the file. Then every change is made and the run is trained again, recorded
again, and its peak taken. ``simulated`` does the same at full size on fake tensors, where a simulated prediction is its
own execution; what is compared there are the *estimates*, which know nothing but the unchanged run's sizes.
``combination`` makes a full fine-tune of Qwen2.5-7B fit 24 GB.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.measure import environment

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

# At full size, on fake tensors.
_QWEN = "Qwen/Qwen2.5-1.5B-Instruct"
SIMULATED: dict[str, dict[str, Any]] = {
    "Qwen2.5-1.5B, full with a reference, no checkpointing": {
        "model": _QWEN, "beta": 0.04, "gradient_checkpointing": False, "prompt_length": 256, "completion_length": 768,
    },
    "Qwen2.5-1.5B, full in bfloat16, checkpointing": {
        "model": _QWEN, "dtype": "bfloat16", "prompt_length": 256, "completion_length": 768,
    },
    "Qwen2.5-1.5B, LoRA in bfloat16, logits in full": {
        "model": _QWEN, "dtype": "bfloat16", "lora_r": 16, "recipe": "trl-full-logits", "prompt_length": 256,
        "completion_length": 768,
    },
    "Llama-3.1-8B, LoRA in bfloat16, checkpointing": {
        "model": "meta-llama/Llama-3.1-8B-Instruct", "dtype": "bfloat16", "lora_r": 16, "prompt_length": 512,
        "completion_length": 3584,
    },
    "SmolLM2-135M, full, padded batches, no checkpointing": {
        "model": "HuggingFaceTB/SmolLM2-135M-Instruct", "gradient_checkpointing": False, "padding": "worst",
        "optim": "adamw_torch", "prompt_length": 128, "completion_length": 512,
    },
}  # fmt: skip


# -- real runs ---------------------------------------------------------------------------------------------------------


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


Rows = list[dict[str, Any]]


def real(cache: Path, first: int, wanted: list[str], rows: Rows, keep: Callable[[Rows], None]) -> None:
    """Each case trained, advised, and trained again with each change (the ``first`` of each run); what is in ``rows``
    is not done again."""
    from memprof.advice.evaluate import evaluate_advice
    from memprof.config.from_recording import place_model, settings_like
    from memprof.plan.subprocess_runner import runner

    for name, case in REAL.items():
        if wanted and not any(word in name for word in wanted):
            continue
        report = train(case, {}, cache)
        likeness = settings_like(report["source"])
        settings = place_model(likeness, cache / "models")
        with runner(None, workers=1) as machine:
            found = evaluate_advice(report, settings, machine, seconds=1e9)
        changes = _changes(report)
        measured = report["peak"]["allocated_bytes"]
        for place, entry in enumerate([e for e in found.entries if e["basis"] == "simulated"][:first]):
            if any((r["run"], r["id"]) == (name, entry["id"]) for r in rows):
                continue
            after = train(case, changes[entry["id"]], cache)["peak"]["allocated_bytes"]
            rows.append(_row(name, "trained", entry, place, measured, found.base["peak_bytes"], measured - after))
            keep(rows)


def _changes(report: dict[str, Any]) -> dict[str, Mapping[str, Any]]:
    from memprof.advice.candidates import candidates_for
    from memprof.advice.estimate import run_of

    return {c.id: c.changes for c in candidates_for(run_of(report))}


def _row(
    run: str, by: str, entry: Mapping[str, Any], place: int, measured: int, simulated: int, saved: int
) -> dict[str, Any]:
    predicted = int(entry["saves_bytes"])
    return {
        "run": run, "id": entry["id"], "rank": place + 1, "basis": entry["basis"], "executed": by,
        "peak_bytes": measured, "simulated_peak_bytes": simulated, "predicted_bytes": predicted, "saved_bytes": saved,
        "error": (predicted - saved) / abs(saved) if saved else None,
        "error_of_peak": (predicted - saved) / measured,
    }  # fmt: skip


# -- simulated runs ----------------------------------------------------------------------------------------------------


def simulated(machine: Any, first: int, wanted: list[str], rows: Rows, keep: Callable[[Rows], None]) -> None:
    """Estimates from the unchanged runs' sizes (``first`` of each) beside simulations of the changed ones."""
    from memprof.advice.estimate import Estimate, entry, estimate
    from memprof.advice.evaluate import run_of_row
    from memprof.advice.recorded_run import Run
    from memprof.config.catalogue import find_config
    from memprof.config.model_shape import ModelShape
    from memprof.config.settings import Settings
    from memprof.errors import MemprofError

    def saving(found: Estimate) -> int:
        return -int(found.saves or 0)

    for name, values in SIMULATED.items():
        if wanted and not any(word in name for word in wanted):
            continue
        settings = Settings(**values)
        base = machine.run([settings])[0]
        run = run_of_row(base, Run(peaks=(), shape=ModelShape.of(find_config(settings.model))), settings)
        found = [e for e in estimate(run) if e.candidate.changes and e.saves and not e.candidate.device]
        for place, e in enumerate(sorted(found, key=saving)[:first]):
            if any((r["run"], r["id"]) == (name, e.candidate.id) for r in rows):
                continue
            try:
                after = machine.run([settings.with_(**e.candidate.changes)])[0]["peak_bytes"]
            except MemprofError as error:
                print(f"{name}: {e.candidate.id}: {error}", file=sys.stderr)
                continue
            before = base["peak_bytes"]
            rows.append(_row(name, "simulated", entry(e, run), place, before, before, before - after))
            keep(rows)


def combination(machine: Any) -> dict[str, Any]:
    """A full fine-tune of Qwen2.5-7B, made to fit 24 GB; the set simulated once more on its own.

    ``machine`` simulates on that card (:class:`memprof.plan.subprocess_runner.Runner`).
    """
    from memprof.advice.combine import combine
    from memprof.advice.recorded_run import Run
    from memprof.config.catalogue import find_config
    from memprof.config.model_shape import ModelShape
    from memprof.config.settings import Settings
    from memprof.simulate.fit import run_row

    settings = Settings(model="Qwen/Qwen2.5-7B-Instruct", prompt_length=512, completion_length=512)
    like = Run(peaks=(), settings=settings, shape=ModelShape.of(find_config(settings.model)))
    found = combine(settings, "24GB", machine, like, seconds=1e9)
    before = machine.run([settings])[0]
    again = run_row(found.settings.to_dict(), "24GB")
    return {
        **found.to_dict(), "allocated_before_bytes": before["peak_bytes"], "simulations": machine.executed,
        "confirmed": {"fits": again["fits"], "needed_bytes": again["device_peak_bytes"]},
    }  # fmt: skip


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Median and largest error of the predicted savings, and how many of each run's first three have a wrong sign."""
    errors = [abs(r["error"]) for r in rows if r["error"] is not None]
    first = [r for r in rows if r["rank"] <= 3]
    return {
        "changes": len(rows),
        "median_error": statistics.median(errors) if errors else None,
        "largest_error": max(errors, default=None),
        "largest_error_of_peak": max((abs(r["error_of_peak"]) for r in rows), default=None),
        "wrong_sign_in_first_three": sum(r["predicted_bytes"] * r["saved_bytes"] < 0 for r in first),
    }


def main() -> None:
    """Run one part, or what is missing of it, and put it into the result file beside the others."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["real", "simulated", "combination"])
    parser.add_argument("--only", nargs="*", default=[], help="runs whose name holds one of these words")
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "memprof-advice-cache")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--first", type=int, default=8, help="so many changes of each run")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    before = json.loads(given.out.read_text(encoding="utf-8")) if given.out is not None and given.out.is_file() else {}
    if given.part == "combination":
        from memprof.plan.subprocess_runner import runner

        with runner("24GB", workers=given.workers) as machine:
            _save({**before, "combination": combination(machine)}, given.out)
        return
    rows: Rows = list(before.get(given.part, {}).get("rows", []))

    def keep(found: Rows) -> None:
        print(json.dumps(found[-1]), flush=True)
        _save({**before, given.part: {"rows": found, "summary": summary(found)}}, given.out)

    if given.part == "real":
        real(given.cache, given.first, given.only, rows, keep)
    else:
        from memprof.plan.subprocess_runner import runner

        with runner(None, workers=given.workers) as machine:
            simulated(machine, given.first, given.only, rows, keep)
    print(json.dumps(summary(rows), indent=1))


def _save(result: dict[str, Any], path: Path | None) -> None:
    text = json.dumps({**result, "environment": environment()}, indent=1)
    if path is None:
        print(text)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
