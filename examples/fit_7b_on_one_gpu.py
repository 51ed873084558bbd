"""Show what each step towards fitting a 7B model saves: from two policies in float32 to one GPU.

    python examples/fit_7b_on_one_gpu.py               # Qwen2.5-0.5B on 8 GB: about a minute on two cores, no GPU
    python examples/fit_7b_on_one_gpu.py --full        # Qwen2.5-7B on 24 GB

Each row changes one thing and keeps what came before: bfloat16 weights, adapters on a base that policy and reference
share instead of two policies, then recomputing activations in the backward pass instead of keeping them (of the kinds
the installed memprof knows: all of a layer, or all but attention's outputs, or all with the layers' inputs in host
memory), then the same completions in smaller micro-batches, then a 4-bit base. A step that moves the peak elsewhere
saves less than its own part was: the last column says where the peak is.
"""

from __future__ import annotations

from dataclasses import dataclass

from simulations import ending, options, save, simulate_all, table

from memprof.config.settings import CHOICES, Settings
from memprof.plan.simulations import SimulatedRow
from memprof.report.codec import to_builtins
from memprof.units import format_gib
from memprof.vocabulary import CATEGORY_LABELS

CHECKPOINTING = {
    "full": "+ checkpointing: recompute every layer",
    "selective": "or: recompute all but attention's outputs",
    "offloaded": "or: recompute, layers' inputs in host memory",
}


@dataclass(frozen=True)
class Step:
    """A row: what is changed, the run after it, and the row it is held against."""

    name: str
    settings: Settings
    after: int | None


def steps(model: str, completions: int, prompt_length: int, completion_length: int) -> list[Step]:
    """Return the rows; alternatives are held against the same row."""
    two = Settings(
        model=model,
        dtype="float32",
        beta=0.04,  # a reference model is held
        optim="adamw_torch_fused",
        gradient_checkpointing=False,
        num_generations=completions,
        per_device_train_batch_size=completions,
        prompt_length=prompt_length,
        completion_length=completion_length,
    )
    half = two.with_(dtype="bfloat16")
    shared = half.with_(lora_r=16)
    rows = [
        Step("two policies, float32", two, None),
        Step("+ bfloat16 weights", half, 0),
        Step("+ LoRA on one shared base", shared, 1),
    ]
    for kind, words in CHECKPOINTING.items():
        if kind in CHOICES["gradient_checkpointing"]:
            rows.append(Step(words, shared.with_(gradient_checkpointing=True if kind == "full" else kind), 2))
    small = shared.with_(
        gradient_checkpointing=True,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=completions,
        steps_per_generation=completions,
    )
    rows.append(Step("+ micro-batches of one completion", small, 3))
    rows.append(Step("+ 4-bit base (QLoRA)", small.with_(load_in_4bit=True), len(rows) - 1))
    return rows


def main(argv: list[str] | None = None) -> None:
    """Simulate the steps and print what each saves."""
    parser = options(__doc__)
    parser.add_argument("--full", action="store_true", help="Qwen2.5-7B on 24 GB")
    parser.add_argument("--model", help="hub id of the catalogue or config.json")
    parser.add_argument("--gpu", metavar="NAME|SIZE", help="default: 8GB, with --full 24GB")
    parser.add_argument("--completions", type=int, default=8, help="of a prompt, and in a micro-batch at first")
    parser.add_argument("--prompt-length", type=int, default=256)
    parser.add_argument("--completion-length", type=int, default=786)
    arguments = parser.parse_args(argv)
    model = arguments.model or ("Qwen/Qwen2.5-7B-Instruct" if arguments.full else "Qwen/Qwen2.5-0.5B-Instruct")
    gpu = arguments.gpu or ("24GB" if arguments.full else "8GB")
    named = steps(model, arguments.completions, arguments.prompt_length, arguments.completion_length)
    rows = simulate_all([step.settings for step in named], gpu, arguments.workers)
    save([{"step": step.name, **to_builtins(row)} for step, row in zip(named, rows, strict=True)], arguments.json)
    lengths = f"{arguments.prompt_length} + {arguments.completion_length}"
    print(f"{model}, {arguments.completions} completions of {lengths} tokens:\n")
    print(table(["step", "GiB needed", "saves", f"fits {gpu}", "highest in", "largest"], _cells(named, rows)))


def _cells(named: list[Step], rows: list[SimulatedRow]) -> list[list[str]]:
    needs = [row.needed_bytes for row in rows]
    return [
        [
            step.name,
            format_gib(need),
            "" if step.after is None else format_gib(needs[step.after] - need),
            "yes" if row.fits else "no",
            str(row.peak_phase),
            CATEGORY_LABELS[row.largest_category],
        ]
        for step, need, row in zip(named, needs, rows, strict=True)
    ]


if __name__ == "__main__":
    ending(main)
