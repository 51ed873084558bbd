"""The lean trainer beside TRL's on a real model: SmolLM2-135M on GSM8K.

    python -m benchmarks.lean track [--steps 20] [--json FILE]
    python -m benchmarks.lean speed [--pairs 7] [--json FILE]

``track`` trains with TRL, keeps the completions, and trains the lean trainer from the same weights on them: losses,
rewards and gradient norms side by side, step by step. Each generation batch is used twice (``num_iterations=2``), so
that losses are not near zero.

``speed`` times forward and backward of one micro-batch (what both do at equal settings; no generation, no optimizer)
in interleaved pairs, and records the peak of live tensors of each by memprof's tensor trace. TRL is given the same rows
in all cases.
"""

from __future__ import annotations

import gc
import json
import time
from pathlib import Path
from typing import Any

import click

from benchmarks.measure import interleaved, ratio, write_result

COMPARED = ("loss", "reward", "reward_std", "grad_norm", "kl", "entropy")


SPEED_CASES: dict[str, dict[str, Any]] = {
    "full, answers of unequal length": {"lora": False, "even": False},
    "full, answers of equal length": {"lora": False, "even": True},
    "lora, answers of unequal length": {"lora": True, "even": False},
    "full, prompt four times the answers, shared": {
        "lora": False, "even": True, "prompt": 256, "lean": {"prefix_sharing": True},
    },
}  # fmt: skip


