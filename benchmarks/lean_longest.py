"""The longest sequences that 8 generations of Llama-3.1-8B can have on one card: the lean trainer's and TRL's.

    python -m benchmarks.lean_longest [ROW ...] [--again] [--json benchmarks/results/cpu/lean_longest.json]

A length fits where the simulated step ends without an out-of-memory error on an allocator that has what the card has,
less the context outside torch and 3 % for the prediction's error, as in ``memprof simulate --gpu``. Lengths are
multiples of 1024 tokens on the 24 GB card and of 4096 on the 80 GB card. A first guess comes from simulations of models
with few layers, since memory is linear in layers; every length that is reported was then simulated with all 32, and so
was the next longer one, which does not fit. Training alone is searched from what fits with generation upwards.

Both trainers checkpoint every layer and keep the checkpoints in pinned host memory, both allocate in expandable
segments. TRL is tuned by hand: one sequence a micro-batch, eight accumulated, and its ``generate`` takes the eight
sequences of a group at once. The lean trainer generates one at a time and runs MLPs in tiles.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from benchmarks.lean_flops import with_layers
from benchmarks.lean_memory import LLAMA, TUNED, alike_once
from benchmarks.measure import environment

CARDS = {"24 GB": "RTX 4090", "80 GB": "H100"}
GRAIN = {"24 GB": 1024, "80 GB": 4096}
TILES = {"24 GB": 4096, "80 GB": 16_384}
#: Layers of the models that a guess is made from.
FEW = (3, 5)
#: Simulations of the whole model for one row, at most.
MOST = 6


def case(card: str, trainer: str, base: str, generates: bool, length: int) -> dict[str, Any]:
    """Settings of one row at one length."""
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
    """Bytes that torch may reserve: the card's, less context and margin."""
    from memprof.simulate.fit import MARGIN
    from memprof.simulate.gpus import find_gpu

    gpu = find_gpu(CARDS[card])
    return int(gpu.total_bytes / (1 + MARGIN)) - gpu.context_bytes


def simulate(card: str, settings: dict[str, Any], capacity: int | None) -> dict[str, Any]:
    """A raw snapshot."""
    from memprof.simulate.gpus import find_gpu
    from memprof.simulate.run import simulate_settings
    from memprof.simulate.settings import Settings

    with alike_once(warmed_up=True):
        return simulate_settings(Settings(**settings), capacity=capacity, gpu=find_gpu(CARDS[card]), stacks=False)


def fits(card: str, settings: dict[str, Any]) -> dict[str, Any]:
    """The verdict on one length, with what was reserved and allocated, and the phase that ran out where one did."""
    from memprof import analyze
    from memprof.simulate.host import host_use
    from memprof.snapshot.reader import snapshot_from_raw

    start = time.process_time()
    raw = simulate(card, settings, room(card))
    full = raw["memprof"]["oom"]
    host = host_use(raw, 1).needed_bytes
    report = analyze(snapshot_from_raw(raw)).to_dict()
    return {
        "length": settings["prompt_length"] + settings["completion_length"],
        "fits": full is None,
        "phase": report["peak"]["phase"] if full is None else report["oom"]["phase"],
        "allocated_bytes": report["peak"]["allocated_bytes"],
        "reserved_bytes": report["device_peak"]["reserved_bytes"],
        "host_bytes": host,
        "cpu_seconds": round(time.process_time() - start, 1),
    }


def guess(card: str, make: Callable[[int], dict[str, Any]], lengths: tuple[int, int]) -> int:
    """A length near the longest: need at two lengths, each from two small models, both taken to be linear."""
    from memprof.simulate.catalogue import find_config

    config = find_config(LLAMA["model"])
    few, more = FEW
    needs = []
    for length in lengths:
        with tempfile.TemporaryDirectory() as folder:
            small = [
                _reserved(simulate(card, {**make(length), "model": with_layers(config, n, Path(folder))}, None))
                for n in FEW
            ]
        needs.append(small[0] + (config["num_hidden_layers"] - few) * (small[1] - small[0]) / (more - few))
    slope = (needs[1] - needs[0]) / (lengths[1] - lengths[0])
    grain = GRAIN[card]
    return max(grain, int((lengths[0] + (room(card) - needs[0]) / slope) // grain) * grain)


def _reserved(raw: dict[str, Any]) -> int:
    from memprof import analyze
    from memprof.snapshot.reader import snapshot_from_raw

    return int(analyze(snapshot_from_raw(raw)).to_dict()["device_peak"]["reserved_bytes"])


def longest(
    card: str, make: Callable[[int], dict[str, Any]], first: int, known: dict[int, dict[str, Any]]
) -> list[dict[str, Any]]:
    """Lengths tried, until two neighbours are known of which one fits and the next does not."""
    grain, tried = GRAIN[card], dict(known)
    length, stride = first, grain
    while len(tried) < MOST:
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
    """What fits with generation fits without."""
    tried = row["tried"] if row else []
    return {one["length"]: {**one, "with_generation": True} for one in tried if one["fits"]}


#: Two lengths to guess from, by card.
PROBED = {"24 GB": (8192, 16_384), "80 GB": (32_768, 65_536)}
ROWS = {
    f"{card}, {base}, {trainer}, {'with generation' if generates else 'training alone'}": (
        card, trainer, base, generates,
    )
    for card in CARDS
    for base in ("LoRA", "QLoRA")
    for trainer in ("lean", "TRL")
    for generates in (True, False)
}  # fmt: skip


@click.command(help=__doc__)
@click.argument("names", nargs=-1, type=click.Choice(list(ROWS)), metavar="[ROW]...")
@click.option("--again", is_flag=True, help="Search anew what the file already has.")
@click.option("--json", "path", type=click.Path(path_type=Path), default="benchmarks/results/cpu/lean_longest.json")
def main(names: tuple[str, ...], again: bool, path: Path) -> None:
    known = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.is_file() else {}
    for name in names or ROWS:
        if name not in known or again:
            card, trainer, base, generates = ROWS[name]

            def make(length: int, row: tuple[Any, ...] = (card, trainer, base, generates)) -> dict[str, Any]:
                return case(*row, length)

            print(name, flush=True)
            before = {} if generates else _fitting(known.get(name.replace("training alone", "with generation")))
            near = max(before, default=0) + GRAIN[card]
            first = near if trainer == "lean" and before else max(near, guess(card, make, PROBED[card]))
            settings = {key: value for key, value in make(0).items() if key != "completion_length"}
            tried = longest(card, make, first, before)
            known[name] = {"card": CARDS[card], "grain": GRAIN[card], "settings": settings, "tried": tried}
        best = max((row["length"] for row in known[name]["tried"] if row["fits"]), default=0)
        print(f"{name}: {best} tokens", flush=True)
        known[name]["longest"] = best
        ordered = {row: known[row] for row in ROWS if row in known}
        path.write_text(json.dumps({"rows": ordered, "environment": environment()}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
