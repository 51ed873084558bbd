"""Two ranks, a card each: DDP, FSDP2 and TRL's trainer under DDP, each recorded on every rank.

    torchrun --nproc_per_node 2 -m tests.cuda.programs.ranks FOLDER

All three have NCCL, as on cards: the emulated one moves values through shared memory and takes no memory for itself.
Each rank writes ``<kind>.rank-N.pickle`` and ``told.rank-N.json``.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import memprof
from tests.cuda.programs import tiny
from tests.cuda.programs.ledger import Ledger
from tests.cuda.programs.loops import stack, train


def main(folder: Path) -> None:
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    ledger = Ledger(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    told = {"ddp": plain(folder, "ddp", ledger), "fsdp2": plain(folder, "fsdp2", ledger), "trl": trl(folder, ledger)}
    (folder / f"told.rank-{rank}.json").write_text(json.dumps(told))
    dist.destroy_process_group()


def plain(folder: Path, kind: str, ledger: Ledger) -> dict[str, Any]:
    tiny.fresh()
    ledger.restart()
    model = stack()
    whole = sum(p.nbytes for p in model.parameters())
    wrapped = sharded(model) if kind == "fsdp2" else torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-3, fused=True)
    path = folder / f"{kind}.rank-{dist.get_rank()}.pickle"
    with memprof.record(path, model=wrapped, optimizer=optimizer):
        train(wrapped, optimizer)
    counters = ledger.read()
    local = sum(getattr(p, "_local_tensor", p).nbytes for p in wrapped.parameters())
    return {"counters": counters, "whole": whole, "local": local}


def sharded(model: torch.nn.Module) -> torch.nn.Module:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    mesh = DeviceMesh.from_group(dist.group.WORLD, "cuda")
    for block in model.children():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def trl(folder: Path, ledger: Ledger) -> dict[str, Any]:
    """The callback on both ranks of TRL's trainer."""
    tiny.fresh()
    ledger.restart()
    callback = memprof.MemProfCallback(folder / "trl" / "_memprof")
    if dist.get_rank() == 0:
        tiny.checkpoint(folder)
    dist.barrier()
    built = tiny.trainer(folder, {"name": "trl"}, [callback])
    built.train()
    return {"counters": ledger.read(), "world": built.accelerator.num_processes, "facts": tiny.facts(built, {})}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
