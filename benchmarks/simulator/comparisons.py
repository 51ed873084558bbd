"""Compare predictions with real runs, signed: GPU captures of others, and TRL runs on this machine's CPU.

    python -m benchmarks.simulator gpu --snapshots FOLDER      # other people's captures, simulated
    python -m benchmarks.simulator cpu [--only NAME]           # small TRL runs here, recorded and simulated
    python -m benchmarks.simulator table                       # what was compared; what every screen says

Each case is kept in ``benchmarks/results/cpu/simulator.json`` as soon as it is done, so that a run can be cut short.
``table`` also writes ``memprof/config/comparisons.json``, from which predictions state their expected error.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import click

from benchmarks import tabling

RESULTS = tabling.RESULTS / "simulator.json"
PACKAGED = tabling.ROOT / "memprof" / "config" / "comparisons.json"

_LARGE = {"layers": 32, "width": 2560, "feed": 10_240, "heads": 32}
# Course captures of a GPT-like model (tests/simulate/gpt.py): file, shape, what ran, card. What ran is read from the
# captures themselves where their names do not say it: bf16 scores mean autocast; masks as large as the scores.
CAPTURES: dict[str, dict[str, Any]] = {
    "cs336-medium-train-ctx256-t211": {"shape": {"context": 256}, "runs": "train", "gpu": "A100-80GB"},
    "cs336-medium-train-ctx1024-t211": {
        "shape": {"context": 1024}, "runs": "train", "gpu": "A100-80GB", "autocast": True,
    },
    "cs336-medium-infer-ctx512-t211": {
        "shape": {"context": 512}, "runs": "infer", "gpu": "A100-80GB", "autocast": True,
    },
    "cs336-2.7b-fullstep-ctx128-t26": {"shape": {**_LARGE, "context": 128}, "runs": "step", "gpu": "H100"},
    "cs336-2.7b-fullstep-ctx512-t26": {"shape": {**_LARGE, "context": 512}, "runs": "step", "gpu": "H100"},
    "cs336-2.7b-fwd-ctx256-amp-t26": {
        "shape": {**_LARGE, "context": 256}, "runs": "forward", "gpu": "H100", "autocast": True,
    },
    "cs336-2.7b-fwd-ctx512-t26": {
        "shape": {**_LARGE, "context": 512, "wide_mask": True}, "runs": "forward", "gpu": "H100",
    },
}  # fmt: skip

_SMALL = {"hidden_size": 96, "intermediate_size": 264, "num_hidden_layers": 3, "vocab_size": 3001}
_HEADS = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **_SMALL, **_HEADS, "tie_word_embeddings": False},
    "qwen2": {"model_type": "qwen2", **_SMALL, **_HEADS, "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", **_SMALL, **_HEADS, "tie_word_embeddings": True},
    "gemma3": {"model_type": "gemma3_text", **_SMALL, **_HEADS, "tie_word_embeddings": True, "sliding_window": 64},
    "mistral": {"model_type": "mistral", **_SMALL, **_HEADS, "tie_word_embeddings": False},
    "phi3": {"model_type": "phi3", **_SMALL, **{**_HEADS, "num_key_value_heads": 6}, "pad_token_id": 0},
}
FULL = {"beta": 0.1, "gradient_checkpointing": False}
LORA = {"lora_r": 4, "beta": 0.1}
SHARED: dict[str, Any] = {
    "per_device_train_batch_size": 4, "num_generations": 4, "prompt_length": 37, "completion_length": 53,
    "optim": "adamw_torch", "device": "cpu", "generation": "hf",
}  # fmt: skip
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"{name}, full with reference": (name, FULL) for name in MODELS},
    **{f"{name}, LoRA and checkpointing": (name, LORA) for name in ("llama", "qwen2", "qwen3", "mistral")},
    "llama, full, checkpointing, accumulation 2": ("llama", {"gradient_accumulation_steps": 2}),
    "llama, bf16 weights": ("llama", {"dtype": "bfloat16", "gradient_checkpointing": False}),
    "qwen2, SGD": ("qwen2", {"optim": "sgd"}),
}


def capture(name: str, snapshots: Path) -> list[dict[str, Any]]:
    """Simulate one GPU capture: the highest requested bytes, and what is reserved at the end."""
    from memprof.config.gpus import find_gpu
    from memprof.simulate.run import simulate

    case = CAPTURES[name]
    seen: dict[str, int] = {}
    gpu, before_2_13 = find_gpu(case["gpu"]), "2.11"
    simulate(lambda session: _program(case, session, seen), stacks=False, gpu=gpu, torch_release=before_2_13)
    real = json.loads((snapshots / "peaks.json").read_text())[f"{name}.pickle"]
    about = {"name": name, "where": "gpu", "note": "requested bytes"}
    return [
        {**about, "what": "peak", "measured_bytes": real["max_requested_bytes"]["0"], "simulated_bytes": seen["peak"]},
        {**about, "what": "reserved", "note": "at the end", "measured_bytes": real["reserved_end"],
         "simulated_bytes": seen["reserved"]},
    ]  # fmt: skip


def _program(case: dict[str, Any], session: Any, seen: dict[str, int]) -> None:
    import torch

    from tests.simulate.gpt import AdamW, Gpt, Shape, cross_entropy, train

    heap, shape = session.recorder.allocator, Shape(**case["shape"])
    autocast = case.get("autocast", False)
    if case["runs"] == "train":
        train(shape, autocast=autocast, warm_up=3, before=lambda: _reset(heap))
    else:
        model = Gpt(shape)
        tokens = torch.zeros(shape.batch, shape.context, dtype=torch.long)
        targets = torch.zeros(shape.batch, shape.context, dtype=torch.long)
        optimizer = AdamW(model.parameters())
        with (
            torch.set_grad_enabled(case["runs"] != "infer"),
            torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast),
        ):
            logits = model(tokens)
            loss = cross_entropy(logits, targets) if case["runs"] == "step" else None
        if loss is not None:
            loss.backward()
            optimizer.step()
    seen.update(peak=heap.max_requested, reserved=heap.reserved)


def _reset(heap: Any) -> None:
    heap.max_requested = heap.requested


def real_run(name: str) -> list[dict[str, Any]]:
    """Trace a small TRL run on the CPU and simulate it: the peak of training, and that of generation."""
    from benchmarks.simulator.real_step import peaks, run_real
    from memprof.config.settings import Settings
    from memprof.simulate.run import simulate_settings

    model, changes = RUNS[name]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODELS[model]))
        settings = Settings(model=folder, **{**SHARED, **changes})
        mine, theirs = peaks(simulate_settings(settings, stacks=False)), peaks(run_real(settings, folder))
    training = [key for key in theirs if key[1] in ("forward", "backward", "optimizer_step")]
    decoding = [key for key in theirs if key[1] == "generate"]
    return [
        {"name": name, "where": "cpu", "what": what, "note": "highest of both steps",
         "measured_bytes": max(theirs[key] for key in keys), "simulated_bytes": max(mine[key] for key in keys)}
        for what, keys in (("peak", training), ("generation", decoding))
    ]  # fmt: skip


def smollm(results: Path = RESULTS.parent) -> list[dict[str, Any]]:
    """Read SmolLM2-135M's comparisons from what ``benchmarks.simulator.real_step`` wrote."""
    rows = []
    for file in sorted(results.glob("real_step_*.json")):
        found = json.loads(file.read_text())
        for what, part in (("peak", "training"), ("generation", "generation")):
            pairs = [row["peak_bytes"] for row in found[part]]
            if pairs:
                rows.append(
                    {"name": f"SmolLM2-135M, {file.stem.removeprefix('real_step_')}", "where": "cpu", "what": what,
                     "note": "highest of both steps", "measured_bytes": max(theirs for _, theirs in pairs),
                     "simulated_bytes": max(mine for mine, _ in pairs)}
                )  # fmt: skip
    return rows


