"""Check what only a GPU shows; each check returns plain data for one JSON line.

``tiny`` runs show only that a check works.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.gpu.cases import LEAN, OOM, SIMULATED, TRUTH, Case, shrunk
from benchmarks.gpu.real_run import RECORDED

PAIRS = 5


def truth_of_callback(tiny: bool) -> dict[str, Any]:
    """Compare the report with torch's counters, and the bare pickle with the report (GPU_CHECKS 1 and 2)."""
    return {"runs": [_truth(case, tiny) for case in _cases(TRUTH, tiny)]}


def _truth(case: Case, tiny: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        watched = run(case, tiny, watch="record", keep=folder)
        plain = run(case, tiny)
        snapshots = sorted(Path(folder, "_memprof").glob("*.pickle"))
        if error := watched["error"] or plain["error"] or (None if snapshots else "no snapshot was written"):
            return {"case": case.name, "error": error}
        report = json.loads(snapshots[-1].with_suffix(".json").read_text(encoding="utf-8"))
        bare = _bare_share(snapshots[-1])
    peak = report["peak"]
    categories = peak["categories"]
    return {
        "case": case.name,
        "peak_allocated_bytes": peak["allocated_bytes"],
        "max_memory_allocated": watched.get("allocated_bytes"),
        "peak_equals_counter": watched.get("allocated_bytes") in (None, peak["allocated_bytes"]),
        "categories_add_up": sum(categories.values()) == peak["active_bytes"],
        "unattributed_share": categories.get("unattributed", 0) / peak["active_bytes"],
        "bare_share": bare,
        "losses_equal": watched["losses"] == plain["losses"],
        "parameters_equal": watched.get("parameters") == plain.get("parameters"),
        "nvml_bytes": watched.get("nvml_bytes"),
        "own_over_closed_form": _over_closed_forms(case, report),
        "config": report["source"]["config"],
    }


def _over_closed_forms(case: Case, report: dict[str, Any]) -> dict[str, float]:
    """Divide each category's own peak by what it must weigh: 1 or a little more (blocks are rounded)."""
    facts, own, settings = report["source"]["config"], report["own_peaks"], case.settings
    tokens = settings.prompt_length + settings.completion_length - 1
    row = 2 * facts["layers"] * facts["kv_heads"] * facts["head_dim"] * (4 if settings.dtype == "float32" else 2)
    adapters = facts["trainable_bytes"] if settings.lora_r else 0
    expected = {
        "weights": facts["model_bytes"] - adapters,
        "adapters": adapters,
        "reference_model": facts.get("reference_bytes", 0),
        "optimizer_state": 2 * facts["trainable_bytes"],
        "kv_cache": settings.per_device_train_batch_size * settings.generation_steps * tokens * row,
    }
    return {name: own.get(name, 0) / size for name, size in expected.items() if size}


def _bare_share(snapshot: Path) -> float:
    """Return the share of the peak's bytes whose category stays when memprof's own key is taken out of the file."""
    from benchmarks.gpu.bare import without_key
    from memprof import analyze, load_snapshot

    told = analyze(load_snapshot(snapshot)).peak
    guessed = analyze(load_snapshot(without_key(snapshot))).peak
    same = sum(min(size, guessed.categories.get(name, 0)) for name, size in told.categories.items())
    return same / sum(told.categories.values())


def truth_of_simulator(tiny: bool) -> dict[str, Any]:
    """Compare predicted with measured, signed (GPU_CHECKS 3)."""
    rows = []
    for case in _cases((*TRUTH, *SIMULATED), tiny):
        measured = run(case, tiny)
        predicted = simulated(case, tiny)
        row = {"case": case.name, "measured": measured, "predicted": predicted}
        for name in ("allocated_bytes", "reserved_bytes"):
            if measured.get(name) and predicted.get(name):
                row[f"{name}_error"] = predicted[name] / measured[name] - 1
        rows.append(row)
    return {"runs": rows}


def cost_of_watching(tiny: bool) -> dict[str, Any]:
    """Time one step without, with counters only, and recorded, in turn; and what was written of it (GPU_CHECKS 4).

    Writing begins with the step after the recorded one and is no part of its seconds.
    """
    case = _cases(TRUTH[2:3], tiny)[0]
    seconds: dict[str, list[float]] = {"none": [], "counters": [], "one": []}
    dumps = []
    for turn in range(1 if tiny else PAIRS):
        order = list(seconds)
        for watch in order[turn % 3 :] + order[: turn % 3]:
            told = run(case, tiny, watch=watch, steps=RECORDED + 1)
            seconds[watch].append(told["step_seconds"][RECORDED - 1])
            if watch == "one":
                dumps.append(told.get("dump_seconds"))
    base = statistics.median(seconds["none"])
    ratios = {watch: statistics.median(taken) / base for watch, taken in seconds.items()}
    return {"case": case.name, "seconds": seconds, "ratios": ratios, "dump_seconds": dumps}


def lean_against_trl(tiny: bool) -> dict[str, Any]:
    """Compare the lean trainer with TRL's, same settings and seed; running out of memory is a result (GPU_CHECKS 5)."""
    rows = []
    for case in _cases(LEAN, tiny):
        pair = {name: run(case, tiny, lean=name == "lean") for name in ("trl", "lean")}
        rows.append({"case": case.name, **pair})
    return {"runs": rows}


def out_of_memory(tiny: bool) -> dict[str, Any]:
    """Leave too little memory in three places; the page exists and names phase, category and size (GPU_CHECKS 6)."""
    rows = []
    for phase, case in OOM.items():
        small = _cases((case,), tiny)[0]
        with tempfile.TemporaryDirectory() as folder:
            peak = run(small, tiny).get("allocated_bytes", 0)
            told = run(small, tiny, watch="record", keep=folder, fraction=_fraction(peak))
            reports = sorted(Path(folder, "_memprof").glob("*.json"))
            found = [json.loads(r.read_text(encoding="utf-8")).get("oom") for r in reports]
            page = Path(folder, "_memprof", "report.html").is_file()
        rows.append({"wanted": phase, "error": told["error"], "oom": [f for f in found if f], "page": page})
    return {"runs": rows}


def _fraction(peak: int) -> float | None:
    """Return the share of the GPU that makes a run of this peak fail near its end."""
    import torch

    if not torch.cuda.is_available() or not peak:
        return None
    return 0.9 * peak / torch.cuda.get_device_properties(0).total_memory


def fused_kernel(tiny: bool) -> dict[str, Any]:
    """Compare the fused loss with TRL's, Liger's and plain logits, by ``benchmarks.lean fused-loss`` (GPU_CHECKS 7).

    A size that fails leaves its error; ``not_run`` counts the sizes at which a path could not run, by what it said.
    """
    from benchmarks.lean.fused_loss import HEADS, PATHS

    rows = []
    for asked in kernel_sizes(tiny):
        options = [word for name, value in asked.items() for word in (f"--{name}", str(value))]
        command = [sys.executable, "-m", "benchmarks.lean", "fused-loss", *options]
        told = subprocess.run(command, capture_output=True, text=True, check=False)
        try:
            rows.append(json.loads(told.stdout))
        except ValueError:
            rows.append({**asked, "error": told.stderr[-2000:]})
    failed: Counter[str] = Counter()
    for row, head, path in product(rows, HEADS, PATHS):
        if error := row.get(head, {}).get(path, {"error": "no such row"}).get("error"):
            failed[f"{path}, {head}: {error}"] += 1
    return {"runs": rows, "not_run": dict(failed)}


def kernel_sizes(tiny: bool) -> list[dict[str, Any]]:
    """Return the options of ``benchmarks.lean fused-loss``, one run after the other."""
    if tiny:
        return [{"tokens": 64, "vocabulary": 512, "hidden": 32, "device": "cpu", "dtype": "float32", "pairs": 1}]
    common = {"device": "cuda", "dtype": "bfloat16", "pairs": PAIRS}
    return [
        {"tokens": tokens, "vocabulary": vocabulary, "hidden": hidden, **common}
        for tokens, vocabulary, hidden in product((8192, 65536), (128256, 151936), (2048, 4096))
    ]


CHECKS: dict[str, Callable[[bool], dict[str, Any]]] = {
    "callback": truth_of_callback,
    "simulator": truth_of_simulator,
    "cost": cost_of_watching,
    "lean": lean_against_trl,
    "oom": out_of_memory,
    "kernel": fused_kernel,
}


def _cases(cases: tuple[Case, ...], tiny: bool) -> list[Case]:
    return [shrunk(case) for case in cases] if tiny else list(cases)


def run(case: Case, tiny: bool, **how: Any) -> dict[str, Any]:
    """Run once for real in a fresh process, because peaks are a process's; ``how`` is for ``real_run.execute``."""
    asked = {"settings": case.settings.to_dict(), "shrink": tiny, **how}
    command = [sys.executable, "-m", "benchmarks.gpu.real_run", json.dumps(asked)]
    env = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": case.settings.alloc_conf} if case.settings.alloc_conf else None
    told = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    for line in told.stdout.splitlines():
        if line.startswith("RESULT "):
            found: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
            return found
    return {"error": told.stderr[-2000:], "losses": [], "step_seconds": [float("nan")] * (RECORDED + 1)}


def simulated(case: Case, tiny: bool) -> dict[str, Any]:
    """Return the simulator's figures for the same settings, from a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder, "settings.json")
        plain = case.settings.to_dict()
        device = plain.pop("device")
        config.write_text(json.dumps({k: v for k, v in plain.items() if v is not None}), encoding="utf-8")
        command = [sys.executable, "-m", "memprof", "simulate", "--config", str(config), "--device", device]
        told = subprocess.run([*command, "--json", "-"], capture_output=True, text=True, check=False)
    if told.returncode:
        return {"error": told.stderr[-500:]}
    report = json.loads(told.stdout)
    peak = report["peak"]
    reserved = (report.get("device_peak") or {}).get("reserved_bytes")
    return {"allocated_bytes": peak["allocated_bytes"], "reserved_bytes": reserved, "categories": peak["categories"]}
