"""Training loops without a trainer, and single uses of the allocator, each recorded and counted.

Asked for by name; each returns the counters between its beginning and its end, and whatever its test compares.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

import memprof
from tests.cuda.programs.answer import answer
from tests.cuda.programs.ledger import Ledger

MIB = 2**20
Told = dict[str, Any]
_loops: dict[str, Callable[[Path, Ledger], Told]] = {}


def loop(function: Callable[[Path, Ledger], Told]) -> Callable[[Path, Ledger], Told]:
    _loops[function.__name__] = function
    return function


def main(asked: dict[str, Any]) -> dict[str, Told]:
    """Run the loops ``names``; each writes ``<name>.pickle`` into ``folder`` and tells the bytes it ``left``."""
    ledger, told = Ledger(), {}
    _warm_up()
    before = torch.cuda.memory_allocated()
    gc.disable()  # what a reference cycle keeps is left
    for name in asked["names"]:
        torch.cuda.empty_cache()
        ledger.restart()
        told[name] = _loops[name](Path(asked["folder"]), ledger)
        told[name]["left"] = torch.cuda.memory_allocated() - before
    return told


def _warm_up() -> None:
    """Train without memprof: cuBLAS makes its workspaces, and the first optimizer imports ``torch._dynamo``.

    That import keeps its callers' frames, and so their models, in a reference cycle.
    """
    model = stack()
    train(model, torch.optim.AdamW(model.parameters(), fused=True))
    del model
    gc.collect()


class Block(torch.nn.Module):
    """A residual MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


def stack(width: int = 256, layers: int = 3) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(*(Block(width) for _ in range(layers))).cuda()


def held(model: torch.nn.Module) -> Told:
    """The bytes of a model that AdamW trains: weights, gradients, and two moments with a counter each."""
    weights = sum(p.nbytes for p in model.parameters())
    counters = 4 * sum(1 for _ in model.parameters())
    return {"weights": weights, "gradients": weights, "optimizer_state": 2 * weights + counters}


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> list[float]:
    """Plain steps, their phases marked; the losses."""
    losses = []
    for _ in range(steps):
        with memprof.phase("forward"):
            loss = model(torch.randn(64, 256, device="cuda")).square().mean()
        with memprof.phase("backward"):
            loss.backward()
        with memprof.phase("optimizer_step"):
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@loop
def recorded(folder: Path, ledger: Ledger) -> Told:
    """``memprof.record`` around a plain loop; then the same loop without."""
    runs = []
    for watched in (True, False):
        model = stack()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        torch.manual_seed(1)
        if watched:
            with memprof.record(folder / "recorded.pickle", model=model, optimizer=optimizer):
                losses = train(model, optimizer)
            counters, facts = ledger.read(), held(model)
        else:
            losses = train(model, optimizer)
        runs.append([losses, [float(p.double().sum()) for p in model.parameters()]])
    return {"counters": counters, "facts": facts, "watched": runs[0], "alone": runs[1]}


class Worker:
    """What a framework without a Trainer has in a process: methods that a driver calls."""

    def __init__(self) -> None:
        self.model = stack()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)

    def compute_log_prob(self) -> float:
        with torch.no_grad():
            return float(self.model(torch.randn(64, 256, device="cuda")).mean())

    def update_policy(self) -> float:
        loss = self.model(torch.randn(64, 256, device="cuda")).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss)


@loop
def attached(folder: Path, ledger: Ledger) -> Told:
    """``memprof.attach`` in a worker; its methods are the phases."""
    worker = Worker()
    watch = memprof.attach(worker.model, worker.optimizer, output_dir=folder)
    watch.methods(worker, compute_log_prob="old_logprobs", update_policy="train")
    for number in (1, 2):
        watch.step(number)
        worker.compute_log_prob()
        worker.update_policy()
    counters = ledger.read()
    return {"counters": counters, "facts": held(worker.model), "snapshot": str(watch.detach())}


@loop
def pending(folder: Path, ledger: Ledger) -> Told:
    """A block that another stream still uses when the peak comes: freed, not yet to be had again."""
    side = torch.cuda.Stream()
    with memprof.record(folder / "pending.pickle"), memprof.phase("forward"):
        first = torch.zeros(32 * MIB, dtype=torch.uint8, device="cuda")
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            second = first + 1
        first.record_stream(side)
        del first
        third = torch.zeros(48 * MIB, dtype=torch.uint8, device="cuda")
        now = torch.cuda.memory_stats()
        torch.cuda.synchronize()
        del third, second
        torch.zeros(1, device="cuda")
    waiting = now["active_bytes.all.current"] - now["allocated_bytes.all.current"]
    return {"counters": ledger.read(), "waiting": waiting}


