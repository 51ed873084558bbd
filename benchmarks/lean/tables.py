"""Make the lean trainer's tables from the results: sizes in GiB, FLOPs of one step's training in PFLOP.

    python -m benchmarks.lean tables [NAME ...]

``benchmarks.docs.tables`` puts them into the documentation, but those in ``PRINTED``.
"""

from __future__ import annotations

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


def techniques() -> str:
    """Show what each brought: alone over TRL's row, and what the lean trainer has more without it."""
    rows = read("lean_techniques")["rows"]
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


def track() -> str:
    """Say by how much any step of both runs differs, relative to the largest value."""
    found = read("lean_track")
    apart = (
        f"{name} {found['largest_difference'][key]:.1e}"
        for name, key in (("loss", "loss"), ("reward", "reward"), ("gradient norm", "grad_norm"), ("KL", "kl"))
    )
    return f"Largest difference of any step, over the largest value: {', '.join(apart)}.\n"


TABLES: dict[str, Callable[[], str]] = {
    "lean-memory": memory,
    "lean-short": short,
    "lean-techniques": techniques,
    "lean-longest": longest,
    "lean-speed": speed,
    "lean-crossing": crossing,
    "lean-track": track,
}


@click.command(help=__doc__)
@click.argument("names", nargs=-1, type=click.Choice(list(TABLES)), metavar="[NAME]...")
def main(names: tuple[str, ...]) -> None:
    for name in names or TABLES:
        print(f"{name}\n\n{TABLES[name]()}")
