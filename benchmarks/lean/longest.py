"""Search the longest sequences of 8 generations of Llama-3.1-8B that fit one GPU: the lean trainer's and TRL's.

    python -m benchmarks.lean longest [ROW ...] [--again] [--json benchmarks/results/cpu/lean_longest.json]

A length fits where the simulated step ends without an out-of-memory error on an allocator that has what the GPU has,
less the context outside torch and 3% for the prediction's error, as in ``memprof simulate --gpu``. Lengths are
multiples of 1024 tokens on the 24 GB GPU and of 4096 on the 80 GB GPU. A first guess comes from simulations of models
with few layers, since memory is linear in layers; every length that is reported was then simulated with all 32, and so
was the shortest that does not fit: the next one, where ``--most`` did not end the search before. Training alone is
searched from what fits with generation upwards.

Both trainers checkpoint every layer and keep the checkpoints in pinned host memory, both allocate in expandable
segments. TRL is tuned by hand: one sequence a micro-batch, eight accumulated, and its ``generate`` takes the eight
sequences of a group at once. The lean trainer generates one at a time and runs MLPs in tiles.
"""

from __future__ import annotations

import functools
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from benchmarks.lean.flops import with_layers
from benchmarks.lean.memory import LLAMA, TUNED, phase_peaks, repeated_micro_batches_once
from benchmarks.measure import environment
from benchmarks.tabling import RESULTS

CARDS = {"24 GB": "RTX 4090", "80 GB": "H100"}
GRAIN = {"24 GB": 1024, "80 GB": 4096}
TILES = {"24 GB": 4096, "80 GB": 16_384}
#: Layers of the models that a guess is made from.
FEW = (3, 4)
#: Simulations of the whole model for one row, at most.
MOST = 6


def case(card: str, trainer: str, base: str, generates: bool, length: int) -> dict[str, Any]:
    """Return the settings of one row at one length."""
    settings: dict[str, Any] = {
        **LLAMA,
        "completion_length": length - LLAMA["prompt_length"],
        "load_in_4bit": base == "QLoRA",
        "gradient_checkpointing": "offloaded",
        "alloc_conf": "expandable_segments:True",
        "generation": "hf" if generates else "none",
    }
    if trainer == "TRL":
        return {**settings, **TUNED}
    tiles: dict[str, Any] = {"recipe": "lean", "tiled_mlp": TILES[card]}
    return {**settings, **tiles, **({"generation_batch": 1} if generates else {})}


def room(card: str) -> int:
    """Return the bytes that torch may reserve: the GPU's, less context and the margin of the kept results."""
    from memprof.config.fits import room_bytes
    from memprof.config.gpus import find_gpu

    return room_bytes(find_gpu(CARDS[card]), 0.03)


def simulate(card: str, settings: dict[str, Any], capacity: int | None) -> dict[str, Any]:
    """Simulate one run; return its raw snapshot."""
    from memprof.config.gpus import find_gpu
    from memprof.config.settings import Settings
    from memprof.simulate.run import simulate_settings

    with repeated_micro_batches_once(warmed_up=True):
        return simulate_settings(Settings(**settings), capacity=capacity, gpu=find_gpu(CARDS[card]), stacks=False)