@loop
def peaks_apart(folder: Path, ledger: Ledger) -> Told:
    """The most is active while a block waits for its stream, and the most is allocated later."""
    side = torch.cuda.Stream()
    with memprof.record(folder / "peaks_apart.pickle"), memprof.phase("forward"):
        first = torch.zeros(64 * MIB, dtype=torch.uint8, device="cuda")
        first.record_stream(side)
        with torch.cuda.stream(side):
            first.add_(1)
        del first
        second = torch.zeros(32 * MIB, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        third = torch.zeros(40 * MIB, dtype=torch.uint8, device="cuda")
        del second, third
    return {"counters": ledger.read()}


@loop
def pool(folder: Path, ledger: Ledger) -> Told:
    """Tensors of a private pool (``torch.cuda.MemPool``) beside others; some of the pool's segments stay empty."""
    private = torch.cuda.MemPool()
    with memprof.record(folder / "pool.pickle"), memprof.phase("forward"):
        outside = torch.zeros(8 * MIB, dtype=torch.uint8, device="cuda")
        with torch.cuda.use_mem_pool(private):
            inside = [torch.zeros(24 * MIB, dtype=torch.uint8, device="cuda") for _ in range(3)]
        del inside[0]
        largest = torch.zeros(30 * MIB, dtype=torch.uint8, device="cuda")
    told = {"counters": ledger.read(), "reserved": torch.cuda.memory_reserved()}
    told["idle"] = told["reserved"] - torch.cuda.memory_allocated()
    del outside, inside, largest, private
    return told


@loop
def compiled(folder: Path, ledger: Ledger) -> Told:
    """A region that inductor compiled to Triton kernels, forward and backward."""
    model = stack()
    fast = torch.compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    train(fast, optimizer, steps=1)
    ledger.restart()
    with memprof.record(folder / "compiled.pickle", model=model, optimizer=optimizer):
        train(fast, optimizer)
    from torch._dynamo.utils import counters

    made = dict(counters["inductor"]), dict(counters["stats"])
    return {"counters": ledger.read(), "facts": held(model), "graphs": made[1].get("unique_graphs", 0)}


@loop
def overflown(folder: Path, ledger: Ledger) -> Told:
    """The ring is over-full inside one step, and the peak's allocations are no longer in it."""
    model = stack()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    with memprof.record(folder / "overflown.pickle", model=model, optimizer=optimizer, max_entries=200) as session:
        session.set_step(1)
        with memprof.phase("forward"):
            x = torch.randn(4096, 256, device="cuda")
            loss = model(x).square().mean()
        with memprof.phase("backward"):
            loss.backward()
        with memprof.phase("optimizer_step"):
            optimizer.step()
            optimizer.zero_grad()
            for _ in range(300):
                torch.zeros(2048, device="cuda")
    return {"counters": ledger.read(), "facts": held(model)}


@loop
def recovered(folder: Path, ledger: Ledger) -> Told:
    """A script that catches an out-of-memory error, recovers and records again."""
    for name in ("recovered-first", "recovered"):
        with memprof.record(folder / f"{name}.pickle"), memprof.phase("forward"):
            if name == "recovered-first":
                with suppress(torch.OutOfMemoryError):
                    torch.zeros(2**50, dtype=torch.uint8, device="cuda")
            kept = torch.zeros(4 * MIB, dtype=torch.uint8, device="cuda")
            del kept
    return {"counters": ledger.read()}


@loop
def decoding(folder: Path, ledger: Ledger) -> Told:
    """transformers' generate; what each token leaves behind is still used by a side stream."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from tests.cuda.programs.tiny import SHAPE

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE)).to("cuda", torch.bfloat16).eval()
    side, waiting = torch.cuda.Stream(), [0]

    def leave(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        block = torch.zeros(3 * MIB, dtype=torch.uint8, device="cuda")
        with torch.cuda.stream(side):
            block.add_(1)
        block.record_stream(side)
        del block
        stats = torch.cuda.memory_stats()
        waiting[0] = max(waiting[0], stats["active_bytes.all.current"] - stats["allocated_bytes.all.current"])
        return scores

    prompt = torch.randint(3, 2000, (4, 32), device="cuda")
    with memprof.record(folder / "decoding.pickle", model=model) as session:
        with memprof.phase("generate"):
            length = {"min_new_tokens": 40, "max_new_tokens": 40}
            model.generate(prompt, attention_mask=torch.ones_like(prompt), logits_processor=[leave], **length)
        counters = ledger.read()
        del session
    thinned = memprof.load_snapshot(folder / "decoding.pickle").run.recorded.thinned
    return {"counters": counters, "waiting": waiting[0], "thinned": [[span.start_us, span.end_us] for span in thinned]}


if __name__ == "__main__":
    answer(main)
