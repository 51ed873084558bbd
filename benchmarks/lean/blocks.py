"""Measure what each technique of the lean trainer brings by itself: FLOPs, bytes at the peak, time.

    python -m benchmarks.lean blocks [--tokens 384] [--layers 6] [--pairs 3] [--json FILE]

Layers of SmolLM2-135M's shape with random frozen weights and adapters of rank 16 on every linear layer; fp32, CPU.
``one_sequence``: forward and backward of one sequence's hidden states with each kind of checkpointing, alone and with
the MLP in tiles of an eighth of the sequence. ``shared_prompt``: a group of 8 completions behind a prompt of four times
their length, one by one with the prompt and sharing it. FLOPs are matrix products and attention as torch counts them,
relative to the first row; bytes are the tensors live at the trace's peak beside parameters and their gradients, without
the host pool of ``offloaded``, which is given apart (on this machine both are the same memory); time is CPU seconds in
interleaved turns.
"""

from __future__ import annotations

import functools
import gc
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import torch

from benchmarks.measure import interleaved, ratio, write_result

KINDS = ("none", "mlp", "selective", "full", "offloaded")


def build(layers: int) -> Any:
    """Build a body in training mode, adapters in it."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaModel

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        attn_implementation="sdpa",
    )
    adapters = LoraConfig(r=16, target_modules="all-linear", init_lora_weights=False)
    return get_peft_model(LlamaModel(config), adapters).get_base_model().train()


@contextmanager
def technique(model: Any, kind: str, tile: int | None = None) -> Iterator[Any]:
    """Apply one kind of checkpointing, with the MLP in tiles or not, and take it off; yield the offloader or None."""
    from memprof.grpo.techniques.checkpointing import apply_checkpointing
    from memprof.grpo.techniques.tiled_mlp import apply_tiled_mlp

    take_back = apply_tiled_mlp(model, tile) if tile is not None else None
    checkpointing = apply_checkpointing(model, kind)
    try:
        yield checkpointing.offloader
    finally:
        checkpointing.remove()
        if take_back is not None:
            take_back()


def flops(run: Callable[[], Any]) -> int:
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        run()
    return int(counter.get_total_flops())


def peak_bytes(model: Any, run: Callable[[], Any]) -> int:
    """Return live bytes at the peak besides parameters and their gradients."""
    import memprof

    model.zero_grad()
    run()  # gradients exist, as from a second step on
    gc.collect()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.pickle"
        with memprof.record(path, model=model):
            run()
        peak = memprof.analyze(memprof.load_snapshot(path)).to_dict()["peak"]["allocated_bytes"]
    return int(peak) - sum(p.numel() * p.element_size() * (1 + p.requires_grad) for p in model.parameters())


Run = tuple[str, "int | None", Callable[[], Any]]  # kind of checkpointing, tile, what to run


def timed(model: Any, run: Run) -> dict[str, float]:
    with technique(model, run[0], run[1]):
        start = time.process_time()
        run[2]()
        return {"cpu_seconds": time.process_time() - start}


def compared(model: Any, runs: dict[str, Run], pairs: int) -> dict[str, Any]:
    """Measure each run, relative to the first."""
    base = next(iter(runs))
    rows: dict[str, dict[str, Any]] = {}
    for name, (kind, tile, run) in runs.items():
        with technique(model, kind, tile) as offloader:
            count = flops(run)
            peak = peak_bytes(model, run)
            host = offloader.pool.held_bytes if offloader is not None else 0
        rows[name] = {"flops": count, "peak_bytes": peak - host, "host_bytes": host}
    times = interleaved({name: functools.partial(timed, model, run) for name, run in runs.items()}, pairs)
    first = rows[base]["flops"]
    for name, row in rows.items():
        row["flops"] = round(row["flops"] / first, 3)
        row["cpu_seconds"] = round(ratio(times, name, base, "cpu_seconds"), 3)
    return rows


def one_sequence(model: Any, tokens: int, pairs: int) -> dict[str, Any]:
    ids = torch.randint(512, (1, tokens), generator=torch.Generator().manual_seed(0))

    def step() -> None:
        model(input_ids=ids, use_cache=False).last_hidden_state.sum().backward()

    plain: dict[str, Run] = {kind: (kind, None, step) for kind in KINDS}
    tiled: dict[str, Run] = {f"{kind}, tiled MLP": (kind, -(-tokens // 8), step) for kind in KINDS}
    return compared(model, {**plain, **tiled}, pairs)


def shared_prefix_forward(
    body: Any,
    prompt_ids: Any,
    completions: Sequence[Any],
    piece_fn: Callable[[int, Any], Any],
    *,
    max_tokens: int | None = None,
) -> list[Any]:
    """Run a group forward and backward: ``piece_fn(index, hidden [C, H])`` for each completion, then the prompt's.

    Where ``piece_fn`` returns a tensor with a graph, its backward runs before the next piece's forward; what it
    returned is then given back detached. Neighbouring completions are packed into rows of at most ``max_tokens``
    tokens (None: each alone). Under ``torch.no_grad`` nothing is backpropagated.
    """
    from memprof.grpo.techniques.prefix import forward_completions, forward_prompt

    groups: list[list[int]] = []
    room = 0
    for index, ids in enumerate(completions):
        if groups and len(ids) <= room:
            groups[-1].append(index)
        else:
            groups.append([index])
            room = max_tokens or 0
        room -= len(ids)
    prefix = forward_prompt(body, prompt_ids)
    results: list[Any] = []
    for group in groups:
        hidden = forward_completions(body, prefix, [completions[i] for i in group])
        pieces = [piece_fn(i, h) for i, h in zip(group, hidden, strict=True)]
        losses = [p for p in pieces if isinstance(p, torch.Tensor) and p.requires_grad]
        if losses:
            torch.autograd.backward(losses)
        results += [p.detach() if isinstance(p, torch.Tensor) else p for p in pieces]
    prefix.backward()
    return results


def shared_prompt(model: Any, tokens: int, pairs: int) -> dict[str, Any]:
    g = torch.Generator().manual_seed(0)
    length = max(8, tokens // 5)
    prompt = torch.randint(512, (4 * length,), generator=g)
    completions = [torch.randint(512, (length,), generator=g) for _ in range(8)]

    def alone() -> None:
        for ids in completions:
            hidden = model(input_ids=torch.cat([prompt, ids])[None], use_cache=False).last_hidden_state[0]
            hidden[len(prompt) - 1 : -1].sum().backward()

    def shared(max_tokens: int | None = None) -> None:
        shared_prefix_forward(model, prompt, completions, lambda _, hidden: hidden.sum(), max_tokens=max_tokens)

    runs: dict[str, Run] = {}
    for kind in ("none", "full"):
        runs[f"{kind}, one by one"] = (kind, None, alone)
        runs[f"{kind}, shared"] = (kind, None, shared)
        runs[f"{kind}, shared, packed"] = (kind, None, functools.partial(shared, 4 * length))
    return compared(model, runs, pairs)


@click.command()
@click.option("--tokens", default=384, show_default=True)
@click.option("--layers", default=6, show_default=True)
@click.option("--pairs", default=3, show_default=True)
@click.option("--only", type=click.Choice(["one_sequence", "shared_prompt"]))
@click.option("--json", "path", type=click.Path(path_type=Path))
def main(tokens: int, layers: int, pairs: int, only: str | None, path: Path | None) -> None:
    """Measure each technique by itself."""
    model = build(layers)
    result: dict[str, Any] = {"tokens": tokens, "layers": layers, "pairs": pairs}
    for name, measure in (("one_sequence", one_sequence), ("shared_prompt", shared_prompt)):
        if only in (None, name):
            result[name] = measure(model, tokens, pairs)
    write_result(result, path)
