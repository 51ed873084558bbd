"""Run by torchrun in two gloo processes: 50 DDP steps of bf16 weights, each rank with its own data and random numbers.

Writes ``rank-N.json`` into the folder given: a digest of the weights and moments after steps 1 and 50.
"""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from memprof.grpo.techniques.rounding import StochasticAdamW, drawing_alike, round_to_bf16
from tests.forked import write_and_leave


class DrawsByItself(torch.optim.SGD):
    """Rounds with torch's own generator, as torchao's optimizers do."""

    def step(self, closure: Any = None) -> Any:
        with torch.no_grad():
            for weight in self.param_groups[0]["params"]:
                self.state[weight]["step"] = self.state[weight].get("step", 0) + 1
                weight.copy_(round_to_bf16(weight.float() - 1e-3 * weight.grad.float()))


def main(folder: Path) -> None:
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    kinds = {
        "ours": lambda weights: StochasticAdamW(weights, lr=1e-3, seed=42),
        "alike": lambda weights: drawing_alike(DrawsByItself, 42)(weights),
        "apart": lambda weights: DrawsByItself(weights),
    }
    found = {name: after_steps(make, rank) for name, make in kinds.items()}
    write_and_leave(folder, found)


def after_steps(make: Any, rank: int) -> dict[str, str]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Dropout(0.2), torch.nn.Linear(64, 8))
    trained = DistributedDataParallel(model.to(torch.bfloat16))
    optimizer = make(model.parameters())
    torch.manual_seed(100 + rank)  # as trainers seed each rank's process
    found = {}
    for step in range(1, 51):
        trained(torch.randn(4, 32).to(torch.bfloat16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step in (1, 50):
            found[str(step)] = digest(model, optimizer)
    return found


def digest(model: Any, optimizer: Any) -> str:
    total = hashlib.sha256()
    state = [value for slots in optimizer.state.values() for value in slots.values() if torch.is_tensor(value)]
    for tensor in (*model.parameters(), *state):
        total.update(tensor.detach().float().numpy().tobytes())
    return total.hexdigest()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    os._exit(0)  # gloo's threads may outlive the interpreter on a busy machine, which ends in an abort
