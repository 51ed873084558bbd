"""Time one micro-batch of SmolLM2-135M on GSM8K, or of a small Llama, with the lean trainer and with TRL's.

    python -m benchmarks.lean speed [--pairs 7] [--only CASE]... [--json FILE]

Forward and backward of one micro-batch (no generation, no optimizer) are timed in interleaved rounds of every kind:

- ``trl``: TRL's trainer as it is on a CPU, where its head projects prompts and padding too;
- ``trl, head as on CUDA``: the same, and the head projects the completions' tokens only, as TRL's does on a GPU
  (``trl.trainer.utils.add_fused_lm_head``, where Triton runs; its passes over logits are torch's here);
- ``trl, micro-batch 1``: that, one row at a time, which is the least TRL can hold;
- ``lean``: the lean trainer's defaults, or what the case says.

memprof's tensor trace records the peak of live tensors of each. All have the same rows. Cases that the file has and
that are not asked for stay.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import click

from benchmarks.lean.real_model import JSON, OUT, TINY, build, prepared
from benchmarks.measure import interleaved, ratio, write_result

SPEED_CASES: dict[str, dict[str, Any]] = {
    "full, answers of unequal length": {"lora": False, "even": False},
    "full, answers of equal length": {"lora": False, "even": True},
    "lora, answers of unequal length": {"lora": True, "even": False},
    "lora, answers of equal length": {"lora": True, "even": True},
    "full, prompt four times the answers, shared": {
        "lora": False, "even": True, "prompt": 256, "lean": {"prefix_sharing": True},
    },
    **{
        f"small Llama, {kind}, {tokens} tokens": {
            "lora": kind == "LoRA", "even": True, "small": True, "prompt": 64, "completion": tokens}
        for kind in ("full", "LoRA") for tokens in (64, 256, 512, 1024, 2048)
    },
}  # fmt: skip
#: 9 million random parameters; a third of a token's products are the head's. Long completions take seconds of a CPU.
_SMALL = {"vocab_size": 8192, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6,
          "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096}  # fmt: skip


#: By kind, whose trainer it is.
KINDS = {"trl": "trl", "trl, head as on CUDA": "trl", "trl, micro-batch 1": "trl", "lean": "lean"}
FAIR, LEAST = "trl, head as on CUDA", "trl, micro-batch 1"


def micro_batch(
    tokenizer: Any, questions: Any, rows: int, even: bool, prompt_tokens: int = 0, width: int = 64
) -> dict[str, Any]:
    """Make one prompt's group as TRL pads it: answers of up to ``width`` tokens, or all of them (``even``).

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


def rows_of(inputs: dict[str, Any]) -> list[dict[str, Any]]:
    """Cut a micro-batch into micro-batches of one row, as TRL's accumulation does: padded to the longest of all."""
    count = len(inputs["prompt_ids"])
    cut = {name: value for name, value in inputs.items() if getattr(value, "ndim", 0)}
    return [{**inputs, **{name: value[row : row + 1] for name, value in cut.items()}} for row in range(count)]


@contextmanager
def head_as_on_cuda() -> Iterator[None]:
    """Let TRL's head leave out prompts and padding, as it does where Triton runs, while open."""
    from memprof.compat import patching
    from memprof.compat import trl as trl_names

    with patching((trl_names.USE_TRITON_IN_HEAD, lambda device: True)):
        yield


def step(kind: str, trainer: Any, inputs: dict[str, Any]) -> dict[str, float]:
    """Run one micro-batch forward and backward as ``kind`` does; return seconds."""
    from tests.grpo.trainers import run_step

    parts = rows_of(inputs) if kind == LEAST else [inputs]
    trainer.current_gradient_accumulation_steps = len(parts)
    with nullcontext() if kind in ("trl", "lean") else head_as_on_cuda():
        start, cpu = time.perf_counter(), time.process_time()
        for part in parts:
            run_step(trainer, part)
        found = {"wall": time.perf_counter() - start, "cpu": time.process_time() - cpu}
    trainer.model.zero_grad()
    return found


