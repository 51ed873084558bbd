"""Make the lean trainer's tables from the results: sizes in GiB, FLOPs of one step's training in PFLOP.

    python -m benchmarks.lean tables [NAME ...]

``benchmarks.docs.tables`` puts them into the documentation, but those in ``PRINTED``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import click

from benchmarks.lean.memory import training_bytes
from benchmarks.tabling import read, table
from memprof.units import GIB

_PETA = 1e15


def _gib(size: int | None) -> object:
    return "–" if size is None else size / GIB


def _memory(pick: Callable[[str], bool]) -> dict[str, Any]:
    return {name: row for name, row in read("lean_memory")["cases"].items() if pick(name)}


def memory() -> str:
    """Show the simulated cases that differ in what is trained or by whom, and what the memory costs in time."""
    head = ("run", "GPU", "training", "generation", "whole", "host", "step, s")
    return table(head, [
        (name, row["settings"]["on"] if "price" in row else "–", _gib(training_bytes(row)),
         _gib(row["phases"].get("generate")), _gib(row["allocated_bytes"]), _gib(row["host_bytes"]), _price(row))
        for name, row in _memory(lambda name: name not in _BESIDE).items()
    ])  # fmt: skip


# Steps between two rows that are shown; benchmarks/results/cpu/lean_memory.json has them.
_BESIDE = (
    "8B LoRA, 8 x 20480, TRL tuned by hand",
    "8B LoRA, 8 x 20480, TRL tuned by hand, offloaded checkpoints, vLLM",
    "1.5B QLoRA, 8 x 1042, TRL tuned by hand",
    "1.5B full, 8-bit Adam, reference, 8 x 1042, lean, vLLM, parked weights",
    "1.5B QLoRA, 8 x 1042, lean",
    "7B LoRA, 8 x (16384 + 1024), TRL's defaults",
)


def _price(row: Mapping[str, Any]) -> str:
    return f"{row['price']['estimated_seconds'][row['settings']['on']]['step']:,.0f}" if "price" in row else "–"


_SHORT = {
    "8B LoRA, 8 x 20480, TRL's defaults": "TRL's trainer, its defaults",
    "8B LoRA, 8 x 20480, TRL tuned by hand, offloaded checkpoints": "TRL's, tuned, patched to offload checkpoints",
    "8B LoRA, 8 x 20480, lean": "the lean trainer",
    "8B LoRA, 8 x 20480, lean, vLLM, parked weights": "the lean trainer, generating with vLLM",
    "8B LoRA, 8 x 20480, lean, 48 GB": "the lean trainer",
    "8B LoRA, 8 x 20480, lean, vLLM, parked weights, 48 GB": "the lean trainer, generating with vLLM",
}


def short() -> str:
    """Show one run, with TRL's trainer and the lean one, and the GPU of each."""
    rows = _memory(lambda name: name in _SHORT)
    return table(("", "GPU", "training", "generation", "whole step", "time, s"), [
        (label, rows[name]["settings"]["on"], _gib(training_bytes(rows[name])),
         _gib(rows[name]["phases"].get("generate")), _gib(rows[name]["allocated_bytes"]), _price(rows[name]))
        for name, label in _SHORT.items()
    ])  # fmt: skip


def _technique(rows: Mapping[str, Any], name: str, base: str) -> list[str]:
    found = rows.get(name)
    if found is None:
        return ["", "", ""]
    start = rows[base]
    sizes = [(found[key] - start[key]) / GIB for key in ("training_bytes", "whole_bytes")]
    flops = (found["flops"] - start["flops"]) / _PETA
    return [*(_signed(size) for size in sizes), _signed(flops)]


def _signed(value: float) -> str:
    return "0" if abs(value) < 0.005 else f"{value:+.2f}".replace("-", "−")


def techniques(group: str) -> str:
    """Show what each brought: alone over TRL's row, and what the lean trainer has more without it."""
    rows = read("lean_techniques")["groups"][group]
    head = ("", "alone: training", "whole", "PFLOP", "last: training", "whole", "PFLOP")
    lines: list[list[object]] = []
    for label, left, right in (("start", "TRL", "lean"), ("every switch off", "our step, nothing on", "")):
        cells: list[object] = [label]
        for name in (left, right):
            row = rows.get(name)
            cells += ["", "", ""] if row is None else [
                row["training_bytes"] / GIB, row["whole_bytes"] / GIB, row["flops"] / _PETA]  # fmt: skip
        lines.append(cells)
    names = dict.fromkeys(name.partition(": ")[2] for name in rows if ": " in name)
    for name in names:
        alone, last = f"alone: {name}", f"last: {name}"
        # The base's dtype and bits are rows of their own: what is there with it, less what is there without.
        if name == "bf16 base":
            left, right = _turned(_technique(rows, alone, "TRL")), _technique(rows, last, "lean")
        elif name == "NF4 base":
            left, right = _technique(rows, alone, "TRL"), _turned(_technique(rows, last, "lean"))
        else:
            left, right = _technique(rows, alone, "TRL"), _technique(rows, last, "lean")
        lines.append([name, *left, *right])
    return table(head, lines)


