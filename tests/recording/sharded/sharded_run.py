"""Two ranks, four engines, one small model each: what ``tests/recording/sharded/test_sharded.py`` starts.

Writes ``KIND.rank-N.pickle`` for each engine and ``KIND.rank-N.json`` with what the engine's own objects say.
"""

from __future__ import annotations

import faulthandler
import gc
import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from memprof import phase, record
from tests.forked import write_and_leave

WIDTHS = (50, 33, 21)  # odd, so that shards differ and are padded


def model() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(a, b) for a, b in itertools.pairwise(WIDTHS)]
    return nn.Sequential(layers[0], nn.Tanh(), layers[1])


def fsdp2() -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    net, mesh = model(), init_device_mesh("cpu", (2,))
    for layer in (net[0], net[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    return net


def fsdp1() -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel

    wrapped: nn.Module = FullyShardedDataParallel(model(), device_id=torch.device("cpu"), use_orig_params=True)
    return wrapped


def ddp(views: bool) -> nn.Module:
    wrapped: nn.Module = nn.parallel.DistributedDataParallel(model(), gradient_as_bucket_view=views)
    return wrapped


def train(net: nn.Module, optimizer: torch.optim.Optimizer, batches: list[torch.Tensor]) -> list[float]:
    losses = []
    for batch in batches:
        with phase("forward"):
            loss = net(batch).square().mean()
        with phase("backward"):
            loss.backward()
        with phase("optimizer_step"):
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def run(kind: str, make: Callable[[], nn.Module], folder: Path) -> None:
    """Four steps unwatched, then the same four, the last two watched."""
    rank = dist.get_rank()
    torch.manual_seed(1 + rank)
    batches = [torch.randn(6, WIDTHS[0]) for _ in range(4)]
    alone = make()
    expected = train(alone, torch.optim.Adam(alone.parameters()), batches)
    del alone
    gc.collect()
    net = make()
    optimizer = torch.optim.Adam(net.parameters())
    losses = train(net, optimizer, batches[:2])
    with record(folder / f"{kind}.rank-{rank}.pickle", model=net, optimizer=optimizer):
        losses += train(net, optimizer, batches[2:])
    facts: dict[str, Any] = {"losses": losses, "expected": expected, "hooks": gradient_hooks(net)}
    (folder / f"{kind}.rank-{rank}.json").write_text(json.dumps(facts))


def gradient_hooks(net: nn.Module) -> int:
    """Hooks that are left on FSDP2's whole parameters."""
    from memprof.recording.sharded_owners import unsharded_parameters

    return sum(len(p._post_accumulate_grad_hooks or ()) for p, _ in unsharded_parameters(net))


def main() -> None:
    faulthandler.dump_traceback_later(100, exit=True)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    folder = Path(sys.argv[1])
    engines: dict[str, Callable[[], nn.Module]] = {
        "fsdp2": fsdp2, "fsdp1": fsdp1, "ddp": lambda: ddp(False), "views": lambda: ddp(True),
    }  # fmt: skip
    for kind, make in engines.items():
        run(kind, make, folder)
    write_and_leave(folder, {})


if __name__ == "__main__":
    main()