def speed(model: str, questions: Any, folder: Path, pairs: int, settings: dict[str, Any]) -> dict[str, Any]:
    """Measure seconds and peaks of one micro-batch's forward and backward."""
    more = {"max_completion_length": settings["completion"]} if "completion" in settings else {}
    kinds = {kind: whose for kind, whose in KINDS.items() if kind != "trl" or not settings.get("small")}

    def ready(kind: str) -> Any:
        lean = settings.get("lean", {}) if kind == "lean" else {}
        trainer = build(kind, model, questions, folder, settings["lora"], **lean, **more)
        trainer.ref_model = None
        if trainer.args.gradient_checkpointing and not trainer.model.is_gradient_checkpointing:
            trainer.model.gradient_checkpointing_enable({"use_reentrant": False})
        return trainer

    built = {kind: ready(kind) for kind in ("trl", "lean")}
    width = settings.get("completion", 64)
    inputs = micro_batch(
        built["trl"].processing_class, questions, 4, settings["even"], settings.get("prompt", 0), width
    )
    for kind, trainer in built.items():
        step(kind, trainer, inputs)
    del trainer
    tasks = {kind: partial(step, kind, built[whose], inputs) for kind, whose in kinds.items()}
    timed = interleaved(tasks, pairs)
    tasks.clear()
    built.clear()
    peaks = {}
    for kind, whose in kinds.items():
        gc.collect()  # of another trainer, whose weights the trace would count
        peaks[kind] = _peak_of(kind, ready(whose), inputs, folder)
    return {
        "settings": settings,
        "tokens": {"rows": 4, "prompt": int(inputs["prompt_ids"].shape[1]), "completion": width},
        "wall_ratio": {base: ratio(timed, "lean", base, "wall") for base in kinds if base != "lean"},
        "cpu_ratio": {base: ratio(timed, "lean", base, "cpu") for base in kinds if base != "lean"},
        "seconds": timed,
        "peak_bytes": peaks,
    }


def _peak_of(kind: str, trainer: Any, inputs: dict[str, Any], folder: Path) -> dict[str, int]:
    return peak(partial(step, kind, trainer, inputs), trainer, folder)


def peak(step: Any, trainer: Any, folder: Path) -> dict[str, int]:
    """Measure live bytes at the peak of a traced step, by category, without what was there before it."""
    from memprof import analyze, record

    path = folder / "traced.pickle"
    with record(str(path), model=trainer.model, device="cpu"):
        step()
    found = analyze(str(path)).to_dict()["peak"]
    return {"total": found["requested_bytes"], **{k: v for k, v in found["categories"].items() if v}}


