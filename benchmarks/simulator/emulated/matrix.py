"""Run TRL on emulated GPUs and simulate the same runs: allocated and reserved memory, signed, in bytes.

    python -m benchmarks.simulator emulated [--only NAME]... [--again] [--history FOLDER]

Each run is a child process of its own, on torch's CUDA build: the allocator is the real one, the device is not. What is
done is kept in ``benchmarks/results/emulated-cuda/matrix.json`` at once; a second call goes on where the first left
off, and simulates again what it has measured.
"""

from __future__ import annotations

import json
import textwrap
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click

from benchmarks.measure import environment
from benchmarks.simulator.emulated.cases import CASES, Case
from benchmarks.simulator.emulated.device import ask
from benchmarks.tabling import ROOT
from memprof.config.settings import Settings

RESULTS = ROOT / "benchmarks" / "results" / "emulated-cuda"
_CHILD = "benchmarks.simulator.emulated.device_run"


def measured(case: Case, history: Path | None = None) -> dict[str, Any]:
    """Train on the emulated GPU; what the real allocator counted at its highest, in bytes."""
    question = {"settings": case.settings.to_dict(), "loaded": case.loaded}
    if history is not None:
        question["history"] = str(history)
    return ask(_CHILD, question, case.card, alloc_conf=case.settings.alloc_conf)


def simulated(case: Case) -> dict[str, Any]:
    """Simulate the same run, and read the same counters of the modelled allocator."""
    from memprof.config.gpus import find_gpu
    from memprof.simulate.run import simulate_settings

    raw = simulate_settings(case.settings, gpu=find_gpu(case.card), stacks=False, by_name=case.loaded)
    highest: dict[str, Any] = raw["memprof"]["highest"]
    return highest


def settings_of(case: Case) -> dict[str, Any]:
    """Return what of a case's settings is not at its default."""
    defaults = Settings(model="").to_dict()
    return {k: v for k, v in case.settings.to_dict().items() if v != defaults[k]}


@click.command(help=__doc__)
@click.option("--only", multiple=True, help="A case's name; may be given more than once.")
@click.option("--again", is_flag=True, help="Measure again what has been measured.")
@click.option("--measure", is_flag=True, help="Measure what has not been measured, and simulate nothing.")
@click.option("--history", type=click.Path(path_type=Path), help="Keep each run's memory history in this folder.")
def main(only: tuple[str, ...], again: bool, measure: bool, history: Path | None) -> None:
    for case in CASES:
        if only and case.name not in only:
            continue
        row = read().get(case.name, {})
        try:
            if again or "measured" not in row:
                row["measured"] = measured(case, history / f"{CASES.index(case)}.pickle" if history else None)
            row |= {"card": case.card, "loaded": case.loaded, "settings": settings_of(case)}
            if not measure:
                row["simulated"] = simulated(case)
        except Exception as error:
            print(f"{case.name}: {type(error).__name__}: {error}", flush=True)
            continue
        keep_row("matrix", CASES, case.name, row, {"environment": environment()})
        if "simulated" in row:
            print(line(case.name, row), flush=True)


def read() -> dict[str, Any]:
    """Read the rows that are kept, by name."""
    return read_rows("matrix")


def read_rows(name: str) -> dict[str, Any]:
    """Read the rows of one of the results, by name."""
    file = RESULTS / f"{name}.json"
    rows: dict[str, Any] = json.loads(file.read_text())["rows"] if file.is_file() else {}
    return rows


def keep_row(result: str, cases: Iterable[Case], name: str, row: dict[str, Any], about: dict[str, Any]) -> None:
    """Add a row to those of one of the results, in the order of the cases; ``about`` stands before them."""
    rows = {**read_rows(result), name: row}
    ordered = {case.name: rows[case.name] for case in cases if case.name in rows}
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / f"{result}.json").write_text(json.dumps({**about, "rows": ordered}, indent=1) + "\n")


_KINDS = ("allocated_bytes", "reserved_bytes")


def table(rows: dict[str, Any]) -> str:
    """Write the table of benchmarks/measurements.md: every row that differs; then count those that are exact."""
    head = ["| run | GPU | allocated | simulated | reserved | simulated |", "|---|---|--:|--:|--:|--:|"]
    both = {name: row for name, row in rows.items() if "simulated" in row}
    exact = [name for name, row in both.items() if all(row["measured"][k] == row["simulated"][k] for k in _KINDS)]
    differ = [line(name, row) for name, row in both.items() if name not in exact]
    differing = both.keys() - set(exact)
    kinds = Counter(kind if (kind := ", ".join(name.split(", ", 2)[:2])) not in differing else name for name in exact)
    text = ", ".join(f"*{kind}*" + f" ({count})" * (count > 1) for kind, count in kinds.items())
    words = textwrap.wrap(f"The {len(exact)} others are exact: {text}.", 120)
    return "\n".join([*head, *differ, "", *words])


def line(name: str, row: dict[str, Any]) -> str:
    """Write one row of the table."""
    real, ours = row["measured"], row["simulated"]
    cells = [f"{real[key] / 2**30:.2f} | {difference(ours[key], real[key])}" for key in _KINDS]
    return f"| {name} | {row['card']} | {' | '.join(cells)} |"


def difference(ours: int, real: int) -> str:
    """Write a difference: exact, or in bytes where it is small, else in percent."""
    if ours == real:
        return "exact"
    text = f"{ours - real:+,} B" if abs(ours - real) < 2**20 else f"{100 * (ours / real - 1):+.3f}%"
    return text.replace("-", "−")


if __name__ == "__main__":
    main()
