"""Run the callback and the lean trainer under CUDA builds of several versions of torch, on an emulated GPU.

``python -m benchmarks.versions cuda [--only 2.6.0] [--envs DIR]``

Each torch has an environment of its own: the CUDA wheel without NVIDIA's packages, its Triton (which brings CUDA's
headers), and this environment's packages for all else. The emulator is built for it. The newest is ``make cuda``'s.
Two wheels are 0.9 to 1.1 GB to download and 2 GB on disk.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import venv
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.tabling import ROOT, table
from benchmarks.versions.matrix import PHASES, NotInstalled, clean_environment, done_within, last_words

RESULTS = ROOT / "benchmarks" / "results" / "emulated-cuda" / "versions.json"
INSTALL_SECONDS, BUILD_SECONDS, RUN_SECONDS = 1800, 600, 1800
#: The share of the peak that may be unattributed.
UNATTRIBUTED = 0.001
#: The lean trainer's run has no reference and takes each generation for one step.
_LEAN_PHASES = tuple(phase for phase in PHASES if not phase.endswith("logprobs"))


@dataclass(frozen=True)
class Torch:
    """A version of torch and the Triton it asks for; ``made``: an environment that is set up by other means."""

    name: str
    triton: str
    made: Path | None = None


ROWS = (
    Torch("2.6.0", "3.2.0"),
    Torch("2.9.1", "3.5.1"),
    Torch("2.13.0", "3.7.1", made=ROOT / ".venv-cuda"),
    Torch("2.14.1", "3.8.0"),
    Torch("2.15.0", "3.9.0"),
)


def main(arguments: list[str] | None = None) -> int:
    """Run the rows, print a table, write it all down; 1 where a check failed."""
    names = [row.name for row in ROWS]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.versions cuda", description=__doc__)
    parser.add_argument("--only", action="append", choices=names, help="only this torch; may be repeated")
    parser.add_argument("--envs", type=Path, default=ROOT / "build" / "versions", help="where environments are kept")
    parser.add_argument("--json", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    results = read(options.json) if options.json.is_file() else {}
    for row in ROWS:
        if options.only is None or row.name in options.only:
            print(f"torch {row.name} ...", file=sys.stderr, flush=True)
            results[row.name] = result_of(row, options.envs)
            keep({name: results[name] for name in names if name in results}, options.json)
            for fault in faults(results[row.name]):
                print(f"  {fault}", file=sys.stderr, flush=True)
    print(table_of(results))
    return int(any(faults(result) for result in results.values()))


def read(path: Path = RESULTS) -> dict[str, Any]:
    """Return the rows that were kept."""
    rows: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["rows"]
    return rows


def keep(results: dict[str, Any], path: Path) -> None:
    """Write the rows that there are."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"rows": results}, indent=2) + "\n", encoding="utf-8")


def result_of(row: Torch, envs: Path) -> Any:
    """Return what ``cuda_runs`` says in the torch's environment, or ``{"error": ...}``."""
    try:
        python = environment(row, envs)
        _done([python, "-m", "memprof", "emulate", "--setup"], BUILD_SECONDS)
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "result.json"
            _done([python, "-W", "ignore", "-m", "benchmarks.versions.cuda_runs", out], RUN_SECONDS)
            return json.loads(out.read_text(encoding="utf-8"))
    except (NotInstalled, RuntimeError) as error:
        return {"error": str(error)}


def environment(row: Torch, envs: Path) -> Path:
    """Return the Python of a torch's environment, made where it is not there.

    Raises:
        NotInstalled: pip could not install it, or ``make cuda`` has not been run.
    """
    folder = row.made or envs.absolute() / f"torch-{row.name}"
    python, stamp = folder / "bin" / "python", folder / ".ready"
    if row.made is not None:
        if not python.is_file():
            raise NotInstalled(f"{folder.name} is not there: run make cuda")
        return python
    if stamp.is_file():
        return python
    venv.create(folder, with_pip=False)
    # Three equals signs: the build for CUDA, never one with a local version.
    wheels = (f"torch==={row.name}", f"triton==={row.triton}")
    pip = [sys.executable, "-m", "pip", "--python", python, "install"]
    quiet = ("--quiet", "--disable-pip-version-check", "--no-input", "--no-cache-dir")
    try:
        _done([*pip, *quiet, "--no-deps", *wheels], INSTALL_SECONDS)
        _done([ROOT / ".ci" / "share-packages", sys.executable, python], 60)
    except RuntimeError as error:
        raise NotInstalled(str(error)) from None
    stamp.touch()
    return python


def _done(command: list[str | Path], seconds: int) -> None:
    """Run a command in the project's folder.

    Raises:
        RuntimeError: it did not end well, or not in time; with the last line it wrote.
    """
    quiet = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    env = {**clean_environment("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"), **quiet}
    done = done_within([str(word) for word in command], seconds, cwd=ROOT, env=env)
    if done.returncode:
        raise RuntimeError(last_words(done))


def faults(result: Any) -> list[str]:
    """Return what is not as it must be under a torch, a sentence each."""
    if "error" in result:
        return [result["error"]]
    callback, lean = result["runs"]["callback"], result["runs"]["offloaded"]
    expected = {
        "training with the callback is not training without": callback["unchanged"],
        "the lean trainer with layer inputs in host memory is not the same as with them kept": lean["same_as_kept"],
        "what was parked is not each layer's input but the last's": lean["parked"] == lean["layer_inputs"],
        "parking layer inputs saves nothing": lean["activations_bytes"] < lean["activations_kept_bytes"],
    }
    found = [sentence for sentence, holds in expected.items() if not holds]
    found += [sentence for sentence in result["compat"]["refused"].values() if sentence]
    for name, run, phases in (("callback", callback, PHASES), ("lean", lean, _LEAN_PHASES)):
        found += [f"{name}: {sentence}" for sentence in _unbalanced(run, phases)]
    return found


def _unbalanced(run: dict[str, Any], phases: tuple[str, ...]) -> list[str]:
    balance = run["balance"]
    expected = {
        "the categories are not the active bytes": balance["categories"] == balance["active"],
        "the peak is not the allocator's counter": balance["peak"] == balance["counter"],
        "more than a thousandth is unattributed": balance["unattributed"] <= UNATTRIBUTED * balance["active"],
        "a phase is missing": set(phases) <= set(balance["phases"]),
        f"a phase does not add up: {run['self_check']}": run["self_check"] == "passed",
        "nothing was learned": run["moved"] and min(run["gradient_norms"]) > 0 and max(run["reward_std"]) > 0,
        "a loss is not finite": all(abs(loss) < 1e3 for loss in run["losses"]),
    }
    return [sentence for sentence, holds in expected.items() if not holds]


def table_of(results: dict[str, Any]) -> str:
    """Return the rows as a Markdown table."""
    head = ("torch (CUDA)", "callback: peak", "unattributed", "lean: peak", "its activations", "with inputs kept")
    rows: list[tuple[object, ...]] = []
    for name, result in results.items():
        if "error" in result:
            rows.append((name, result["error"], *[""] * (len(head) - 2)))
            continue
        callback, lean = (result["runs"][run] for run in ("callback", "offloaded"))
        one = callback["balance"]
        sizes = (lean["balance"]["peak"], lean["activations_bytes"], lean["activations_kept_bytes"])
        watched = (f"{one['peak']:,}", f"{one['unattributed']:,}")
        label = f"{name} ({result['versions']['cuda']})"
        rows.append((label, *watched, *(f"{n:,}" for n in sizes)))
    return table(head, rows)
