"""Ask torch's CUDA build, on emulated GPUs, what its kernels allocate and which attention it chooses.

    python -m benchmarks.simulator emulated-kernels

Writes ``tests/simulate/kernels/recorded.json``, which the tests hold the simulator against: for each GPU the bytes
that each operation of ``tests/simulate/kernels/operations.py`` asked for and (negative) gave back, in order, and what
``torch._fused_sdp_choice`` answered.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import click

from benchmarks.tabling import ROOT

RECORDED = ROOT / "tests" / "simulate" / "kernels" / "recorded.json"
_CARDS = ("T4", "V100-16GB", "A100-80GB", "RTX 3090", "RTX 4090", "H100", "B200", "RTX 5090")
_BACKENDS = {0: "math", 1: "flash", 2: "efficient"}


@click.command(help=__doc__)
def main() -> None:
    from benchmarks.simulator.emulated.device import ask
    found = {card: ask("benchmarks.simulator.emulated.kernels", {}, card) for card in _CARDS}
    names = list(next(iter(found.values()))["operations"])
    plain = {
        "torch": found["H100"]["torch"],
        "operations": {name: {card: found[card]["operations"][name] for card in _CARDS} for name in names},
        "attention": {card: found[card]["attention"] for card in _CARDS},
    }
    text = json.dumps(plain, indent=1)
    RECORDED.write_text(text + "\n")


def recorded_here() -> dict[str, Any]:
    """Run every operation on the device that is here; what each asked for, and which attention was chosen."""
    import torch

    from tests.simulate.kernels.operations import ATTENTION, OPERATIONS

    return {
        "torch": torch.__version__,
        "attention": "".join(_chosen(*case)[0] for case in ATTENTION),
        "operations": {name: _allocated(make) for name, make in OPERATIONS.items()},
    }


def _chosen(dtype: str, width: int, masked: bool, grad: bool, grouped: bool, told: bool) -> str:
    import torch

    from tests.simulate.kernels.operations import attention_arguments

    query, key, value, mask = attention_arguments(dtype, width, masked, grad, grouped, "cuda")
    return _BACKENDS[torch._fused_sdp_choice(query, key, value, mask, 0.0, not masked, enable_gqa=told)]


def _allocated(make: Any) -> list[int] | str:
    import torch

    work = make("cuda")
    torch.cuda.memory._record_memory_history(max_entries=100_000, stacks="python")
    try:
        kept = work()
        del kept
        time.sleep(0.1)  # the autograd engine's thread lets go of its last tensors after it has answered
    except RuntimeError as error:
        return str(error).partition("\n")[0][:80]
    finally:
        trace = torch.cuda.memory._snapshot()["device_traces"][0]
        torch.cuda.memory._record_memory_history(None)
    sign = {"alloc": 1, "free_requested": -1}
    return [sign[entry["action"]] * entry["size"] for entry in trace if entry["action"] in sign]


if __name__ == "__main__":
    sys.stdin.read()
    print(json.dumps(recorded_here()))