def _turned(cells: list[str]) -> list[str]:
    swapped = {"+": "−", "−": "+"}
    return [swapped.get(cell[:1], cell[:1]) + cell[1:] for cell in cells]


def longest() -> str:
    """Show tokens that fit, by GPU, base and trainer; what is known of longer ones, and where they run out."""
    rows = read("lean_longest")["rows"]
    lines = []
    for name in dict.fromkeys(key.rpartition(", ")[0] for key in rows):
        alone, whole = (rows.get(f"{name}, {kind}") for kind in ("training alone", "with generation"))
        ends = ["–", "–"] if whole is None else _length(whole)
        lines.append([name, "–" if alone is None else _length(alone)[0], *ends, _decoding(whole)[1]])
    return table(("", "training alone", "with generation", "ends in", "decode steps"), lines)


def _decoding(row: Mapping[str, Any] | None) -> list[object]:
    """Count the passes of a generation of that length, and the decode steps of all of them."""
    if row is None:
        return ["–", "–"]
    passes = -(-_GROUP // row["settings"].get("generation_batch", _GROUP))
    return [passes, f"{passes * (row['longest'] - row['settings']['prompt_length']):,}"]


_GROUP = 8


def _length(row: Mapping[str, Any]) -> list[object]:
    best = max((one["length"] for one in row["tried"] if one["fits"]), default=0)
    end = min((one for one in row["tried"] if not one["fits"]), key=lambda one: int(one["length"]), default=None)
    if end is None:
        return [f"≥ {best:,}", "–"]
    beyond = "" if end["length"] - best <= row["grain"] else f" (not {end['length']:,})"
    return [f"{best:,}{beyond}" if best else f"< {end['length']:,}", end["phase"]]


def speed() -> str:
    """Show the lean trainer's CPU time and peak over TRL's, and in brackets over TRL's in micro-batches of one."""
    from benchmarks.lean.speed import FAIR, LEAST

    found: dict[str, dict[str, str]] = {}
    for name, row in read("lean_speed")["cases"].items():
        if FAIR not in row["cpu_ratio"]:
            continue
        kind, case = ("LoRA", name.replace("lora", "64, SmolLM2")) if "lora" in name else name.split(", ")[1:]
        cells = found.setdefault(case.removesuffix(" tokens"), {})
        cells[f"{kind}, time"] = "{:.2f} ({:.2f})".format(*(row["cpu_ratio"][base] for base in (FAIR, LEAST)))
        cells[f"{kind}, peak"] = "{:.2f} ({:.2f})".format(*(_peaks(row, base) for base in (FAIR, LEAST)))
    columns = ("full, time", "full, peak", "LoRA, time", "LoRA, peak")
    return table(("tokens", *columns), [(case, *(row.get(c, "–") for c in columns)) for case, row in found.items()])


def crossing() -> str:
    """Show the CPU time of short rows over TRL's: by default, and one row after another."""
    rows = read("lean_crossing")["rows"]
    kinds = ("lean", "lean, row by row")
    return table(("run", *kinds), [(name, *(row["cpu_ratio"][kind] for kind in kinds)) for name, row in rows.items()])


def _peaks(row: Mapping[str, Any], base: str) -> float:
    """Divide what is live at the lean trainer's peak, beside weights and adapters, by what is at another's."""
    lean, other = (
        found["total"] - found.get("weights", 0) - found.get("adapters", 0)
        for found in (row["peak_bytes"]["lean"], row["peak_bytes"][base])
    )
    return float(lean / other)


def lengths() -> str:
    """Show training peaks by length: of a simulated GPU, and of real micro-batches that were traced."""
    from benchmarks.lean.speed import LEAST

    head = ("tokens", "TRL, 8 together", "micro-batch 1", "lean", "lean ÷ micro-batch 1")
    lines = []
    for device, words in (("cuda", ""), ("traced", ", traced on a CPU")):
        for row in (row for row in read("lean_lengths").values() if row["device"] == device):
            found = row["peak_bytes"]
            sizes = (f"{found[kind] / 1e6:,.0f}" if kind in found else "–" for kind in ("trl", LEAST, "lean"))
            lines.append((f"{row['length']}{words}", *sizes, f"{found['lean'] / found[LEAST]:.3f}"))
    return table(head, lines)


def _steps(log: list[str]) -> int:
    """Read from the trainer's log how many steps the rolling batch took."""
    return next(int(found[1]) for line in log if (found := re.search(r"took (\d+) decode steps", line)))


def generation() -> str:
    """Show CPU time of each way to generate over all together, and the traced cache beside its cap."""
    found = read("lean_generation")
    head = ("one thread", "tokens a row", "passes of 2", "rolling batch", "its steps", "cap, MB", "cache, MB")
    return table(head, [
        (name, f"{row['tokens']['prompt']} + {row['tokens']['completion']}", row["cpu_ratio"]["passes"],
         row["cpu_ratio"]["rolling batch"], _steps(row["log"]),
         *(f"{row[key] / 1e6:.1f}" for key in ("cap_bytes", "cache_peak_bytes")))
        for name, row in found["cases"].items()
    ])  # fmt: skip


def track() -> str:
    """Say by how much any step of both runs differs, relative to the largest value."""
    found = read("lean_track")
    apart = (
        f"{name} {found['largest_difference'][key]:.1e}"
        for name, key in (("loss", "loss"), ("reward", "reward"), ("gradient norm", "grad_norm"), ("KL", "kl"))
    )
    return f"Largest difference of any step, over the largest value: {', '.join(apart)}.\n"


def blocks() -> str:
    """Show three layers of SmolLM2's shape on a CPU: each technique over doing nothing, with and without tiles."""
    rows = read("lean_blocks")["one_sequence"]
    head = ("checkpointing", "FLOPs", "peak, MB", "time", "tiled MLP: FLOPs", "peak, MB", "time")
    return table(head, [
        (name, *(cell for row in (rows[name], rows[f"{name}, tiled MLP"])
                 for cell in (row["flops"], f"{row['peak_bytes'] / 1e6:.1f}", row["cpu_seconds"])))
        for name in rows
        if ", " not in name and not name.startswith("offloaded")  # the host is the same memory here
    ])  # fmt: skip


_PATHS = {
    "trl": "TRL's chunks",
    "liger": "Liger",
    "plain": "plain logits",
    "in_backward": "without `grad_fn`",
    "in_forward": "with `grad_fn`",
}


def fused_loss() -> str:
    """Show each path of the log-probabilities: products of the head, peak, time and errors."""
    found = read("fused_loss")
    rows = []
    for head, (title, gradient) in {
        "frozen_head": ("frozen head: ", "hidden_gradient"),
        "trainable_head": ("trainable head: ", "head_gradient"),
    }.items():
        for path, name in _PATHS.items():
            row = found[head][path]
            if "error" in row:
                rows.append([title + name, row["error"], *["–"] * 4])
                continue
            errors = found["bf16_error"][path]
            logps = "–" if errors["logps"] is None else f"{errors['logps']:.1e}"
            sums = [f"{row['products']:.0f}", f"{row['peak_bytes'] / 1e6:.1f}", row["seconds_over_trl"]]
            rows.append([title + name, *sums, logps, f"{errors[gradient]:.1e}"])
    head_line = ["", "products", "peak, MB", "time ÷ TRL", "log-probabilities off", "gradient off"]
    return table(head_line, rows)


TABLES: dict[str, Callable[[], str]] = {
    "lean-memory": memory,
    "lean-lengths": lengths,
    "lean-short": short,
    "lean-blocks": blocks,
    "lean-techniques": lambda: techniques("8B"),
    "lean-techniques-prompt": lambda: techniques("7B long prompt"),
    "lean-techniques-reference": lambda: techniques("1.5B reference"),
    "lean-longest": longest,
    "lean-speed": speed,
    "lean-crossing": crossing,
    "lean-generation": generation,
    "lean-track": track,
    "lean-fused-loss": fused_loss,
}

# On no page: printed by the command alone.
PRINTED = (
    "lean-blocks",
    "lean-fused-loss",
    "lean-generation",
    "lean-lengths",
    "lean-techniques-prompt",
    "lean-techniques-reference",
)


@click.command(help=__doc__)
@click.argument("names", nargs=-1, type=click.Choice(list(TABLES)), metavar="[NAME]...")
def main(names: tuple[str, ...]) -> None:
    for name in names or TABLES:
        print(f"{name}\n\n{TABLES[name]()}")