def keep(rows: list[dict[str, Any]], file: Path = RESULTS) -> None:
    """Add rows to the results, in place of older ones of the same name."""
    known = json.loads(file.read_text())["comparisons"] if file.is_file() else []
    names = {(row["name"], row["what"]) for row in rows}
    merged = [row for row in known if (row["name"], row["what"]) not in names] + rows
    merged.sort(key=lambda row: (row["where"] != "gpu", row["name"], row["what"]))
    file.write_text(json.dumps({"comparisons": merged}, indent=1) + "\n")


def table(rows: list[dict[str, Any]]) -> str:
    """Make a Markdown table, signed percent of the measured value; runs on a CPU share a row."""
    by_name: dict[str, dict[str, list[float]]] = {}
    on_cpu = len({row["name"] for row in rows if row["where"] != "gpu"})
    for row in rows:
        error = 100 * (row["simulated_bytes"] / row["measured_bytes"] - 1)
        name = f"{row['name']} | GPU" if row["where"] == "gpu" else f"{on_cpu} runs of TRL | CPU"
        by_name.setdefault(name, {}).setdefault(row["what"], []).append(error)
    lines = ["| run | recorded on | peak | reserved | generation |", "|---|---|--:|--:|--:|"]
    for name, errors in by_name.items():
        cells = [_span(errors.get(what, [])) for what in ("peak", "reserved", "generation")]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _span(errors: list[float]) -> str:
    return " to ".join(dict.fromkeys(_percent(error) for error in (min(errors), max(errors)))) if errors else "–"


def _percent(error: float) -> str:
    return "0.000" if abs(error) < 0.0005 else f"{error:+.3f}".replace("-", "−")


ONLY = click.option("--only", multiple=True, help="A case's name; may be given more than once.")


@click.command()
@click.option("--snapshots", type=click.Path(path_type=Path), required=True, help="Folder of the captures.")
@ONLY
def gpu(snapshots: Path, only: tuple[str, ...]) -> None:
    """Simulate what other people captured on GPUs; their folder holds peaks.json too."""
    for name in only or CAPTURES:
        keep(capture(name, snapshots))
        print(name, flush=True)


@click.command()
@ONLY
def cpu(only: tuple[str, ...]) -> None:
    """Record small TRL runs on this CPU and simulate them."""
    keep(smollm())
    for name in only or RUNS:
        keep(real_run(name))
        print(name, flush=True)


@click.command("table")
def print_table() -> None:
    """Print what was compared and write the comparisons that predictions state their error from."""
    from benchmarks.simulator import programs
    from benchmarks.simulator.classes import class_table, gathered, outside

    found = gathered()
    PACKAGED.write_text(json.dumps(found, indent=1) + "\n")
    print(table(json.loads(RESULTS.read_text())["comparisons"]))
    print(programs.table(programs.read()) + "\n")
    print(class_table(found))
    print("Outside what the others of their class state:", "; ".join(outside(found)))
