"""Train a tiny model with TRL's GRPO under ``MemProfCallback()``, report and simulate it; say what was seen as JSON.

``benchmarks.versions`` runs this file in an environment of each version of TRL; it imports only what every one has.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "trl", "transformers", "peft", "accelerate", "datasets", "numpy")
WORDS = [f"w{i}" for i in range(500)]
# Four completions of 24 tokens to prompts of 6; each generation serves two optimizer steps, so that the old policy's
# log-probabilities are needed; beta makes the reference's needed. The third and fourth step are recorded.
SETTINGS = {
    "max_steps": 4, "per_device_train_batch_size": 4, "num_generations": 4, "gradient_accumulation_steps": 1,
    "steps_per_generation": 2, "max_completion_length": 24, "beta": 0.04, "learning_rate": 1e-2,
    "gradient_checkpointing": False, "bf16": False, "use_cpu": True, "dataloader_pin_memory": False, "seed": 3,
    "logging_steps": 1, "save_strategy": "no", "report_to": "none", "disable_tqdm": True,
}  # fmt: skip


def main() -> None:
    """Write versions and what each run left to the file named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("json", type=Path, help="where the result goes")
    parser.add_argument("--runs", nargs="+", default=["full", "lora"], choices=["full", "lora"])
    options = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = save_model(Path(folder))
        runs = {name: watched(checkpoint, Path(folder) / name, lora=name == "lora") for name in options.runs}
        result = {"python": sys.version.split()[0], "versions": versions(), "runs": runs}
        result["compat"] = compat()
        result["interrupted_in"] = interrupted(checkpoint, Path(folder) / "interrupted")
        result["commands"] = commands(checkpoint, sorted(Path(folder).glob("full/**/*.pickle"))[-1:])
    options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def versions() -> dict[str, str]:
    """Return the versions of what takes part, as this interpreter imports it."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def compat() -> dict[str, dict[str, Any]]:
    """Return which features are refused here, with the sentence (None: none), and what the callback cannot mark."""
    from memprof.compat.check import missing, require
    from memprof.errors import UsageError

    said: dict[str, str | None] = {}
    for feature in ("callback", "rehearse", "run", "attach", "record.trace", "simulate", "plan", "lean"):
        try:
            said[feature] = require(feature)
        except UsageError as refusal:
            said[feature] = str(refusal)
    return {"refused": said, "missing": {"callback": missing("callback")}}


def commands(checkpoint: Path, recorded: list[Path]) -> dict[str, Any]:
    """Return the peak that ``memprof report`` and ``memprof simulate`` say, or their last words."""
    lengths = ["--prompt-length", "6", "--completion-length", "24", "--num-generations", "4"]
    asked = {"report": recorded, "simulate": ["--model", checkpoint, "--dtype", "float32", *lengths]}
    said: dict[str, Any] = {}
    for name, arguments in asked.items():
        out = checkpoint.with_name(f"{name}.json")
        words = [sys.executable, "-m", "memprof", name, *map(str, arguments), "--json", str(out)]
        done = subprocess.run(words, capture_output=True, text=True)
        told = json.loads(out.read_text(encoding="utf-8"))["peak"]["allocated_bytes"] if out.is_file() else None
        said[name] = {"peak_bytes": told} if told else {"error": (done.stderr.strip() or "no word").splitlines()[-1]}
    return said


def watched(checkpoint: Path, out: Path, *, lora: bool) -> dict[str, Any]:
    """Train with and without the callback; return what the report says, and whether training was the same."""
    from memprof import MemProfCallback
    from memprof.report.codec import to_builtins

    callback = MemProfCallback(table=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            seen = train(checkpoint, out, [callback], lora=lora)
        except Exception as error:
            traceback.print_exc()
            return {"error": f"{type(error).__name__}: {error}"}
    said = sorted({str(warning.message) for warning in caught if "memprof" in str(warning.message)})
    if not callback.result.reports:
        return {"error": "; ".join(said) or "no report was written"}
    alone = train(checkpoint, out.with_name(out.name + "-alone"), [], lora=lora)
    snapshot, report = list(callback.result.reports.items())[-1]
    return {**described(to_builtins(report)), **checked(snapshot), "warnings": said, "unchanged": seen == alone}


def interrupted(checkpoint: Path, out: Path) -> str | None:
    """Train until the optimizer's third step raises; return the phase in which the recording ends, None without one."""
    import torch

    from memprof import MemProfCallback

    steps, own = iter(range(100)), torch.optim.AdamW.step

    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        if next(steps) == 2:
            raise InterruptedError
        return own(self, *args, **kwargs)

    callback = MemProfCallback(table=False)
    torch.optim.AdamW.step = step
    try:
        train(checkpoint, out, [callback], lora=False)
    except InterruptedError:
        reports = list(callback.result.reports.values())
        return str(reports[-1].phases[-1].phase) if reports else None
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        torch.optim.AdamW.step = own
    return "the exception was swallowed"


