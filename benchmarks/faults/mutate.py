"""Feed mutated snapshots, reports, comparisons and counters to the commands that read them.

    python -m benchmarks.faults mutate [--inputs 2000] [--seed 0] [--only snapshot]

One to three values of a small valid input are dropped, exchanged or replaced by what nobody writes. Each mutant goes
through one command in this process: it must be answered, or refused in one sentence, and JSON that is answered must
be what its schema says. Every finding is printed once by its kind, with the seed of the input that shows it.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import pickle
import random
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import click

JUNK: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2**31, -(2**31), 2**62, 2**63 - 1, -(2**63), 2**64, 10**19, 0.5, -1.5, 1e300, "", "x",
    "\x1b[31m", "\ud800", "weights", "peak", "../..", [], [[]], {}, {"": None}, {"x": {"y": [1]}}, [None], [1, "x"],
    [[1, 2, 3, 4, 5, 6, 7]], ["x"] * 3,
)  # fmt: skip
SEEDS = ("snapshot", "report", "compare", "counters")
_COMMANDS = {
    "snapshot": (
        "report {0} --json -", "report {0}", "report {0} -o {page}", "report {0} --format markdown --redact",
        "explain {0} --json -", "explain {0}", "compare {0} {good} --json -", "report {good} {0} --json -",
    ),
    "report": (
        "report {0} --json -", "report {0}", "report {0} -o {page}", "report {0} --format markdown --redact",
        "report {0} {good} --json -", "report {good} {0} -o {page}", "compare {good} {0} --json -",
        "compare {0} {good} -o {page}", "compare {good} {0} --capacity 24GB", "report {folder} --json -",
        "report {0} --json - --capacity 8GB", "explain {0}", "advise {0} --estimate --json -",
    ),
    "compare": ("compare {0} --json -", "compare {0} {good}", "compare {good} {0} -o {page}", "report {0}"),
    "counters": ("watch {folder} --once", "watch {folder} --format json"),
}  # fmt: skip


def snapshot() -> dict[str, Any]:
    """Make a snapshot with a step, an allocation that failed, and every part of memprof's own key."""
    from tests.synthetic import SnapshotBuilder

    made = SnapshotBuilder()
    made.ghost(4096)
    weight = made.alloc(1 << 20, "load", metadata="memprof:phase=load;category=weights")
    for step in (1, 2):
        hidden = made.alloc(3 << 20, "forward", metadata=f"memprof:phase=forward;step={step};region=forward")
        made.alloc(1 << 19, "backward", metadata=f"memprof:phase=backward;step={step};region=backward")
        made.free(hidden)
    failed = {"action": "oom", "addr": 1 << 20, "device_free": 1 << 20, "size": 1 << 30, "stream": 0, "frames": []}
    made.events.append({**failed, "time_us": made.time_us + 10, "user_metadata": ""})
    return made.raw(_own_key(weight, made.time_us))


