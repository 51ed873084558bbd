"""Show what more completions for each prompt cost: 4, 8, 16 and 64, with old and new ways to compute the loss.

    python examples/num_generations.py                  # 0.5B, 4 to 64: about a minute on two cores, no GPU
    python examples/num_generations.py --model meta-llama/Llama-3.1-8B-Instruct --lora-r 16

Three lines: logits materialised for the whole group, as TRL did until its 0.2x releases; the installed TRL with the
whole group in one micro-batch; and the installed TRL with a micro-batch of 4 completions, the rest accumulated, which
trains on the same completions and gives the same step.
"""

from __future__ import annotations

from pathlib import Path

from simulations import chart, ending, options, save, simulate_all, table

from memprof.config.gpus import find_gpu
from memprof.config.settings import Settings
from memprof.plan.simulations import SimulatedRow
from memprof.report.codec import to_builtins
from memprof.units import GIB, format_gib

MICRO_BATCH = 4
WAYS: dict[str, tuple[str, bool]] = {
    "logits materialised, one micro-batch": ("trl-full-logits", False),
    "TRL today, one micro-batch": ("trl", False),
    "TRL today, accumulated": ("trl", True),
}


def settings_of(base: Settings, generations: int, way: str) -> Settings:
    """Return the same step with this many completions of one prompt."""
    recipe, accumulated = WAYS[way]
    pieces = max(1, generations // MICRO_BATCH) if accumulated else 1
    return base.with_(
        recipe=recipe,
        num_generations=generations,
        per_device_train_batch_size=generations // pieces,
        gradient_accumulation_steps=pieces,
        steps_per_generation=pieces,
    )


def main(argv: list[str] | None = None) -> None:
    """Simulate, print the table and write the chart."""
    parser = options(__doc__)
    parser.add_argument("--model", default="Qwen/Qwen2.5-0.5B-Instruct", help="hub id of the catalogue or config.json")
    parser.add_argument("--generations", default="4,8,16,64")
    parser.add_argument("--lora-r", type=int, help="train adapters of this rank; default: everything")
    parser.add_argument("--prompt-length", type=int, default=256)
    parser.add_argument("--completion-length", type=int, default=786)
    parser.add_argument("--gpu", default="H100", metavar="NAME|SIZE")
    parser.add_argument("-o", "--output", type=Path, default=Path("num_generations.html"), help="the chart's page")
    arguments = parser.parse_args(argv)
    counts = [int(count) for count in arguments.generations.split(",")]
    base = Settings(
        arguments.model,
        dtype="bfloat16",
        lora_r=arguments.lora_r,
        prompt_length=arguments.prompt_length,
        completion_length=arguments.completion_length,
    )
    cells = [(way, count) for way in WAYS for count in counts]
    found = simulate_all([settings_of(base, n, way) for way, n in cells], arguments.gpu, arguments.workers)
    rows: dict[tuple[str, int], SimulatedRow] = dict(zip(cells, found, strict=True))
    save([{"way": way, "num_generations": n, **to_builtins(row)} for (way, n), row in rows.items()], arguments.json)

    words = [[way, *(_cell(rows[way, n]) for n in counts)] for way in WAYS]
    print(f"GiB needed for {arguments.model} on {arguments.gpu} by completions a prompt:\n")
    print(table(["", *map(str, counts)], words))
    lines = {way: [rows[way, n].needed_bytes / GIB for n in counts] for way in WAYS}
    chart(
        arguments.output, f"{arguments.model}: memory by completions a prompt", "num_generations", counts, lines,
        find_gpu(arguments.gpu).total_bytes / GIB,
    )  # fmt: skip
    print(f"\nChart: {arguments.output}")


def _cell(row: SimulatedRow) -> str:
    return format_gib(row.needed_bytes) + ("" if row.fits else " OOM")


if __name__ == "__main__":
    ending(main)