def described(report: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of a report that are compared between versions: phases, bytes at the peak, notes."""
    peak = report["peak"]
    phases: dict[str, int] = {}
    for row in report["phases"]:
        phases[row["phase"]] = max(row["peak_bytes"], phases.get(row["phase"], 0))
    most = {row["phase"]: row["categories"].get("unattributed", 0) for row in report["phases"]}
    return {
        "phases": phases,
        "peak_bytes": peak["allocated_bytes"],
        "peak_phase": peak["phase"],
        "categories": {name: bytes_ for name, bytes_ in peak["categories"].items() if bytes_},
        "unattributed_bytes": peak["categories"].get("unattributed", 0),
        "own_peaks": report["own_peaks"],
        "unattributed_in_phases": {phase: bytes_ for phase, bytes_ in most.items() if bytes_},
        "notes": report["notes"],
    }


def checked(path: Path) -> dict[str, Any]:
    """Return whether the categories add up at the peak and in every phase, and the shapes and lengths seen."""
    from memprof import analyze, load_snapshot

    snapshot = load_snapshot(path)
    analysis = analyze(snapshot)
    setup = snapshot.run.setup or {}
    seen = {name: [row[1:] for row in setup.get(name, [])] for name in ("batches", "lengths")}
    try:
        for breakdown in (analysis.peak, *analysis.phases):
            breakdown.self_check()
    except AssertionError as error:
        return {**seen, "self_check": str(error)}
    return {**seen, "self_check": "passed"}


def train(checkpoint: Path, out: Path, callbacks: Iterable[Any], *, lora: bool) -> dict[str, Any]:
    """Train once from a fixed seed; return the losses, and a digest of the parameters after it."""
    import torch
    from datasets import Dataset
    from transformers import PrinterCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.manual_seed(3)  # old TRL draws adapters before it sets the seed
    draw = random.Random(0)
    questions = [{"prompt": " ".join(draw.choices(WORDS, k=6))} for _ in range(16)]
    trainer = GRPOTrainer(
        model=str(checkpoint),
        reward_funcs=reward,
        args=GRPOConfig(output_dir=str(out), **SETTINGS),
        train_dataset=Dataset.from_list(questions),
        processing_class=tokenizer(),
        callbacks=list(callbacks),
        peft_config=adapter() if lora else None,
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    digest = hashlib.sha256()
    for name, parameter in sorted(trainer.model.named_parameters()):
        digest.update(name.encode() + parameter.detach().numpy().tobytes())
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    return {"losses": losses, "parameters": digest.hexdigest()}


def reward(completions: list[str], **_: Any) -> list[float]:
    """Score a text so that almost any two differ and there is something to learn."""
    return [sum(map(ord, text)) % 97 / 97 for text in completions]


def adapter() -> Any:
    """Return the LoRA of the second run: rank 4 on every linear layer but the head."""
    from peft import LoraConfig

    return LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")


def save_model(folder: Path) -> Path:
    """Save a random Qwen2 of 110,000 parameters with its tokenizer: TRL loads the reference from a path."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    words = tokenizer()
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(words), hidden_size=80, intermediate_size=176, num_hidden_layers=2, num_attention_heads=5,
        num_key_value_heads=1, max_position_embeddings=256, tie_word_embeddings=True,
        bos_token_id=words.bos_token_id, eos_token_id=words.eos_token_id, pad_token_id=words.pad_token_id,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(folder / "tiny-qwen2")
    words.save_pretrained(folder / "tiny-qwen2")
    return folder / "tiny-qwen2"


def tokenizer() -> Any:
    """Return a tokenizer of words, padding on the left as TRL before 0.20 wants it."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: i for i, word in enumerate(["<pad>", "<s>", "</s>", "<unk>", *WORDS])}
    core = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    # TRL before 1.0 hands all of a tokenizer's outputs to generate, which refuses token types.
    names = ["input_ids", "attention_mask"]
    return PreTrainedTokenizerFast(tokenizer_object=core, padding_side="left", model_input_names=names, **special)


if __name__ == "__main__":
    main()
