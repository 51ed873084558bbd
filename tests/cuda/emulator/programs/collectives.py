"""Every collective of NCCL between two ranks, each against its closed form; then DDP and FSDP2. Started by torchrun."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
PEER = 1 - RANK
TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32, torch.int64, torch.uint8)


def filled(value: float, n: int = 5, dtype: Any = torch.float32) -> Any:
    return torch.full((n,), value, dtype=dtype, device="cuda")


def check(name: str, found: Any, expected: list[float]) -> None:
    assert found.tolist() == expected, f"{name} on rank {RANK}: {found.tolist()} instead of {expected}"


def reductions() -> None:
    for dtype in TYPES:
        x = filled(RANK + 3, 700_001, dtype)  # several parts of a slot
        dist.all_reduce(x)
        assert bool((x == 7).all()), (dtype, x)
    for op, value in ((dist.ReduceOp.MAX, 4), (dist.ReduceOp.MIN, 3), (dist.ReduceOp.PRODUCT, 12)):
        x = filled(RANK + 3)
        dist.all_reduce(x, op)
        check(str(op), x, [value] * 5)
    x = filled(RANK)
    dist.all_reduce(x, dist._make_nccl_premul_sum(0.25))
    check("premul", x, [0.25] * 5)
    x = filled(RANK + 1)
    dist.reduce(x, 1)
    check("reduce", x, [3.0 if RANK == 1 else 1.0] * 5)


def moves() -> None:
    x = filled(10.0 * RANK)
    dist.broadcast(x, 1)
    check("broadcast", x, [10.0] * 5)
    gathered = torch.empty(10, device="cuda")
    dist.all_gather_into_tensor(gathered, filled(RANK))
    check("gather", gathered, [0.0] * 5 + [1.0] * 5)
    part = torch.empty(2, device="cuda")
    dist.reduce_scatter_tensor(part, torch.arange(4.0, device="cuda") * (RANK + 1), dist.ReduceOp.AVG)
    check("scatter", part, [[0.0, 1.5], [3.0, 4.5]][RANK])
    mixed = torch.empty(2, device="cuda")
    dist.all_to_all_single(mixed, torch.arange(2.0, device="cuda") + 10 * RANK)
    check("all to all", mixed, [RANK, RANK + 10])


def messages() -> None:
    n = 200_001  # several letters
    got = torch.empty(n, device="cuda")
    work = dist.batch_isend_irecv([dist.P2POp(dist.isend, filled(RANK, n), PEER), dist.P2POp(dist.irecv, got, PEER)])
    for one in work:
        one.wait()
    assert bool((got == PEER).all())
    if RANK == 0:
        dist.send(filled(7.0), 1)
    else:
        x = filled(0.0)
        dist.recv(x, 0)
        check("recv", x, [7.0] * 5)
    alone = dist.new_group([RANK], use_local_synchronization=True)
    x = filled(RANK)
    dist.all_reduce(x, group=alone)
    check("alone", x, [float(RANK)] * 5)


def model() -> Any:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4)).cuda()


def loss_of(module: Any, rank: int) -> Any:
    return module(torch.linspace(-1, 1, 16, device="cuda").view(2, 8) * (rank + 1)).square().sum()


def trained() -> None:
    """Let both wrappers step; the result is one process's whose loss is the mean of both ranks'."""
    alone = model()
    ((loss_of(alone, 0) + loss_of(alone, 1)) / 2).backward()
    torch.optim.SGD(alone.parameters(), lr=0.1).step()
    ddp = DistributedDataParallel(model())
    sharded = model()
    for layer in (sharded[0], sharded[2]):
        fully_shard(layer)
    fully_shard(sharded)
    for wrapped in (ddp, sharded):
        loss_of(wrapped, RANK).backward()
        torch.optim.SGD(wrapped.parameters(), lr=0.1).step()
        for ours, theirs in zip(wrapped.parameters(), alone.parameters(), strict=True):
            whole = ours.full_tensor() if hasattr(ours, "full_tensor") else ours
            torch.testing.assert_close(whole, theirs)


torch.cuda.set_device(RANK)
dist.init_process_group("nccl", device_id=torch.device("cuda", RANK))
for part in (reductions, moves, messages, trained):
    part()
    dist.barrier()
print(f"rank {RANK} has seen all", flush=True)
dist.destroy_process_group()