def build(kind: str, model: str, questions: Any, folder: Path, lora: bool, **settings: Any) -> Any:
    """A trainer of SmolLM2 on GSM8K; ``kind`` is ``trl`` or ``lean``."""
    from datasets import Dataset
    from transformers import PrinterCallback
    from trl import GRPOConfig, GRPOTrainer

    from memprof.demo.rewards import REWARDS
    from memprof.demo.training import lora_config
    from memprof.grpo import LeanGRPOConfig, LeanGRPOTrainer

    chosen: Any = (GRPOTrainer, GRPOConfig) if kind == "trl" else (LeanGRPOTrainer, LeanGRPOConfig)
    arguments: dict[str, Any] = {
        "output_dir": str(folder / kind),
        "per_device_train_batch_size": 4,
        "num_generations": 4,
        "max_completion_length": 32,
        "beta": 0.04,
        "learning_rate": 1e-5,
        "bf16": False,
        "use_cpu": True,
        "seed": 7,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        **settings,
    }
    trainer = chosen[0](
        model=model,
        reward_funcs=list(REWARDS),
        args=chosen[1](**arguments),
        train_dataset=Dataset.from_list([question.as_row() for question in questions]),
        peft_config=lora_config() if lora else None,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def track(model: str, questions: Any, folder: Path, steps: int, lora: bool, **settings: Any) -> dict[str, Any]:
    """Both runs on the same completions."""
    import torch

    kept: list[Any] = []
    runs: dict[str, Any] = {}
    for kind in ("trl", "lean"):
        trainer = build(kind, model, questions, folder, lora, max_steps=steps, num_iterations=2, **settings)
        generate = trainer._generate_single_turn

        def record(*args: Any, generate: Any = generate, **kwargs: Any) -> Any:
            found = generate(*args, **kwargs)
            kept.append((found, torch.get_rng_state()))
            return found

        waiting = iter(list(kept))

        def replay(*_: Any, waiting: Any = waiting, **__: Any) -> Any:
            found, state = next(waiting)
            torch.set_rng_state(state)
            return found

        trainer._generate_single_turn = record if kind == "trl" else replay
        seconds = training_seconds(trainer)
        trainer.train()
        rows = [row for row in trainer.state.log_history if "loss" in row]
        runs[kind] = {"steps": [{name: row.get(name) for name in COMPARED} for row in rows], "seconds": list(seconds)}
        del trainer, generate
        gc.collect()
    return {**runs, "largest_difference": difference(runs)}


def difference(runs: dict[str, Any]) -> dict[str, float]:
    """Largest distance of any step, relative to the largest value of the run; without what neither run logged."""
    found = {}
    for name in COMPARED:
        pairs = [(a[name], b[name]) for a, b in zip(runs["trl"]["steps"], runs["lean"]["steps"], strict=True)]
        both = [(a, b) for a, b in pairs if a is not None and b is not None]
        if any((a is None) != (b is None) for a, b in pairs):
            found[name] = float("inf")  # one of them did not log it
        elif both:
            scale = max(abs(a) for a, _ in both) or 1.0
            found[name] = max(abs(a - b) for a, b in both) / scale
    return found


def training_seconds(trainer: Any) -> list[float]:
    """Seconds of each training step without generation and scoring; the list fills while it trains."""
    found: list[float] = []
    away = [0.0]
    step, prepare = trainer.training_step, trainer._prepare_inputs

    def timed_prepare(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        result = prepare(*args, **kwargs)
        away[0] = time.perf_counter() - start
        return result

    def timed_step(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        result = step(*args, **kwargs)
        found.append(time.perf_counter() - start - away[0])
        return result

    trainer._prepare_inputs, trainer.training_step = timed_prepare, timed_step
    return found


def micro_batch(tokenizer: Any, questions: Any, rows: int, even: bool, prompt_tokens: int = 0) -> dict[str, Any]:
    """One prompt's group as TRL pads it: answers of 24 to 64 tokens, or all of 64 (``even``).

    The prompt is a question, or ``prompt_tokens`` of as many questions as they take.
    """
    import torch

    source = torch.Generator().manual_seed(1)
    prompt = []
    for question in questions:
        prompt += tokenizer.apply_chat_template(question.as_row()["prompt"], add_generation_prompt=True)["input_ids"]
        if len(prompt) >= prompt_tokens:
            break
    prompt = prompt[:prompt_tokens] if prompt_tokens else prompt
    width = 64
    lengths = [width if even else width * (row + 3) // (rows + 2) for row in range(rows)]
    mask = (torch.arange(width) < torch.tensor(lengths)[:, None]).long()
    ids = torch.randint(100, len(tokenizer), (rows, width), generator=source)
    return {
        "prompt_ids": torch.tensor(prompt).expand(rows, -1).contiguous(),
        "prompt_mask": torch.ones(rows, len(prompt), dtype=torch.long),
        "completion_ids": torch.where(mask.bool(), ids, tokenizer.pad_token_id),
        "completion_mask": mask,
        "advantages": torch.randn(rows, generator=source),
        "num_items_in_batch": mask.sum(),
        "ref_per_token_logps": -3 * torch.rand(rows, width, generator=source) * mask,
    }


def speed(model: str, questions: Any, folder: Path, pairs: int, settings: dict[str, Any]) -> dict[str, Any]:
    """Seconds and peaks of one micro-batch's forward and backward."""
    lora, even, lean = settings["lora"], settings["even"], settings.get("lean", {})
    trainers = {kind: build(kind, model, questions, folder, lora, **(lean if kind == "lean" else {}))
                for kind in ("trl", "lean")}  # fmt: skip
    inputs = micro_batch(trainers["trl"].processing_class, questions, 4, even, settings.get("prompt", 0))

    def step(trainer: Any) -> dict[str, float]:
        trainer.model.train()
        start, cpu = time.perf_counter(), time.process_time()
        trainer.accelerator.backward(trainer.compute_loss(trainer.model, dict(inputs)))
        found = {"wall": time.perf_counter() - start, "cpu": time.process_time() - cpu}
        trainer.model.zero_grad()
        return found

    for trainer in trainers.values():
        trainer.ref_model = None
        trainer.current_gradient_accumulation_steps = 1
        if trainer.args.gradient_checkpointing and not trainer.model.is_gradient_checkpointing:
            trainer.model.gradient_checkpointing_enable({"use_reentrant": False})
        step(trainer)
    timed = interleaved({kind: lambda t=trainer: step(t) for kind, trainer in trainers.items()}, pairs)
    return {
        "settings": settings,
        "tokens": {"rows": 4, "prompt": int(inputs["prompt_ids"].shape[1]), "completion": 64},
        "wall_ratio": ratio(timed, "lean", "trl", "wall"),
        "cpu_ratio": ratio(timed, "lean", "trl", "cpu"),
        "seconds": timed,
        "peak_bytes": {kind: peak(lambda t=trainer: step(t), trainer, folder) for kind, trainer in trainers.items()},
    }


def peak(step: Any, trainer: Any, folder: Path) -> dict[str, int]:
    """Live bytes at the peak of a traced step, by category, without what was there before it."""
    from memprof import analyze, record

    path = folder / "traced.pickle"
    with record(str(path), model=trainer.model, device="cpu"):
        step()
    found = analyze(str(path)).to_dict()["peak"]
    return {"total": found["requested_bytes"], **{k: v for k, v in found["categories"].items() if v}}


@click.group()
def main() -> None:
    """The lean trainer beside TRL's."""


OUT = click.option("--out", type=click.Path(path_type=Path), default=Path("demo"), help="Folder for the model.")
JSON = click.option("--json", "json_path", type=click.Path(path_type=Path), default=None)
TINY = click.option("--tiny", is_flag=True, help="A tiny random model, to try the script.")


def prepared(out: Path, tiny: bool) -> tuple[str, Any, str]:
    """Model folder, questions, and what the model is."""
    from memprof.demo.data import load_questions
    from memprof.demo.model import prepare_checkpoint

    checkpoint = prepare_checkpoint(out / "_model", tiny=tiny)
    return str(checkpoint.path), load_questions(32, longest=110).items, checkpoint.note


@main.command("track")
@click.option("--steps", default=20)
@click.option("--lora", is_flag=True)
@click.option("--completions", default=4)
@click.option("--tokens", default=32, help="Tokens of a completion.")
@OUT
@JSON
@TINY
def track_command(
    steps: int, lora: bool, completions: int, tokens: int, out: Path, json_path: Path | None, tiny: bool
) -> None:
    """Losses and rewards step by step."""
    model, questions, note = prepared(out, tiny)
    settings = {
        "per_device_train_batch_size": completions,
        "num_generations": completions,
        "max_completion_length": tokens,
    }
    found = track(model, questions, out / "_work" / "lean", steps, lora, **settings)
    write_result({"model": note, "lora": lora, "settings": settings, **found}, json_path)


@main.command("speed")
@click.option("--pairs", default=7)
@click.option("--only", "names", multiple=True, type=click.Choice(list(SPEED_CASES)), metavar="CASE")
@OUT
@JSON
@TINY
def speed_command(pairs: int, names: tuple[str, ...], out: Path, json_path: Path | None, tiny: bool) -> None:
    """Seconds and peaks of the training part. Cases the file has and that are not asked for stay."""
    model, questions, note = prepared(out, tiny)
    kept = json_path is not None and json_path.is_file()
    found = json.loads(json_path.read_text(encoding="utf-8"))["cases"] if json_path is not None and kept else {}
    for name in names or SPEED_CASES:
        found[name] = {"pairs": pairs, **speed(model, questions, out / "_work" / "lean", pairs, SPEED_CASES[name])}
        gc.collect()
        ordered = {case: found[case] for case in SPEED_CASES if case in found}
        write_result({"model": note, "cases": ordered}, json_path)


if __name__ == "__main__":
    main()
