"""Show how much memory GRPO takes by model size and method on an 80 GB card, beside a published table.

    python examples/vram_table.py                      # the 0.5B column: under a minute on two cores, no GPU
    python examples/vram_table.py --sizes all          # every column of the published table
    python examples/vram_table.py --sizes 8B --gpu 24GB

Each cell is TRL's own training step, executed on tensors without values through a model of CUDA's caching allocator.
The published figures are the peak of the first hundred steps on one H100 with TRL 0.14, which materialised
logits (``--recipe trl`` shows what the installed TRL needs); benchmarks/measurements.md has both tables.
"""

from __future__ import annotations

from published_tables import METHODS, MODELS, PUBLISHED, settings_of
from simulations import ending, options, save, simulate_all, table

from memprof.config.gpus import find_gpu
from memprof.config.settings import CHOICES
from memprof.report.codec import to_builtins


def main(argv: list[str] | None = None) -> None:
    """Simulate the cells asked for and print the table."""
    parser = options(__doc__)
    parser.add_argument("--sizes", default="0.5B", help=f"of {', '.join(MODELS)}, parted by commas, or all")
    parser.add_argument("--methods", default="all", help=f"of {', '.join(METHODS)}, parted by commas, or all")
    parser.add_argument("--recipe", default="trl-0.14", choices=CHOICES["recipe"], help="how the loss is made")
    parser.add_argument("--gpu", default="H100", metavar="NAME|SIZE")
    parser.add_argument("--model", help="a hub id of the catalogue or a config.json instead of the published sizes")
    arguments = parser.parse_args(argv)
    sizes = list(MODELS) if arguments.sizes == "all" else arguments.sizes.split(",")
    methods = list(METHODS) if arguments.methods == "all" else arguments.methods.split(",")
    if unknown := (set(sizes) - set(MODELS)) | (set(methods) - set(METHODS)):
        parser.error(f"not in the table: {', '.join(sorted(unknown))}")
    models = {arguments.model: arguments.model} if arguments.model else {size: MODELS[size] for size in sizes}

    cells = [(method, size) for method in methods for size in models]
    wanted = [settings_of(models[size], method).with_(recipe=arguments.recipe) for method, size in cells]
    rows = dict(zip(cells, simulate_all(wanted, arguments.gpu, arguments.workers), strict=True))
    named = {"recipe": arguments.recipe}
    save([{"method": m, "size": s, **named, **to_builtins(row)} for (m, s), row in rows.items()], arguments.json)

    def cell(method: str, size: str) -> str:
        row = rows[method, size]
        ours = f"{row.needed_bytes / 1e9:.1f}{'' if row.fits else ' OOM'}"
        if size not in MODELS:
            return ours
        published = PUBLISHED[method][list(MODELS).index(size)]
        return f"{ours} ({published or 'OOM'})"

    total = find_gpu(arguments.gpu).total_bytes
    print(f"GB needed of {total / 1e9:.1f} on {arguments.gpu}, simulated (published on an H100):\n")
    print(table(["method", *models], [[method, *(cell(method, size) for size in models)] for method in methods]))


if __name__ == "__main__":
    ending(main)
