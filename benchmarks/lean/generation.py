"""Time generation of SmolLM2-135M within a quarter of the cache: in a rolling batch, in passes, and all together.

    python -m benchmarks.lean generation [--only CASE] [--rounds 1] [--json FILE]

Eight completions of one prompt, none of which ends before its last token (the most that a cache can be asked for),
through the lean trainer's own generation. The cap is the cache of two sequences of full length
(``generation_batch=2``); without a cap all eight decode together. CPU seconds of interleaved rounds on one thread;
memprof's tensor trace counts the cache. Cases that the file has and that are not asked for stay.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import click

from benchmarks.lean.real_model import JSON, OUT, TINY, build, prepared
from benchmarks.measure import interleaved, ratio, write_result

KINDS: dict[str, dict[str, Any]] = {
    "whole": {"generation": "generate"},
    "passes": {"generation": "generate", "generation_batch": 2},
    "rolling batch": {"generation": "paged", "generation_batch": 2},
}
#: Tokens of the prompt (None: one question's) and of each completion.
CASES: dict[str, dict[str, Any]] = {
    "a question, long answers": {"prompt": None, "completion": 256},
    "a prompt of eight times the answer": {"prompt": 512, "completion": 64},
}
_ROWS = 8
_TRACED = 12  # decode steps: the pool is allocated before the first


def trainers(model: str, questions: Any, folder: Path, tokens: int) -> dict[str, Any]:
    """Build one trainer of each kind; its tokenizer's last token is never drawn."""
    found = {}
    for kind, settings in KINDS.items():
        trainer = build(
            "lean", model, questions, folder, False, per_device_train_batch_size=_ROWS, num_generations=_ROWS,
            max_completion_length=tokens, beta=0.0, generation_kwargs={"suppress_tokens": None}, **settings,
        )  # fmt: skip
        trainer.generation_config.suppress_tokens = [trainer.processing_class.eos_token_id]
        trainer.model_wrapped = trainer.model
        found[kind] = trainer
    return found


def prompts_of(trainer: Any, questions: Any, tokens: int | None) -> list[list[int]]:
    """Tokenize one question, or as many as ``tokens`` take, once for each completion."""
    ids: list[int] = []
    for question in questions:
        row = question.as_row()["prompt"]
        ids += trainer.processing_class.apply_chat_template(row, add_generation_prompt=True)["input_ids"]
        if len(ids) >= (tokens or 0):
            break
    return [ids[:tokens]] * _ROWS


def generate(trainer: Any, prompts: list[list[int]], tokens: int) -> dict[str, float]:
    """Generate once; return CPU and wall seconds."""
    wall, cpu = time.perf_counter(), time.process_time()
    completions, _ = trainer._generate_single_turn(prompts, None, {}, _ROWS)
    assert [len(ids) for ids in completions] == [tokens] * _ROWS
    return {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}


def cache_peak(trainer: Any, prompts: list[list[int]], folder: Path) -> int:
    """Return the most bytes of keys and values that a tensor trace of a generation's beginning has."""
    from memprof import analyze, record

    path = folder / "traced.pickle"
    trainer.generation_config.max_new_tokens = _TRACED
    with record(str(path), model=trainer.model, device="cpu"):
        generate(trainer, prompts, _TRACED)
    return int(analyze(str(path)).to_dict()["own_peaks"]["kv_cache"])


def measured(model: str, questions: Any, folder: Path, rounds: int, case: dict[str, Any]) -> dict[str, Any]:
    """Measure one case: CPU and wall seconds of each kind, and the rolling batch's cache beside its cap."""
    from memprof.grpo.generation import cache_bytes

    tokens = case["completion"]
    built = trainers(model, questions, folder, tokens)
    prompts = prompts_of(built["whole"], questions, case["prompt"])
    each = cache_bytes(built["whole"].model.config, len(prompts[0]) + tokens, 4)
    seconds = interleaved({k: lambda t=t: generate(t, prompts, tokens) for k, t in built.items()}, rounds)
    return {
        "tokens": {"rows": _ROWS, "prompt": len(prompts[0]), "completion": tokens},
        "rounds": rounds,
        "cpu_ratio": {kind: ratio(seconds, kind, "whole", "cpu") for kind in KINDS},
        "seconds": seconds,
        "whole_cache_bytes": _ROWS * each,
        "cap_bytes": 2 * each,
        "cache_peak_bytes": cache_peak(built["rolling batch"], prompts, folder),
        "log": sorted(line for trainer in built.values() for line in trainer._once_log.said if "sequences" in line),
    }


@click.command(help=__doc__)
@click.option("--rounds", default=1)
@click.option("--only", "names", multiple=True, type=click.Choice(list(CASES)), metavar="CASE")
@click.option("--tokens", type=int, default=None, help="Tokens of each completion, to try the script.")
@OUT
@JSON
@TINY
def main(
    rounds: int, names: tuple[str, ...], tokens: int | None, out: Path, json_path: Path | None, tiny: bool
) -> None:
    import torch

    torch.set_num_threads(1)
    model, questions, note = prepared(out, tiny)
    kept = json_path is not None and json_path.is_file()
    found = json.loads(json_path.read_text(encoding="utf-8"))["cases"] if json_path is not None and kept else {}
    for name in names or CASES:
        case = CASES[name] if tokens is None else {**CASES[name], "completion": tokens}
        found[name] = measured(model, questions, out / "_work" / "generation", rounds, case)
        write_result({"model": note, "cases": {one: found[one] for one in CASES if one in found}}, json_path)


if __name__ == "__main__":
    main()
