"""Find the smallest GPU that each run survives on the real allocator, and hold the simulator's verdicts to it.

    python -m benchmarks.simulator emulated-edges [--only NAME]... [--again]

Each run trains in a child process on an emulated GPU, under limits of the allocator's memory that bisect the edge. The
verdict is the smallest GPU that is said to be enough, of known make and of known size alone. Both are tried, too,
where the run does not have room for all it reserves there: one that does not survive is a false *fits*. Rows are kept
in ``benchmarks/results/emulated-cuda``; a second call measures what is missing, and simulates all again.
"""

from __future__ import annotations

from typing import Any

import click

from benchmarks.simulator.emulated.cases import _LLAMA_1B, Case, _case
from benchmarks.simulator.emulated.device import ask
from benchmarks.simulator.emulated.matrix import keep_row, read_rows, settings_of
from memprof.config.fits import margin_of, room_bytes
from memprof.config.gpus import CONTEXT_BYTES, Gpu, find_gpu

_CHILD = "benchmarks.simulator.emulated.edge_run"
_MIB = 2**20
_STEP = 8 * _MIB
_SMALL = {"prompt_length": 16, "completion_length": 32, "per_device_train_batch_size": 2, "num_generations": 2}
_SHORT = {"per_device_train_batch_size": 4, "num_generations": 4}
_GENERATED = {**_SMALL, "generation": "hf"}
_FP16 = {"dtype": "float32", "mixed_precision": "fp16"}
_EXPERTS = "benchmarks/simulator/emulated/qwen3_moe_2_layers.json"

CASES: tuple[Case, ...] = (
    _case("0.5B, full, 2 × 48 tokens", "H100", **_SMALL),
    _case("0.5B, full, 2 × 48 tokens, RTX 4090", "RTX 4090", **_SMALL),
    _case("0.5B, full", "H100", **_SHORT),
    _case("0.5B, full, no checkpointing", "H100", gradient_checkpointing=False, **_SHORT),
    _case("0.5B, full, reference", "H100", beta=0.04, **_SHORT),
    _case("0.5B, full, SGD", "RTX 4090", optim="sgd", **_SHORT),
    _case("0.5B, full, foreach AdamW", "H100", optim="adamw_torch", **_SMALL),
    _case("0.5B, full, expandable segments", "H100", alloc_conf="expandable_segments:True", **_SMALL),
    _case("0.5B, LoRA", "H100", lora_r=16, **_SHORT),
    _case("0.5B, LoRA, reference, no checkpointing", "RTX 4090", lora_r=16, beta=0.04, gradient_checkpointing=False,
          **_SHORT),
    _case("0.5B, lean, LoRA", "RTX 4090", recipe="lean", lora_r=16, **_SHORT),
    _case("0.5B, QLoRA", "H100", loaded=True, load_in_4bit=True, lora_r=16, **_SHORT),
    _case("0.5B, full, 32 tokens generated", "RTX 4090", **{**_SMALL, "generation": "hf"}),
    _case("0.5B, lean, full", "H100", recipe="lean", **_SMALL),
    _case("1B, full", "RTX 5090", _LLAMA_1B, **_SMALL),
    _case("0.5B, LoRA, expandable segments, no checkpointing", "A100-80GB", lora_r=16, gradient_checkpointing=False,
          alloc_conf="expandable_segments:True", **_SHORT),
    _case("0.5B, LoRA, 32 tokens generated", "H100", lora_r=16, **{**_SMALL, "generation": "hf"}),
    _case("0.5B, full, fp32 under autocast", "A100-80GB", dtype="float32", **_SMALL),
    _case("1B, LoRA on q and v", "T4", _LLAMA_1B, lora_r=8, lora_target_modules=("q_proj", "v_proj"), dtype="float16",
          mixed_precision="no", **_SHORT),
    _case("0.5B, lean, full, 32 tokens generated", "H100", recipe="lean", **_GENERATED),
    _case("0.5B, LoRA, fp16 with a loss scaler, T4", "T4", lora_r=16, **_FP16, **_SHORT),
    _case("0.5B, LoRA, attention in full, no checkpointing, T4", "T4", lora_r=16, dtype="float16", mixed_precision="no",
          gradient_checkpointing=False, **_SHORT),
    _case("0.5B, lean, LoRA, fp16, attention in full, T4", "T4", recipe="lean", lora_r=16, dtype="float16",
          mixed_precision="no", **_SHORT),
    _case("0.5B, full, fp16 with a loss scaler", "RTX 3090", **_FP16, **_SMALL),
    _case("0.5B, full, accumulation 4", "H100", gradient_accumulation_steps=4, **{**_SMALL, "num_generations": 4}),
    _case("0.5B, RLOO, full, reference", "H100", trainer="rloo", beta=0.05, **_SMALL),
    _case("0.5B, SFT, full", "H100", trainer="sft", **_SHORT),
    _case("0.5B, DPO, LoRA", "H100", trainer="dpo", lora_r=16, **_SHORT),
    _case("0.5B, LoRA, 256 tokens generated", "RTX 4090", lora_r=16, **{**_GENERATED, "completion_length": 256}),
    _case("2 layers of 128 experts, LoRA", "H100", _EXPERTS, lora_r=16, **_SMALL),
    _case("2 layers of 128 experts, full", "H100", _EXPERTS, **_SMALL),
    _case("0.5B, full, 8-bit AdamW", "H100", optim="adamw_8bit", **_SMALL),
    _case("0.5B, DPO, full", "H100", trainer="dpo", **_SMALL),
    _case("0.5B, SFT, LoRA, accumulation 4", "RTX 4090", trainer="sft", lora_r=16, gradient_accumulation_steps=4,
          **_SHORT),
    _case("270M, full, another family", "A100-40GB", "google/gemma-3-270m-it", **_SHORT),
    _case("0.5B, lean, LoRA, reference, 32 tokens generated", "RTX 4090", recipe="lean", lora_r=16, beta=0.04,
          **_GENERATED),
    _case("0.5B, QLoRA, 32 tokens generated", "RTX 4090", loaded=True, load_in_4bit=True, lora_r=16, **_GENERATED),
    _case("0.5B, RLOO, LoRA", "T4", trainer="rloo", lora_r=16, **_FP16, **_SHORT),
    _case("0.5B, full, Adafactor", "H100", optim="adafactor", **_SMALL),
    _case("0.5B, full, selective checkpointing", "H100", gradient_checkpointing="selective", **_SHORT),
    _case("0.5B, LoRA, accumulation 4, two iterations", "L4", lora_r=16, gradient_accumulation_steps=4,
          num_iterations=2, **_SHORT),
)  # fmt: skip