def fits(card: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Decide on one length; return what was reserved and allocated, and the phase that ran out where one did."""
    from memprof import analyze
    from memprof.simulate.recorder.host_memory import host_use
    from memprof.snapshot.reader import snapshot_from_raw

    start = time.process_time()
    raw = simulate(card, settings, room(card))
    full = raw["memprof"]["oom"]
    snapshot = snapshot_from_raw(raw)
    host = host_use(snapshot.run.host, 1).needed_bytes
    report = analyze(snapshot).to_dict()
    return {
        "length": settings["prompt_length"] + settings["completion_length"],
        "fits": full is None,
        "phase": report["peak"]["phase"] if full is None else report["oom"]["phase"],
        "allocated_bytes": report["peak"]["allocated_bytes"],
        "reserved_bytes": report["device_peak"]["reserved_bytes"],
        "host_bytes": host,
        "cpu_seconds": round(time.process_time() - start, 1),
    }


def guess(card: str, trainer: str, base: str, generates: bool) -> int:
    """Guess a length near the longest: what each phase allocates is taken to be linear in length."""
    from memprof.config.catalogue import find_config

    layers = find_config(LLAMA["model"])["num_hidden_layers"]
    few, more = (_phases(trainer, count) for count in FEW)
    first, second = PROBED
    lengths = []
    for phase in few[first]:
        if phase == "load" or (phase == "generate" and not generates):
            continue
        ends = []
        for length in PROBED:
            each = (more[length][phase] - few[length][phase]) / (FEW[1] - FEW[0])
            ends.append(few[length][phase] + (layers - FEW[0]) * each - (SMALLER if base == "QLoRA" else 0))
        slope = (ends[1] - ends[0]) / (second - first)
        if slope > 0:
            lengths.append(first + (room(card) - ends[0]) / slope)
    grain = GRAIN[card]
    return max(grain, int(min(lengths) // grain) * grain)


@functools.cache
def _phases(trainer: str, layers: int) -> dict[int, dict[str, int]]:
    """Return allocated bytes by phase at each probed length, of a model of so many layers with bf16 weights."""
    from memprof import analyze
    from memprof.config.catalogue import find_config
    from memprof.snapshot.reader import snapshot_from_raw

    found: dict[int, dict[str, int]] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = with_layers(find_config(LLAMA["model"]), layers, Path(folder))
        for length in PROBED:
            settings = {**case("24 GB", trainer, "LoRA", True, length), "model": model}
            report = analyze(snapshot_from_raw(simulate("24 GB", settings, None))).to_dict()
            found[length] = phase_peaks(report)
    return found


def longest(
    card: str, make: Callable[[int], dict[str, Any]], first: int, known: dict[int, dict[str, Any]], most: int
) -> list[dict[str, Any]]:
    """Try lengths until two neighbours are known of which one fits and the next does not, or ``most`` were tried."""
    grain, tried = GRAIN[card], dict(known)
    length, stride = first, 4 * grain
    while len(tried) < most:
        tried[length] = fits(card, make(length))
        print(f"    {length}: {'fits' if tried[length]['fits'] else 'does not fit'} {tried[length]}", flush=True)
        low = max((n for n, found in tried.items() if found["fits"]), default=None)
        high = min((n for n, found in tried.items() if not found["fits"]), default=None)
        if low is not None and high is not None:
            if high - low <= grain:
                break
            length = (low + high) // 2 // grain * grain
        else:
            length = length + stride if low is not None else max(grain, length - stride)
            stride *= 2
    return [tried[n] for n in sorted(tried)]


def _fitting(row: dict[str, Any] | None) -> dict[int, dict[str, Any]]:
    """Return lengths that fit with generation: they fit without."""
    tried = row["tried"] if row else []
    return {one["length"]: {**one, "with_generation": True} for one in tried if one["fits"]}


#: Two lengths to guess from, and what NF4 saves of the model's weights, of which every linear layer is packed.
PROBED = (12_288, 24_576)
SMALLER = 9_700_000_000
ROWS = {
    f"{card}, {base}, {trainer}, {'with generation' if generates else 'training alone'}": (
        card, trainer, base, generates,
    )
    for trainer in ("lean", "TRL")
    for generates in (True, False)
    for base in ("QLoRA", "LoRA")
    for card in CARDS
}  # fmt: skip


@click.command(help=__doc__)
@click.argument("names", nargs=-1, type=click.Choice(list(ROWS)), metavar="[ROW]...")
@click.option("--again", is_flag=True, help="Search anew what the file already has.")
@click.option("--from", "start", type=int, help="The first length to try, instead of a guess.")
@click.option("--most", default=MOST, show_default=True, help="Lengths to try for a row.")
@click.option("--json", "path", type=click.Path(path_type=Path), default=RESULTS / "lean_longest.json")
def main(names: tuple[str, ...], again: bool, start: int | None, most: int, path: Path) -> None:
    known = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.is_file() else {}
    for name in names or ROWS:
        if name not in known or again:
            card, trainer, base, generates = ROWS[name]

            def make(length: int, row: tuple[Any, ...] = (card, trainer, base, generates)) -> dict[str, Any]:
                return case(*row, length)

            print(name, flush=True)
            before = {} if generates else _fitting(known.get(name.replace("training alone", "with generation")))
            near = max(before, default=0) + GRAIN[card]
            first = start or (
                near if trainer == "lean" and before else max(near, guess(card, trainer, base, generates))
            )
            settings = {key: value for key, value in make(0).items() if key != "completion_length"}
            tried = longest(card, make, first, before, most)
            known[name] = {"card": CARDS[card], "grain": GRAIN[card], "settings": settings, "tried": tried}
        best = max((row["length"] for row in known[name]["tried"] if row["fits"]), default=0)
        print(f"{name}: {best} tokens", flush=True)
        known[name]["longest"] = best
        ordered = {row: known[row] for row in ROWS if row in known}
        path.write_text(json.dumps({"rows": ordered, "environment": environment()}, indent=2) + "\n", encoding="utf-8")
