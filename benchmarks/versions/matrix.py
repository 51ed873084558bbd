"""Run the callback under old and new versions of TRL and of torch, each in a virtual environment of its own.

``python -m benchmarks.versions [--only 0.19.1] [--envs DIR] [--torch-from ENV]``
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import venv
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.tabling import RESULTS, ROOT

# An exact pin: a looser one may bring a build of several gigabytes.
TORCH = "torch==2.13.0"
LIGHT = ("click", "msgspec", "numpy", "rich", "setuptools>=77")
# Phases every GRPO run of `one_version` passes through.
PHASES = ("generate", "reward", "old_logprobs", "reference_logprobs", "forward", "backward", "optimizer_step")
INSTALL_SECONDS, RUN_SECONDS = 900, 600


class NotInstalled(Exception):
    """An environment that pip could not make, with pip's last words."""


@dataclass(frozen=True)
class Row:
    """A version of TRL or of torch, and the releases of its time that go with it."""

    name: str
    requirements: tuple[str, ...]
    torch: str = TORCH


def _row(trl: str, transformers: str, peft: str, accelerate: str, datasets: str) -> Row:
    given = {"trl": trl, "transformers": transformers, "peft": peft, "accelerate": accelerate, "datasets": datasets}
    return Row(trl, tuple(f"{package}=={number}" for package, number in given.items()))


_NEWEST = ("trl", "transformers", "peft", "accelerate", "datasets")
ROWS = (
    _row("0.19.1", "4.53.3", "0.16.0", "1.8.1", "4.0.0"),
    _row("0.21.0", "4.55.4", "0.17.0", "1.10.0", "4.0.0"),
    _row("0.24.0", "4.57.6", "0.18.0", "1.11.0", "4.3.0"),
    _row("0.29.1", "5.2.0", "0.18.1", "1.13.0", "4.5.0"),
    _row("1.0.0", "5.4.0", "0.18.1", "1.13.0", "4.8.4"),
    _row("1.10.0", "5.14.1", "0.20.0", "1.14.0", "5.0.0"),
    _row("1.16.0", "5.20.0", "0.21.0", "1.15.0", "5.0.0"),
    # Three equals signs: never a build with a local version. These bring CUDA's libraries, 2.4 GB to download.
    *(Row(f"torch {number}", _NEWEST, f"torch==={number}") for number in ("2.14.1", "2.15.0")),
    Row("newest", _NEWEST),
)


def main() -> None:
    """Run the rows, print a table, and write it all down."""
    names = [row.name for row in ROWS]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", choices=names, help="only this row; may be repeated")
    parser.add_argument("--envs", type=Path, default=ROOT / "build" / "versions", help="where environments are kept")
    parser.add_argument("--torch-from", type=Path, help="an environment whose torch all rows use")
    parser.add_argument("--json", type=Path, default=RESULTS / "versions.json")
    options = parser.parse_args()
    results = {}
    for row in ROWS:
        if options.only is None or row.name in options.only:
            print(f"{row.name} ...", file=sys.stderr, flush=True)
            results[row.name] = result_of(row, options.envs, options.torch_from)
            print(line_of(row.name, results[row.name]), file=sys.stderr, flush=True)
    print(table(results))
    if options.only is not None and options.json.is_file():
        kept = json.loads(options.json.read_text(encoding="utf-8"))["rows"]
        results = {name: {**kept, **results}[name] for name in names if name in kept or name in results}
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps({"rows": results}, indent=2) + "\n", encoding="utf-8")


def result_of(row: Row, envs: Path, torch_from: Path | None = None, runs: Sequence[str] = ("full", "lora")) -> Any:
    """Return what ``one_version`` says in the row's environment, or ``{"error": ...}``."""
    try:
        return run(environment(row, envs, torch_from), runs)
    except (NotInstalled, RuntimeError) as error:
        return {"error": str(error)}


def environment(row: Row, envs: Path, torch_from: Path | None = None) -> Path:
    """Return the Python of the row's environment, made or brought up to date where it is not.

    Args:
        row: what is installed beside torch and memprof.
        envs: the folder of environments.
        torch_from: another environment. Its packages are seen after the row's own, so that torch needs no second copy;
            what is run is written down by version all the same, and must be what the row asks for.

    Raises:
        NotInstalled: pip could not install it.
    """
    folder = envs.absolute() / f"trl-{row.name.replace(' ', '-')}"
    python = _python_in(folder)
    stamp = folder / "installed.json"
    wanted = _wanted(row, torch_from)
    if stamp.is_file() and json.loads(stamp.read_text(encoding="utf-8")) == wanted:
        return python
    if not python.is_file():
        venv.create(folder)  # this Python's pip installs into it
    if torch_from is not None:
        shared = _home_of("torch", _python_in(torch_from))
        own = sysconfig.get_path("purelib", sysconfig.get_preferred_scheme("prefix"), {"base": str(folder)})
        Path(own, "zz_torch.pth").write_text(f"{shared}\n", encoding="utf-8")
    _pip(python, "--upgrade", row.torch, *row.requirements, *LIGHT)
    _pip(python, "--no-deps", "--no-build-isolation", "-e", str(ROOT))
    stamp.write_text(json.dumps(wanted), encoding="utf-8")
    return python