def _own_key(weight: int, end: int) -> dict[str, Any]:
    start, half = 1_000_000, (1_000_000 + end) // 2
    spans = [("load", start, half, None), ("forward", half, end - 40, 1), ("backward", end - 40, None, 1)]
    names = ("phase", "start_us", "end_us", "step")
    phases = [{**dict(zip(names, span, strict=True)), "within": None, "detail": None} for span in spans]
    peaks = dict.fromkeys(("allocated_peak", "reserved_peak", "allocated_end", "reserved_end", "active_peak"), 9 << 20)
    counted = {"phase": "forward", "step": 1, "start_us": half, "end_us": end, "requested_peak": 9 << 20, **peaks}
    failed = {"requested_bytes": 1 << 30, "device_free_bytes": 1 << 20, "phase": "forward", "step": 1, "time_us": end}
    return {
        "schema": "memprof.snapshot/1",
        "kind": "cuda",
        "versions": {"memprof": "0.1", "python": "3.11", "torch": "2.13.0", "trl": "1.16"},
        "device": {"index": 0, "type": "cuda", "name": "a card", "total_bytes": 1 << 34},
        "devices": [{"index": 0, "type": "cuda", "name": "a card", "total_bytes": 1 << 34}],
        "rank": 0,
        "world_size": 2,
        "node": "here",
        "created": "2026-01-01T00:00:00",
        "config": {"learning_rate": 1e-5, "optim": "adamw_torch_fused", "max_completion_length": 16, "bf16": True},
        "setup": {
            "model_config": {"model_type": "qwen2", "hidden_size": 8, "num_hidden_layers": 2, "vocab_size": 64,
                             "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 16},
            "dtypes": {"float32": 4096}, "load_in_4bit": False, "batches": [[1, 2, 8, 8]], "lengths": [[1, 8, 8]],
            "adapter": {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"]},
        },
        "recorded": {"start_us": start, "stop_us": end, "history": "complete", "dropped_events": 0,
                     "max_entries": 100_000, "thinned": [[half, half + 5]]},
        "phases": phases,
        "steps": [[1, start, half, 128], [2, half, end, 256]],
        "owners": [[weight, end, "weights", None, "model.embed"]],
        "holders": [[weight, end, "Model.embed"]],
        "buckets": [1 << 19],
        "counters": [counted],
        "samples": [[start, 1 << 30, 1 << 30, 1 << 20, 1 << 31, 0, 1 << 24], [end, 1, *[None] * 5]],
        "switches": [[half, "sleep", 1, 1 << 20, 1 << 21, 0, 1 << 30]],
        "outside": {"reason": None, "mig": False, "capacity_bytes": 1 << 34, "used_bytes": 1 << 32,
                    "own_bytes": 1 << 31, "others_bytes": 1 << 20, "first_own_bytes": 1 << 28,
                    "first_reserved_bytes": 0,
                    "processes": [[1, 1 << 31], [2, None]], "this_process": 1, "process_groups": 1,
                    "allocators": ["cublas"]},
        "host": {"pinned_bytes": 1 << 20, "pinned_requested_bytes": 1 << 20, "managed_bytes": None,
                 "rss_bytes": 1 << 30, "offloaded": {"optimizer_state": 1 << 20}},
        "oom": {**failed, "stack": ["a.py:1 f"], "device": 0, "limit_bytes": 1 << 33},
        "survived": [{**failed, "device": 0, "went_on_us": half}],
        "non_torch_bytes": 1 << 28,
        "overhead": {"seconds_in_memprof": 0.5, "bytes_of_history": 4096},
        "notes": ["a note"],
        "own_folders": [["/x", "memprof"]],
    }  # fmt: skip


def _counters() -> list[dict[str, Any]]:
    about = {"schema": "memprof.counters/1", "rank": 0, "started": 1.0, "world_size": 1, "node": None, "pid": 1,
             "device": {"index": 0, "type": "cuda", "name": "a card", "total_bytes": 1 << 34}, "steps": 2, "model": "m",
             "config": {"model": "m"}, "device_name": "a card", "device_total_bytes": 1 << 34, "max_steps": 2}
    names = ("peak_allocated", "peak_reserved", "allocated", "reserved", "inactive_split", "cached", "non_torch",
             "host_rss", "host_rss_peak", "host_pinned", "host_anon", "host_files", "host_shared", "host_children",
             "host_arenas")
    step = {"time": 2.0, "recorded": True, **dict.fromkeys(names, 1 << 20), "phases": {"forward": 1 << 20}}
    most = {"categories": {"weights": 1 << 20}, "groups": {"training": 1 << 20, "total": 1 << 20}, "step": 1}
    ended = {"ended": 3.0, "steps": 2, "peak_allocated": 1 << 20, "peak_reserved": 1 << 20, "error": None}
    return [about, {"step": 1, **step}, most, {"step": 2, **step}, ended]


class Mutants:
    """Make mutants of the valid inputs, and run each through a command, all by the number of the input."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        names = {"snapshot": "good.pickle", "report": "good.json", "compare": "pair.json"}
        self.good = {kind: folder / name for kind, name in names.items()}
        self.seeds: dict[str, Any] = {"snapshot": snapshot()}
        self.good["snapshot"].write_bytes(pickle.dumps(self.seeds["snapshot"], protocol=4))
        for kind, words in (("report", "report {snapshot}"), ("compare", "compare {snapshot} {report}")):
            _call([*words.format(**self.good).split(), "--json", str(self.good[kind])])
            self.seeds[kind] = json.loads(self.good[kind].read_text(encoding="utf-8"))
        self.seeds["counters"] = _counters()

    def run(self, kind: str, seed: int) -> str:
        """Return what went wrong with one mutant; empty where nothing did."""
        draw = random.Random(f"{kind} {seed}")
        mutant = copy.deepcopy(self.seeds[kind])
        for _ in range(draw.choice((1, 1, 2, 3))):
            _mutate(mutant, draw, kind)
        words = draw.choice(_COMMANDS[kind]).split()
        path = self._write(kind, mutant)
        good = self.good.get("report" if kind == "compare" else kind, path)
        named = {"good": good, "page": self.folder / "page.html", "folder": path.parent}
        return _ending([word.format(path, **named) for word in words])

    def _write(self, kind: str, mutant: Any) -> Path:
        place = self.folder / kind
        place.mkdir(exist_ok=True)
        if kind == "snapshot":
            (path := place / "run.pickle").write_bytes(pickle.dumps(mutant, protocol=4))
        elif kind == "counters":
            path = place / "counters.rank-0.jsonl"
            path.write_text("".join(json.dumps(row) + "\n" for row in mutant), encoding="utf-8")
        else:
            (path := place / "step-000001.json").write_text(json.dumps(mutant), encoding="utf-8")
        return path


def _mutate(mutant: Any, draw: random.Random, kind: str) -> None:
    top: Any = mutant["memprof"] if kind == "snapshot" and "memprof" in mutant and draw.random() < 0.7 else mutant
    places = list(_places(top))
    if not places:
        return
    holder, key = draw.choice(places)
    way = draw.randrange(6)
    if way == 0:
        del holder[key]
    elif way == 1:
        other, there = draw.choice(places)
        holder[key] = copy.deepcopy(other[there])
    elif way == 2 and isinstance(holder, list):
        holder.append(copy.deepcopy(holder[key]))
    elif way == 3 and type(holder[key]) is int:
        holder[key] = draw.choice((-holder[key], holder[key] * 2**40, float(holder[key]), str(holder[key])))
    else:
        holder[key] = copy.deepcopy(draw.choice(JUNK))


def _places(value: Any) -> Any:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield value, key
        yield from _places(inner)


def _call(words: list[str]) -> str:
    from memprof.cli import main

    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        main(words, standalone_mode=False)
    return out.getvalue()


def _ending(words: list[str]) -> str:
    """Run one command; say what is wrong with how it ended."""
    from memprof.reports.json import validate

    from memprof.errors import MemprofError

    printed = ""
    try:
        printed = _call(words)
    except (MemprofError, click.ClickException) as error:
        return "a sentence of several lines" if "\n" in str(error) else ""
    except Exception as error:
        frames = reversed(traceback.extract_tb(error.__traceback__))
        at = next(f for f in frames if "/site-packages/" not in f.filename)
        return f"{type(error).__name__} in {'/'.join(Path(at.filename).parts[-2:])}:{at.lineno} {at.name}"
    if "\x1b[31m" in printed:
        return f"a control character came through {words[0]}"
    if "--json" in words and printed:
        try:
            validate(json.loads(printed))
        except MemprofError as error:
            where = str(error).rpartition("(at ")[2]
            return f"JSON that its schema refuses, at {''.join(c for c in where if not c.isdigit())} of {words[0]}"
    return ""


@click.command(help=__doc__)
@click.option("--inputs", default=2000, show_default=True)
@click.option("--seed", default=0, show_default=True, help="The first input's number.")
@click.option("--only", type=click.Choice(SEEDS))
def main(inputs: int, seed: int, only: str | None) -> None:
    sys.setrecursionlimit(2000)
    found: Counter[str] = Counter()
    shown: dict[str, str] = {}
    tried: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="memprof-mutate-") as folder:
        mutants = Mutants(Path(folder))
        for number in range(seed, seed + inputs):
            kind = only or SEEDS[number % len(SEEDS)]
            tried[kind] += 1
            if wrong := mutants.run(kind, number):
                found[wrong] += 1
                shown.setdefault(wrong, f"--only {kind} --seed {number} --inputs 1")
    for wrong, times in found.most_common():
        click.echo(f"{times:6} {wrong}    {shown[wrong]}")
    click.echo(f"{inputs} inputs ({', '.join(f'{n} {kind}' for kind, n in tried.items())}): {found.total()} findings")
    if found:
        sys.exit(1)