def said(case: Case) -> dict[str, Any]:
    """Simulate a run: what each variant needs for torch, on the case's GPU (``made``) and on one of unknown make.

    ``reserved_bytes``: what the run reserves on the case's GPU, with room for all. A GPU before Ampere has to be
    named, so nothing is asked by its size: ``needs`` is None.
    """
    gpu = find_gpu(case.card)
    made = _needs(case, gpu)
    needs = None if gpu.capability < (8, 0) else _needs(case, find_gpu("80GiB"))
    return {"made": made, "needs": needs, "reserved_bytes": made[0][3]}


def verdicts(case: Case, found: dict[str, Any]) -> dict[str, int | None]:
    """Return the smallest GPU in bytes that a run is said to fit, with the margin of today.

    ``by_make``: of the case's make; ``by_size``: of unknown make, with the workspaces of all.
    """
    return {
        kind: max(_card_for(case, *need) for need in needs) if needs else None
        for kind, needs in (("by_make", found["made"]), ("by_size", found["needs"]))
    }


def _needs(case: Case, gpu: Gpu) -> list[tuple[int, int, int, int]]:
    """List each variant's workspace and tokens more, what it needs for torch and what it reserves, on a GPU."""
    from memprof.simulate.ensemble import allocator_of, variants_of
    from memprof.simulate.evaluate import analyse
    from memprof.simulate.run import simulate_settings

    analysis = analyse(simulate_settings(case.settings, gpu=gpu, stacks=False, by_name=case.loaded))
    settings, held = allocator_of(analysis, gpu), int(analysis.timeline.active.max())
    return [
        (variant.workspace, variant.more, *_needed(variant.program, settings, held))
        for variant in variants_of(analysis, gpu)
    ]


def _needed(program: Any, settings: Any, held: int) -> tuple[int, int]:
    """Bisect the least memory that a program runs in; return it and what it reserves where there is room for all."""
    from memprof.allocator.replay import reserved_within
    from memprof.simulate.ensemble import fits_within

    low, high = held - _MIB, reserved_within(program, settings, None)
    reserved = high
    while high - low > _MIB:
        middle = (low + high) // 2
        low, high = (low, middle) if fits_within(program, settings, middle) else (middle, high)
    return high, reserved