def small_model(tiny: str) -> str:
    """Save the small Llama beside the ``tiny`` one, with its tokenizer; return its folder."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    path = Path(tiny).parent / "small-random-llama"
    if not path.exists():
        torch.manual_seed(0)
        tokenizer = AutoTokenizer.from_pretrained(tiny)
        ids = {name: getattr(tokenizer, name) for name in ("pad_token_id", "eos_token_id", "bos_token_id")}
        LlamaForCausalLM(LlamaConfig(**_SMALL, **ids)).save_pretrained(path)
        tokenizer.save_pretrained(path)
    return str(path)


#: Random Llamas of which every tensor is small next to the weights, as in a larger model. Their names are parameters.
CROSSING_MODELS: dict[str, dict[str, Any]] = {
    "9M": {"vocab_size": 8192, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6,
           "num_attention_heads": 4, "num_key_value_heads": 2},
    "110M": {"vocab_size": 32768, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12,
             "num_attention_heads": 12, "num_key_value_heads": 4},
}  # fmt: skip


def crossing_row(
    name: str, lora: bool, rows: int, lengths: Sequence[int], rounds: int, folder: Path
) -> Iterator[dict[str, Any]]:
    """Yield, for each length, the lean trainer's CPU time over TRL's: by default, and one row after another.

    A quarter of each row is the prompt. TRL's head leaves out prompts, as it does on CUDA. The first round is left out.
    """
    from tests.grpo.trainers import build, run_step, tiny_llama

    model = tiny_llama(**CROSSING_MODELS[name], max_position_embeddings=4096, initializer_range=0.02)
    lean: dict[str, dict[str, Any]] = {"trl": {}, "lean": {}, "lean, row by row": {"max_tokens_per_piece": 1}}

    def ready(kind: str) -> Any:
        whose = "trl" if kind == "trl" else "lean"
        made = build(whose, model, folder / kind, lora=lora, gradient_checkpointing=True, **lean[kind])
        if not made.model.is_gradient_checkpointing:
            made.model.gradient_checkpointing_enable({"use_reentrant": False})
        return made

    def timed(trainer: Any, inputs: dict[str, Any]) -> dict[str, float]:
        with head_as_on_cuda():
            start = time.process_time()
            run_step(trainer, inputs)
            found = {"cpu": time.process_time() - start}
        trainer.model.zero_grad()
        return found

    built = {kind: ready(kind) for kind in lean}
    for length in lengths:
        inputs = _equal_rows(rows, length, CROSSING_MODELS[name]["vocab_size"])
        tasks = {kind: partial(timed, trainer, inputs) for kind, trainer in built.items()}
        found = {kind: times[1:] for kind, times in interleaved(tasks, rounds + 1).items()}
        ratios = {kind: ratio(found, kind, "trl", "cpu") for kind in found if kind != "trl"}
        yield {"model": name, "lora": lora, "rows": rows, "length": length, "cpu_ratio": ratios,
               "piece_tokens": built["lean"]._piece_tokens()[0]}  # fmt: skip


def _equal_rows(rows: int, length: int, vocabulary: int) -> dict[str, Any]:
    import torch

    source = torch.Generator().manual_seed(1)
    widths = {"prompt": length // 4, "completion": length - length // 4}
    ids = {part: torch.randint(4, vocabulary, (rows, width), generator=source) for part, width in widths.items()}
    made = {f"{part}_ids": of for part, of in ids.items()} | {f"{part}_mask": of * 0 + 1 for part, of in ids.items()}
    advantages = torch.randn(rows, generator=source)
    return {**made, "advantages": advantages, "num_items_in_batch": made["completion_mask"].sum()}


@click.command()
@click.option("--rounds", default=5)
@click.option("--model", "names", type=click.Choice(list(CROSSING_MODELS)), multiple=True, default=("9M", "110M"))
@click.option("--rows", "counts", type=int, multiple=True, default=(4, 8))
@click.option("--length", "lengths", type=int, multiple=True, default=(32, 64, 128, 192, 256, 384))
@OUT
@JSON
def crossing(
    rounds: int, names: tuple[str, ...], counts: tuple[int, ...], lengths: tuple[int, ...], out: Path,
    json_path: Path | None,
) -> None:  # fmt: skip
    """Find the length from which the lean trainer is as fast as TRL's, by model and batch.

    CPU time of forward and backward, medians of paired rounds.
    """
    import torch

    torch.set_num_threads(1)
    kept: dict[str, Any] = {}
    if json_path is not None and json_path.is_file():
        kept = json.loads(json_path.read_text(encoding="utf-8"))["rows"]
    for name in names:
        for lora in (False, True):
            for rows in counts:
                folder = out / "_work" / "crossing" / f"{name}-{lora}-{rows}"
                for found in crossing_row(name, lora, rows, lengths, rounds, folder):
                    kept[f"{name}, {'LoRA' if lora else 'full'}, {rows} x {found['length']}"] = found
                    print(json.dumps(found), file=sys.stderr, flush=True)
    write_result({"rounds": rounds, "rows": kept}, json_path)


@click.command(help=__doc__)
@click.option("--pairs", default=7)
@click.option("--only", "names", multiple=True, type=click.Choice(list(SPEED_CASES)), metavar="CASE")
@OUT
@JSON
@TINY
def main(pairs: int, names: tuple[str, ...], out: Path, json_path: Path | None, tiny: bool) -> None:
    import torch

    torch.set_num_threads(1)
    kept = json_path is not None and json_path.is_file()
    old = json.loads(json_path.read_text(encoding="utf-8")) if json_path is not None and kept else {}
    note, found = old.get("model", ""), old.get("cases", {})
    for name in names or SPEED_CASES:
        settings = SPEED_CASES[name]
        model, questions, made = prepared(out, tiny or bool(settings.get("small")))
        if settings.get("small"):
            model = small_model(model)
        else:
            note = made
        found[name] = {"pairs": pairs, **speed(model, questions, out / "_work" / "lean", pairs, settings)}
        gc.collect()
        ordered = {case: found[case] for case in SPEED_CASES if case in found}
        write_result({"model": note, "cases": ordered}, json_path)
