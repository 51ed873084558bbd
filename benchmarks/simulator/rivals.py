"""Ask closed-form estimators about the configurations that have a measured peak, beside memprof's prediction.

    python -m benchmarks.simulator rivals --arena PATH/TO/python

``--arena`` is the interpreter of an environment of its own with ``agilerl-arena`` in it (pip install agilerl-arena):
``arena memory estimate`` is asked through the functions its command calls. accelerate's ``estimate-memory`` is asked
through its own functions too, because its command wants the hub. Rivals are asked for what they can be asked for:
arena for LoRA (its trainer has nothing else), accelerate for a model and a dtype (nothing else is an input).
"""

from __future__ import annotations

import json
import subprocess
from typing import Any

import click

from benchmarks.tabling import RESULTS

# Run by the rival's own interpreter: settings in, components out.
_ARENA = """
import json, sys
from importlib.metadata import version
from agilerl.arena.memory.estimator import estimate_run
from agilerl.arena.memory.specs import DeviceSpec, GenerationSettings, ModelArch, ModelSpec, RunConfig, TrainingSettings
answers = []
for asked in json.load(sys.stdin):
    device = DeviceSpec(total_bytes=85899345920, name="NVIDIA H100 80GB HBM3", compute_capability=(9, 0))
    model = ModelSpec(model_id="m", arch=ModelArch.from_hf_config(asked["config"]))
    run = RunConfig(model=model, train_device=device, gen_device=device,
                    training=TrainingSettings(**asked["training"]),
                    generation=GenerationSettings(weight_dtype=asked["training"].get("weight_dtype", "bf16")))
    found = estimate_run(run).training
    answers.append({"total": found.total_bytes, "components": {c.key: c.n_bytes for c in found.components}})
print(json.dumps({"version": version("agilerl-arena"), "answers": answers}))
"""


def cases() -> list[dict[str, Any]]:
    """Return name, model, settings, the truth and what it is, and memprof's figure; bytes."""
    return [*_published(), *_on_this_cpu()]


def _published() -> list[dict[str, Any]]:
    from examples.published_tables import MODELS, PUBLISHED

    found = json.loads((RESULTS / "published_methods.json").read_text())
    rows = []
    for method in ("LoRA", "full"):
        for size, peak in zip(MODELS, PUBLISHED[method], strict=True):
            row = found.get(f"{method}|{size}")
            if peak is None or row is None:
                continue
            training = {
                "group_size": 4, "max_model_len": 1042, "lora_rank": 16, "beta": 0.04, "micro_batch_size": 4,
                "gradient_checkpointing": False, "trajectories_per_update": 16,
            }  # fmt: skip
            rows.append(
                {"name": f"{size} {method}", "model": MODELS[size], "kind": "published, H100, GB of the whole device",
                 "truth": peak * 10**9, "ours": row["device_peak_bytes"], "dtype": "bfloat16",
                 "arena": training if method == "LoRA" else None}
            )  # fmt: skip
    return rows


def _on_this_cpu() -> list[dict[str, Any]]:
    rows = []
    for file in sorted(RESULTS.glob("real_step_*.json")):
        found = json.loads(file.read_text())
        pairs = [row["peak_bytes"] for row in (*found["training"], *found["generation"])]
        adapter = file.stem.endswith("lora")
        training = {
            "group_size": 4, "max_model_len": 128, "lora_rank": 16, "beta": 0.1, "micro_batch_size": 4,
            "gradient_checkpointing": True, "weight_dtype": "fp32",
        }  # fmt: skip
        rows.append(
            {"name": f"SmolLM2-135M {file.stem.removeprefix('real_step_')}", "kind": "recorded on this CPU, tensors",
             "model": "HuggingFaceTB/SmolLM2-135M-Instruct", "truth": max(p[1] for p in pairs),
             "ours": max(p[0] for p in pairs), "dtype": "float32", "tensors_only": True,
             "arena": training if adapter else None}
        )  # fmt: skip
    return rows


def ask_arena(python: str, rows: list[dict[str, Any]]) -> tuple[str, list[dict[str, Any] | None]]:
    """Return arena's version, and an answer for each row that it can be asked about."""
    from memprof.config.catalogue import find_config

    asked = [{"config": find_config(r["model"]), "training": r["arena"]} for r in rows if r["arena"]]
    done = subprocess.run([python, "-c", _ARENA], input=json.dumps(asked), capture_output=True, text=True, check=True)
    answer = json.loads(done.stdout.splitlines()[-1])
    answers = iter(answer["answers"])
    return answer["version"], [next(answers) if row["arena"] else None for row in rows]


def ask_accelerate(model: str, dtype: str) -> int:
    """Return accelerate's "training using Adam (peak vRAM)"."""
    import torch
    from accelerate.commands.estimate import estimate_training_usage
    from accelerate.utils import calculate_maximum_sizes
    from transformers import AutoModelForCausalLM

    from memprof.simulate.trainer.models import load_config

    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(load_config(model), dtype=torch.float32)
    total, _ = calculate_maximum_sizes(empty)
    return int(max(estimate_training_usage(int(total), dtype).values()))


def compare(python: str) -> dict[str, Any]:
    """Return every case with every answer."""
    from importlib.metadata import version

    rows = cases()
    arena_version, answers = ask_arena(python, rows)
    for row, answer in zip(rows, answers, strict=True):
        row["accelerate"] = ask_accelerate(row["model"], row["dtype"])
        row["arena"] = None if answer is None else _comparable(row, answer)
    return {"versions": {"agilerl-arena": arena_version, "accelerate": version("accelerate")}, "rows": rows}


def _comparable(row: dict[str, Any], answer: dict[str, Any]) -> int:
    """Leave out the CUDA context and the allocator's reserve where the truth is tensors alone."""
    left_out = ("overhead", "allocator_reserve") if row.get("tensors_only") else ()
    return int(answer["total"] - sum(answer["components"].get(name, 0) for name in left_out))


def table(found: dict[str, Any]) -> str:
    """Make a Markdown table: GB measured, and each estimate's signed error in percent."""
    lines = [
        "| run | measured, GB | memprof | arena | accelerate |",
        "|---|--:|--:|--:|--:|",
    ]
    for row in found["rows"]:
        cells = [_cell(row[name], row["truth"]) for name in ("ours", "arena", "accelerate")]
        lines.append(f"| {row['name']} | {row['truth'] / 1e9:.1f} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cell(value: int | None, truth: int) -> str:
    if value is None:
        return "–"
    return f"{100 * (value / truth - 1):+.0f}%".replace("-", "−")


@click.command(help=__doc__)
@click.option("--arena", required=True, help="Python of an environment with agilerl-arena.")
def main(arena: str) -> None:
    found = compare(arena)
    (RESULTS / "rivals.json").write_text(json.dumps(found, indent=1) + "\n")
    print(table(found))
