"""Train on an emulated GPU under the installed CUDA build of torch, with the callback and with the lean trainer.

``benchmarks.versions cuda`` runs this module in an environment of each torch: ``python -m benchmarks.versions.cuda_runs
OUT.json``. The emulator must be built for that torch.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from memprof.emulate.launch import enter

PACKAGES = ("torch", "triton", "trl", "transformers", "peft", "accelerate", "numpy")
CARD = "24GB"
# Eight layers, so that what is parked is more than what is on its way: at most two inputs out and two in.
_SHAPE = {"num_hidden_layers": 8}
_LEAN = {"gradient_checkpointing": True, "max_tokens_per_piece": 240}
# Each generation serves two optimizer steps, so that old log-probabilities are needed; beta asks for the reference's.
_GRPO = {"max_steps": 4, "steps_per_generation": 2, "gradient_accumulation_steps": 1, "beta": 0.04}
CASES: tuple[dict[str, Any], ...] = (
    {"name": "callback", "settings": _GRPO},
    {"name": "alone", "settings": _GRPO, "watch": False},
    {"name": "offloaded", "lean": True, "shape": _SHAPE, "settings": {**_LEAN, "checkpointing": "offloaded"}},
    {"name": "kept", "lean": True, "shape": _SHAPE, "settings": {**_LEAN, "checkpointing": "full"}},
)


def main() -> None:
    """Write versions and what each run left to the file named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("json", type=Path, help="where the result goes")
    options = parser.parse_args()
    enter(CARD)
    with tempfile.TemporaryDirectory() as folder:
        result = {"python": sys.version.split()[0], "versions": versions(), "runs": runs(Path(folder))}
    options.json.write_text(json.dumps({**result, "compat": compat()}, indent=2) + "\n", encoding="utf-8")


def versions() -> dict[str, str]:
    """Return the versions of what takes part, and of CUDA."""
    import torch

    found = {"cuda": str(torch.version.cuda)}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return {**found, "torch": torch.__version__}


def compat() -> dict[str, Any]:
    """Return which features are refused here, with the sentence (None: not refused), and what cannot be marked."""
    from memprof.compat.check import missing, require
    from memprof.errors import UsageError

    said: dict[str, str | None] = {}
    for feature in ("callback", "run", "attach", "record.cuda", "simulate", "lean"):
        try:
            said[feature] = require(feature)
        except UsageError as refusal:
            said[feature] = str(refusal)
    return {"refused": said, "missing": {name: missing(name) for name in ("callback", "record.cuda", "lean")}}


def runs(folder: Path) -> dict[str, dict[str, Any]]:
    """Train every case; return figures of the two that are recorded, held against the two they must equal."""
    from tests.cuda.programs.grpo_runs import one
    from tests.cuda.programs.ledger import Ledger

    ledger, told = Ledger(), {}
    for case in CASES:
        with parks() as parked:
            told[case["name"]] = one(folder, case, ledger)
        told[case["name"]]["parked_bytes"] = parked
    recorded = {name: described(folder / name, told[name]) for name in ("callback", "offloaded", "kept")}
    recorded["callback"]["unchanged"] = same(told["callback"], told["alone"])
    kept = recorded.pop("kept")
    recorded["offloaded"] |= {
        "same_as_kept": same(told["offloaded"], told["kept"]),
        "activations_kept_bytes": kept["activations_bytes"],
        "parked": summary(told["offloaded"]["parked_bytes"]),
        "layer_inputs": inputs(told["offloaded"]["facts"]),
    }
    return recorded


@contextmanager
def parks() -> Iterator[list[int]]:
    """Note the size of every tensor that goes to the lean trainer's pool of host memory."""
    from memprof.grpo.techniques.offload import HostPool

    taken: list[int] = []
    take, latest = HostPool.take, None

    def noting(pool: HostPool, n_bytes: int) -> Any:
        nonlocal latest
        part = take(pool, n_bytes)
        if part[1] is not latest:  # a pool that has to grow calls `take` once more, and returns the same part
            taken.append(n_bytes)
        latest = part[1]
        return part

    HostPool.take = noting
    try:
        yield taken
    finally:
        HostPool.take = take


def described(out: Path, told: dict[str, Any]) -> dict[str, Any]:
    """Return a recording's figures beside the allocator's counter."""
    from memprof import analyze, load_snapshot
    from tests.cuda.balance import Balance, report_of

    snapshots = sorted((out / "_memprof").glob("step-*.pickle"))
    if not snapshots:
        raise RuntimeError(f"{out.name}: nothing was recorded")
    snapshot = snapshots[-1]
    report, analysis = report_of(snapshot), analyze(load_snapshot(snapshot))
    try:
        for breakdown in (analysis.peak, *analysis.phases):
            breakdown.self_check()
    except AssertionError as error:
        check = str(error)
    else:
        check = "passed"
    trained = [phase for phase in report["phases"] if phase["phase"] in ("forward", "backward")]
    logs = [row for row in told["logs"] if "loss" in row]
    return {
        "balance": asdict(Balance.of(report, told["counters"])),
        "self_check": check,
        "activations_bytes": max(phase["categories"].get("activations", 0) for phase in trained),
        "host": report["host"],
        "losses": [row["loss"] for row in logs],
        "gradient_norms": [row["grad_norm"] for row in logs],
        "reward_std": [row["reward_std"] for row in logs if "reward_std" in row],  # of steps that generate
        "moved": told["moved"],
        "left_bytes": told.get("left"),
        "notes": report["notes"],
    }


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two runs logged the same and ended with the same parameters, to the bit."""
    return bool(one["logs"] == other["logs"] and one["parameters"] == other["parameters"])


def inputs(facts: dict[str, Any]) -> dict[str, int]:
    """Return how many layer inputs two steps save beside the last layer's, which stays, and the bytes of each."""
    from tests.cuda.programs.tiny import SHAPE

    tokens = facts["sequences"] * (facts["prompt_tokens"] + facts["completion_tokens"])
    each = tokens * int(SHAPE["hidden_size"]) * facts["element_size"]
    return {"count": 2 * (facts["layers"] - 1), "smallest_bytes": each, "largest_bytes": each}


def summary(sizes: list[int]) -> dict[str, int]:
    """Return how many tensors were parked and the smallest and largest, in bytes."""
    return {"count": len(sizes), "smallest_bytes": min(sizes, default=0), "largest_bytes": max(sizes, default=0)}


if __name__ == "__main__":
    main()