def _card_for(case: Case, workspace: int, more: int, need: int, reserved: int) -> int:
    """Return the smallest GPU of whole MiB for a variant; the margin is kept for the lengths that were asked for."""
    margin = 0.0 if more else margin_of(case.settings.known)
    total = (need + CONTEXT_BYTES) // _MIB * _MIB
    while room_bytes(Gpu("?", total), margin) < need:
        total += _MIB
    return total


def real(case: Case, cards: list[int]) -> dict[str, Any]:
    """Bisect the limit under which the run survives on the real allocator, and try the ``GPUs`` it is said to fit."""
    question = {
        "settings": case.settings.to_dict(), "loaded": case.loaded, "step": _STEP,
        "probes": [card - CONTEXT_BYTES for card in cards],
        "capability": list(find_gpu(case.card).capability),
    }  # fmt: skip
    found = ask(_CHILD, question, case.card, alloc_conf=case.settings.alloc_conf)
    tried = {limit + CONTEXT_BYTES: lives for limit, lives in found.pop("tried")}
    return {**found, "edge_bytes": found.pop("edge_bytes") + CONTEXT_BYTES, "tried": tried}


@click.command(help=__doc__)
@click.option("--only", multiple=True, help="A case's name; may be given more than once.")
@click.option("--again", is_flag=True, help="Measure again what has been measured.")
def main(only: tuple[str, ...], again: bool) -> None:
    for case in CASES:
        if only and case.name not in only:
            continue
        row = read_rows("edges").get(case.name, {})
        try:
            row |= {"card": case.card, "settings": settings_of(case), "said": said(case)}
            if again or "real" not in row:
                row["real"] = real(case, [card for card in verdicts(case, row["said"]).values() if card])
        except Exception as error:
            print(f"{case.name}: {type(error).__name__}: {error}", flush=True)
            continue
        keep_row("edges", CASES, case.name, row, {"origin": "python -m benchmarks.simulator emulated-edges"})
        print(line(case.name, read()[case.name]), flush=True)


def read() -> dict[str, Any]:
    """Read the rows that are kept, by name, each with its verdicts."""
    rows = read_rows("edges")
    for case in CASES:
        if case.name in rows:
            rows[case.name]["said"] |= verdicts(case, rows[case.name]["said"])
    return rows


_FAR = 0.05  # above the edge, of known make or by size: a row of its own in the table


def table(rows: dict[str, Any]) -> str:
    """Write the table of benchmarks/measurements.md: runs whose verdict stands out, and the range of the others."""
    head = [
        "| run | survives from | fits from, make known | above | fits from, by size | above |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    said = {name: max(row["said"][kind] or 0 for kind in ("by_make", "by_size")) for name, row in rows.items()}
    far = [name for name, card in said.items() if card > (1 + _FAR) * rows[name]["real"]["edge_bytes"]]
    others = [row for name, row in rows.items() if name not in far]
    spans = []
    for kind in ("by_make", "by_size"):
        pairs = [(row["said"][kind], row["real"]["edge_bytes"]) for row in others if row["said"][kind]]
        least, most = (pick(pairs, key=lambda pair: pair[0] / pair[1]) for pick in (min, max))
        spans.append(f"{_above(*least)} to {_above(*most)}")
    last = f"| {len(others)} others | | | {spans[0]} | | {spans[1]} |"
    return "\n".join([*head, *(line(name, rows[name]) for name in far), last])


def line(name: str, row: dict[str, Any]) -> str:
    """Write one row of the table of benchmarks/measurements.md: MiB, and what is said above the edge."""
    edge, verdict = row["real"]["edge_bytes"], row["said"]
    cells = [f"{edge / _MIB:,.0f}"]
    for kind in ("by_make", "by_size"):
        cells += [f"{verdict[kind] / _MIB:,.0f}" if verdict[kind] else "–", _above(verdict[kind], edge)]
    shown = name if row["card"] in name else f"{name}, {row['card']}"
    return f"| {shown} | {' | '.join(cells)} |"


def _above(card: int | None, edge: int) -> str:
    if card is None:
        return "–"
    return f"{100 * (card / edge - 1):+.1f}%".replace("-", "−")


if __name__ == "__main__":
    main()
