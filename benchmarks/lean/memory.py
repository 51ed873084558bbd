"""Simulate the memory of the lean trainer beside TRL's at its best, and estimate what the memory costs in time.

    python -m benchmarks.lean memory [CASE ...] [--again] [--json benchmarks/results/cpu/lean_memory.json]

Each case is one simulated run (up to a minute of CPU time); results that the file already has are kept. Of each run
the measured step is executed whole, but for micro-batches that are like those before them
(:func:`repeated_micro_batches_once`).
Each case names a GPU that holds it, TRL's the smallest of memprof's list, less the context outside torch and a margin
for the prediction's error. It is simulated on an allocator that has no more, and the lean trainer sees that GPU's
free memory. The step's time is estimated (``benchmarks.lean.price``) on that GPU, and on the one of :data:`SPEED`.
The 8B and 7B cases also have the FLOPs of training (``benchmarks.lean.flops``) and what of them is computed again.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from benchmarks.lean.flops import TRAINING, told, total, training_flops
from benchmarks.lean.price import pricing
from benchmarks.measure import environment
from benchmarks.tabling import RESULTS

LLAMA = {"model": "meta-llama/Llama-3.1-8B-Instruct", "dtype": "bfloat16", "lora_r": 16, "prompt_length": 512}
QWEN = {"model": "Qwen/Qwen2.5-1.5B-Instruct", "dtype": "bfloat16", "prompt_length": 256, "completion_length": 786}
TUNED = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8}
LONG_PROMPT = {
    "model": "Qwen/Qwen2.5-7B-Instruct", "dtype": "bfloat16", "lora_r": 16, "prompt_length": 16_384,
    "completion_length": 1024,
}  # fmt: skip
#: The smallest card of memprof's list.
SMALL = "RTX 3060"
#: What computes nothing twice: nothing checkpointed, two products of the head.
NOTHING_TWICE = {"checkpointing": "none", "tiled_mlp": 0}
#: The card whose speed all cases are compared at.
SPEED = "H100"
#: The card of the cases that the lean trainer is for.
CARD = "RTX 4090"
HEADLINE = {**LLAMA, "completion_length": 19_968, "on": CARD}
OFFLOADED = {**TUNED, "gradient_checkpointing": "offloaded"}
#: What lets a run fit the card it is on: without, more is reserved than the card has.
EXPANDABLE = {"alloc_conf": "expandable_segments:True"}
TIGHT = {"on": "A100-40GB", **EXPANDABLE}
ENGINE = ("generation", "vllm_enable_sleep_mode", "vllm_gpu_memory_utilization", "park_weights")
#: An engine that has nearly all of the card while it generates, and nothing while the policy trains.
PARKED = {
    "generation": "vllm", "vllm_enable_sleep_mode": True, "vllm_gpu_memory_utilization": 0.85, "park_weights": True,
}  # fmt: skip
#: A GPU of 48 GB.
LARGE = "A6000"
#: What of a case is no setting of the simulator.
NOT_SETTINGS = ("on", "offloaded_cache")

CASES: dict[str, dict[str, Any]] = {
    "8B LoRA, 8 x 20480, TRL's defaults": {**HEADLINE, "on": "H200"},
    "8B LoRA, 8 x 20480, TRL tuned by hand": {**HEADLINE, **TUNED, **TIGHT},
    "8B LoRA, 8 x 20480, TRL tuned by hand, offloaded checkpoints": {**HEADLINE, **OFFLOADED, **TIGHT},
    "8B LoRA, 8 x 20480, TRL tuned by hand, offloaded checkpoints, vLLM": {
        **HEADLINE, **OFFLOADED, **TIGHT,
        "generation": "vllm", "vllm_enable_sleep_mode": True, "vllm_gpu_memory_utilization": 0.55,
    },
    "8B LoRA, 8 x 20480, TRL tuned by hand, offloaded checkpoints and cache": {
        **HEADLINE, **OFFLOADED, "on": "RTX 5090", "offloaded_cache": True,
    },
    "8B LoRA, 8 x 20480, lean": {**HEADLINE, "recipe": "lean"},
    "8B LoRA, 8 x 20480, lean, on TRL's GPU": {**HEADLINE, "recipe": "lean", "on": "A100-40GB"},
    "8B LoRA, 8 x 20480, lean, vLLM, parked weights": {**HEADLINE, "recipe": "lean", **PARKED},
    "8B LoRA, 8 x 20480, lean, 48 GB": {**HEADLINE, "recipe": "lean", "on": LARGE},
    "8B LoRA, 8 x 20480, lean, vLLM, parked weights, 48 GB": {**HEADLINE, "recipe": "lean", **PARKED, "on": LARGE},
    "8B QLoRA, 8 x 20480, TRL tuned by hand, offloaded checkpoints": {
        **HEADLINE, **OFFLOADED, "load_in_4bit": True, "on": "RTX 5090",
    },
    "8B QLoRA, 8 x 20480, lean, generating 2 together": {
        **HEADLINE, "recipe": "lean", "load_in_4bit": True, "generation_batch": 2, "on": "RTX 4080",
    },
    "1.5B QLoRA, 8 x 1042, TRL tuned by hand": {**QWEN, **TUNED, "lora_r": 16, "load_in_4bit": True, "on": SMALL},
    "1.5B QLoRA, 8 x 1042, lean": {**QWEN, "lora_r": 16, "load_in_4bit": True, "recipe": "lean", "on": SMALL},
    "1.5B full, 8-bit Adam, reference, 8 x 1042, TRL tuned by hand": {
        **QWEN, **TUNED, "optim": "adamw_torch_8bit", "beta": 0.04, "on": "RTX 4080",
    },
    "1.5B full, 8-bit Adam, reference, 8 x 1042, lean": {
        **QWEN, "recipe": "lean", "optim": "adamw_torch_8bit", "beta": 0.04, "on": "RTX 4080",
    },
    "1.5B full, 8-bit Adam, reference, 8 x 1042, lean, vLLM, parked weights": {
        **QWEN, "recipe": "lean", "optim": "adamw_torch_8bit", "beta": 0.04, **PARKED, "on": "RTX 4080",
    },
    "7B LoRA, 8 x (16384 + 1024), TRL's defaults": {**LONG_PROMPT, "on": "H200"},
    "7B LoRA, 8 x (16384 + 1024), TRL tuned by hand, offloaded checkpoints": {
        **LONG_PROMPT, **OFFLOADED, "on": "A100-80GB",
    },
    "7B LoRA, 8 x (16384 + 1024), lean": {**LONG_PROMPT, "recipe": "lean", "on": "RTX 5090"},
    "7B LoRA, 8 x (16384 + 1024), lean, vLLM, parked weights": {
        **LONG_PROMPT, "recipe": "lean", **PARKED, "on": "RTX 5090",
    },
    "7B LoRA, 8 x (16384 + 1024), lean, shared prompt": {
        **LONG_PROMPT, "recipe": "lean", "prefix_sharing": True, "on": "RTX 5090",
    },
}  # fmt: skip


@contextmanager
def repeated_micro_batches_once(*, warmed_up: bool = False) -> Iterator[None]:
    """Leave out TRL's micro-batches between the first and the last of an optimizer step, while open.

    They are like the last: gradients exist from the second on. ``warmed_up``: so is the first step, whose only lasting
    traces are the optimizer's state and cuBLAS's workspaces: those are made from gradients of zero and by one product.
    ``tests/benchmarks/lean/test_flops.py`` holds that peaks of allocated bytes are those of all, up to the ids of
    one batch. What is reserved can be less than after two whole steps, in which more sizes of segments pile up.
    The work of those left out is counted as the last one's.
    """
    import torch
    from trl import GRPOTrainer

    from memprof.compat.patching import replacing
    from memprof.simulate.recorder.flops import PhaseWork

    step, here = GRPOTrainer.training_step, PhaseWork._here
    alike = 1

    def with_those_left_out(self: Any) -> tuple[Any, float]:
        tally, times = here(self)
        return tally, times * (alike if self._now()[0] in TRAINING else 1)

    @functools.wraps(step)  # the lean trainer leaves its step to TRL if somebody else's method takes the place of TRL's
    def training_step(self: Any, model: Any, inputs: Any, num_items_in_batch: Any) -> Any:
        nonlocal alike
        count = self.current_gradient_accumulation_steps
        alike = count - 1 if count > 1 and self._step % count == count - 1 else 1
        first = warmed_up and self.state.global_step == 0
        if not first and (self._step % count in (0, count - 1) or self._step % self.args.steps_per_generation == 0):
            return step(self, model, inputs, num_items_in_batch)
        if first:
            (torch.ones(8, 8, requires_grad=True) @ torch.ones(8, 8)).sum().backward()
            for parameter in self.model.parameters():
                if parameter.requires_grad:
                    parameter.grad = torch.zeros_like(parameter)
        self._step += 1
        return torch.zeros(())

    with replacing((GRPOTrainer, "training_step", training_step), (PhaseWork, "_here", with_those_left_out)):
        yield


def simulated(
    case: Mapping[str, Any], lean: Mapping[str, Any] | None = None, *, warmed_up: bool = False
) -> dict[str, Any]:
    """Simulate one case; return its peaks, the host's memory, its price and the CPU seconds that the simulation took.

    Args:
        case: :class:`memprof.config.settings.Settings`, and of :data:`NOT_SETTINGS` ``on``, the GPU that is
            simulated, and ``offloaded_cache``, where keys and values are the host's.
        lean: arguments of ``LeanGRPOConfig`` that no setting has.
        warmed_up: see :func:`repeated_micro_batches_once`.
    """
    from memprof import analyze
    from memprof.config.fits import room_bytes
    from memprof.config.gpus import find_gpu
    from memprof.config.settings import Settings
    from memprof.simulate.recorder.host_memory import host_use
    from memprof.simulate.run import simulate_settings
    from memprof.snapshot.reader import snapshot_from_raw

    settings = {name: value for name, value in case.items() if name not in NOT_SETTINGS}
    card = find_gpu(case["on"]) if "on" in case else None
    start = time.process_time()
    priced = pricing([case["on"], SPEED] if card else [], offloaded_cache=bool(case.get("offloaded_cache")))
    with told(lean), repeated_micro_batches_once(warmed_up=warmed_up), priced as price:
        raw = simulate_settings(Settings(**settings), capacity=card and room_bytes(card, 0.03), gpu=card, stacks=False)
    seconds = time.process_time() - start
    snapshot = snapshot_from_raw(raw)
    host = host_use(snapshot.run.host, 1)
    report = analyze(snapshot).to_dict()
    return {
        "settings": dict(case),
        **({"lean": dict(lean)} if lean else {}),
        "allocated_bytes": report["peak"]["allocated_bytes"],
        "phase": report["peak"]["phase"],
        "reserved_bytes": report["device_peak"]["reserved_bytes"],
        "fits": raw["memprof"]["oom"] is None,
        "phases": phase_peaks(report),
        "own_peaks": {name: size for name, size in report["own_peaks"].items() if size},
        "pinned_bytes": host.pinned_bytes,
        "host_bytes": host.needed_bytes,
        "price": price.to_dict(),
        "cpu_seconds": round(seconds, 1),
    }


def phase_peaks(report: Mapping[str, Any]) -> dict[str, int]:
    """Return the most that a report has allocated in each phase, of all its times."""
    phases: dict[str, int] = {}
    for phase in report["phases"]:
        phases[phase["phase"]] = max(phases.get(phase["phase"], 0), phase["peak_bytes"])
    return phases


def training_bytes(row: Mapping[str, Any]) -> int:
    """Return the most that is allocated outside generation."""
    return max(size for phase, size in row["phases"].items() if phase not in ("generate", "load"))


def flops(case: Mapping[str, Any], lean: Mapping[str, Any] | None = None) -> int:
    """Count the FLOPs of one step's training.

    What changes no product is left out, so that it is counted once: how many micro-batches, how many sequences
    generate together, the base's dtype and bits, the GPU, where checkpoints are kept.
    """
    left_out = (*NOT_SETTINGS, "load_in_4bit", "generation_batch", "alloc_conf", *ENGINE, *TUNED)
    settings = {name: value for name, value in case.items() if name not in left_out}
    settings["dtype"] = "bfloat16"
    if settings.get("gradient_checkpointing") == "offloaded":
        del settings["gradient_checkpointing"]
    told = {name: value for name, value in (lean or {}).items() if name != "generation_batch"}
    if told.get("checkpointing") == "offloaded":
        told["checkpointing"] = "full"
    return _counted_once(json.dumps([settings, told], sort_keys=True))


@functools.cache
def _counted_once(given: str) -> int:
    return total(training_flops(*json.loads(given)))


def with_flops(case: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``flops`` of training, and ``flops_once``: what the same tokens take with nothing computed twice."""
    once = {**case, "recipe": "lean", "prefix_sharing": bool(case.get("prefix_sharing"))}
    once.pop("gradient_checkpointing", None)
    return {"flops": flops(case), "flops_once": flops(once, NOTHING_TWICE)}