def _wanted(row: Row, torch_from: Path | None) -> dict[str, Any]:
    """Return what an environment is made of; it is kept while this stays the same. The newest are looked for weekly."""
    pinned = all("==" in requirement for requirement in row.requirements)
    return {
        "requirements": [row.torch, *row.requirements, *LIGHT],
        "week": None if pinned else list(date.today().isocalendar()[:2]),
        "torch_from": None if torch_from is None else str(torch_from.absolute()),
        "project": hashlib.sha256((ROOT / "pyproject.toml").read_bytes()).hexdigest()[:12],
    }


def run(python: Path, runs: Sequence[str] = ("full", "lora")) -> Any:
    """Return what ``one_version`` writes under this Python.

    Raises:
        RuntimeError: it did not end well; with the last line it wrote.
    """
    script = Path(__file__).with_name("one_version.py")
    quiet = {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        command = [str(python), str(script), str(out), "--runs", *runs]
        done = done_within(command, RUN_SECONDS, cwd=folder, env={**clean_environment(), **quiet})
        if done.returncode or not out.is_file():
            raise RuntimeError(last_words(done))
        return json.loads(out.read_text(encoding="utf-8"))


def _home_of(package: str, python: Path) -> Path:
    """Return the folder a Python imports a package from."""
    code = f"import importlib.util as u, pathlib as p; print(p.Path(u.find_spec({package!r}).origin).parents[1])"
    done = done_within([str(python), "-c", code], 60)
    if done.returncode:
        raise NotInstalled(f"{python} has no {package}")
    return Path(done.stdout.strip())


def _python_in(folder: Path) -> Path:
    return folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def _pip(python: Path, *arguments: str) -> None:
    # Python compiles what is imported; transformers alone has two thousand files that are not.
    quiet = ("--quiet", "--disable-pip-version-check", "--no-input", "--no-compile")
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", *quiet, *arguments]
    done = done_within(command, INSTALL_SECONDS, env=clean_environment())
    if done.returncode:
        raise NotInstalled(last_words(done))


def clean_environment(*more: str) -> dict[str, str]:
    """Return this process's variables without those, and ``more``, that would change what a run does."""
    kept_out = ("PYTHONPATH", "PYTHONHOME", "MEMPROF", *more)
    return {name: value for name, value in os.environ.items() if name not in kept_out}


def done_within(command: list[str], seconds: int, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command; one that takes too long ends with 124."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=seconds, **options)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 124, "", f"not done after {seconds} s")


def last_words(done: subprocess.CompletedProcess[str]) -> str:
    """Return the last line that a command wrote of its failure."""
    lines = [line for line in done.stderr.splitlines() if line.strip() and not re.match(r"WARNING|\[notice\]", line)]
    return lines[-1].strip() if lines else f"ended with {done.returncode} and no word"


def missing(result: dict[str, Any]) -> list[str]:
    """Return the phases that were not found in a run."""
    return [phase for phase in PHASES if phase not in result["phases"]]


def line_of(name: str, result: Any) -> str:
    """Return one row's outcome in a line for whoever waits."""
    if "error" in result:
        return f"  {name}: {result['error']}"
    return "\n".join(" ".join(cells) for cells in cells_of(name, result))


def cells_of(name: str, result: Any) -> list[list[str]]:
    """Return the table's cells, one line for each run."""
    if "error" in result:
        return [[name, "", "", "", "", "", "", result["error"][:30]]]
    numbers = result["versions"]
    head_of = [numbers["trl"], numbers["transformers"], numbers["torch"].partition("+")[0], result["python"]]
    lines = []
    for run_name, seen in {**result["runs"], **result.get("commands", {})}.items():
        head = [*head_of, run_name]
        if "error" in seen:
            lines.append([*head, "", "", seen["error"].strip().splitlines()[-1][:30]])
            continue
        if run_name not in result["runs"]:
            lines.append([*head, "", "", f"{seen['peak_bytes']:,} B"])
            continue
        share = seen["unattributed_bytes"] / seen["peak_bytes"]
        found = f"{len(PHASES) - len(missing(seen))} of {len(PHASES)}"
        lines.append([*head, found, f"{share:.2%}", seen["self_check"][:24]])
    return lines


def table(results: dict[str, Any]) -> str:
    """Return the rows as text of at most 80 columns."""
    head = ["TRL", "transformers", "torch", "Python", "run", "phases", "unattributed", "self-check"]
    lines = [head, *(cells for name, result in results.items() for cells in cells_of(name, result))]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines)