def tokens(case: Mapping[str, Any], group: int = 8) -> int:
    """Count the tokens that go through the model in a step's training."""
    prompt, completion = case["prompt_length"], case["completion_length"]
    if case.get("prefix_sharing"):
        return int(prompt + group * (completion - 1))
    return int(group * (prompt + completion))


@click.command(help=__doc__)
@click.argument("names", nargs=-1, type=click.Choice(list(CASES)), metavar="[CASE]...")
@click.option("--again", is_flag=True, help="Simulate what the file already has, too.")
@click.option("--json", "path", type=click.Path(path_type=Path), default=RESULTS / "lean_memory.json")
def main(names: tuple[str, ...], again: bool, path: Path) -> None:
    known = json.loads(path.read_text(encoding="utf-8"))["cases"] if path.is_file() else {}
    for name in names or CASES:
        case = CASES[name]
        row = known.get(name, {})
        if again or row.get("settings") != case or "price" not in row:
            known[name] = simulated(case, warmed_up=True)
            known[name]["tokens"] = tokens(case)
            if name.startswith(("8B LoRA, 8 x 20480", "8B QLoRA, 8 x 20480", "7B")):
                known[name] |= with_flops(case)
        row = known[name]
        gib = {key: row[f"{key}_bytes"] / 2**30 for key in ("allocated", "reserved", "pinned", "host")}
        print(f"{name}: {'fits' if row['fits'] else 'does not fit'} {case['on']}, {gib['allocated']:.2f} GiB allocated "
              f"({row['phase']}), {gib['reserved']:.2f} reserved, "
              f"{gib['pinned']:.1f} pinned of {gib['host']:.1f} on the host, "
              f"{row.get('flops', 0) / 1e15:.2f} PFLOP", flush=True)  # fmt: skip
        ordered = {case: known[case] for case in CASES if case in known}
        path.write_text(json.dumps({"cases": ordered, "environment": environment()}, indent=2) + "\n", encoding="utf-8")
