"""Train a small Llama with the lean trainer while memory is taken away, on the emulated device.

    echo '{"settings": {...}, "steps": 30, "shortages": [2, 5]}' | python -m benchmarks.lean.equality.survival_run

A child process of :mod:`benchmarks.lean.equality.survival`. Every run is a process of its own, two for two ranks. The
first run has room for all; in the others the allocator's limit is lowered for a while, from the beginning and at random
operators, and what was logged and the parameters are compared with the first's. ``pieces``: so are those of runs that
have room and cut smaller pieces. The answer is the last line.
"""

from __future__ import annotations

import gc
import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.simulator.emulated.edge_run import import_without_device, in_processes

#: Activations of a hundred MB: torch's allocator takes segments of 20 MiB, of which few make a limit that is missed by
#: one of them.
SHAPE: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 16, "intermediate_size": 2048, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": None,
    "eos_token_id": 1, "initializer_range": 0.05, "tie_word_embeddings": False,
}  # fmt: skip
PROMPTS, COMPLETION = 40, 16
#: How often memory is taken away beside the first step, each time for a quarter of a step to a whole one.
MOMENTS = 8
_ROW = {
    "per_device_train_batch_size": 16, "num_generations": 8, "max_completion_length": COMPLETION, "beta": 0.0,
    "learning_rate": 1e-3, "gradient_checkpointing": False, "bf16": False, "seed": 7, "logging_steps": 1,
    "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "max_tokens_per_piece": 1024,
    "generation": "paged", "on_oom": "auto", "optim": "adamw_torch_fused",
    "steps_per_generation": 5, "num_iterations": 3,
}  # fmt: skip


def main() -> None:
    asked = json.loads(sys.stdin.read())
    import_without_device((9, 0))
    gc.freeze()  # collections in the processes below look at what they made
    with tempfile.TemporaryDirectory() as folder:
        free = _run(asked, Path(folder), None, [])
        rows = []
        for tokens in asked.get("pieces", ()):
            smaller = {**asked, "settings": {**asked["settings"], "max_tokens_per_piece": tokens}}
            found = _run(smaller, Path(folder), None, free["operators"])
            rows.append({"shortage": 0, "pieces": tokens, **compared(found, free)})
        for shortage in asked["shortages"]:
            limit = int(free["allocated_bytes"] * (1 - shortage / 100))
            found = _run(asked, Path(folder), limit, free["operators"])
            rows.append({"shortage": shortage, **compared(found, free)})
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    undisturbed = {name: free[name] for name in ("allocated_bytes", "reserved_bytes", "cpu_s")}
    print(json.dumps({"undisturbed": undisturbed, "runs": rows}))


def _run(asked: dict[str, Any], folder: Path, limit: int | None, operators: list[int]) -> dict[str, Any]:
    """Train once; of several ranks, answer the worst: the highest peak, the first error.

    ``operators``: of the first run's steps; empty: this is the first.
    """
    ranks = asked.get("ranks", 1)
    port = str(random.SystemRandom().randrange(20000, 60000))
    works = [
        lambda rank=rank: _train(asked, folder, limit, operators, rank, {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port} if ranks > 1 else {})
        for rank in range(ranks)
    ]  # fmt: skip
    found = in_processes(works)
    worst = max(found, key=lambda one: one["reserved_bytes"])
    error = next((one["error"] for one in found if one["error"]), None)
    return {**worst, "error": error, "again": sum(one["again"] for one in found), "logs": found[0]["logs"],
            "said": sorted({line for one in found for line in one["said"]})}  # fmt: skip


def compared(found: dict[str, Any], free: dict[str, Any]) -> dict[str, Any]:
    """Say what became of a run, beside the one that had room."""
    import torch

    row = {"lived": found["error"] is None, "again": found["again"], "said": found["said"],
           "taken": found["taken"], "tokens_equal": found["tokens_equal"]}  # fmt: skip
    if found["error"]:
        return {**row, "error": found["error"], "sentence": "The lean trainer" in found["error"]}
    pairs = zip(found["logs"], free["logs"], strict=True)
    losses = max(abs(a["loss"] - b["loss"]) / max(1e-3, abs(b["loss"])) for a, b in pairs if "loss" in b)
    mine, theirs = torch.load(found["parameters"]), torch.load(free["parameters"])
    rest = sum(float((mine[name] - theirs[name]).double().square().sum()) for name in theirs) ** 0.5
    norm = sum(float(one.double().square().sum()) for one in theirs.values()) ** 0.5
    cost = found["cpu_s"] / free["cpu_s"]
    return {**row, "losses_apart": losses, "parameters_apart": rest / norm, "cost": cost}


def _train(
    asked: dict[str, Any], folder: Path, limit: int | None, operators: list[int], rank: int, env: dict[str, str]
) -> dict[str, Any]:
    os.environ.update(env)
    import torch

    if env:
        torch.cuda.set_device(rank)
    trainer = build(asked, folder)
    taken = _taken()(limit, operators, rank)
    tokens = _with_tokens_of_the_first(trainer, folder / f"tokens-{rank}.pt", keeps=not operators)
    trainer.add_callback(_each_step(lambda: taken.steps.append(0)))
    start, error = time.process_time(), None
    try:
        with taken:
            trainer.train()
    except torch.OutOfMemoryError as caught:
        error = str(caught)
    path = folder / f"{limit}-{len(operators)}-{rank}.pt"
    parameters = {name: p.detach().float().cpu() for name, p in trainer.model.named_parameters() if p.requires_grad}
    torch.save(parameters, path)
    adaptation = trainer._adaptation
    return {
        "error": error, "logs": [dict(row) for row in trainer.state.log_history], "parameters": str(path),
        "allocated_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(), "operators": taken.steps,
        "cpu_s": time.process_time() - start,
        "again": adaptation.again if adaptation is not None else 0, "taken": taken.times,
        "tokens_equal": tokens,
        "said": [line for line in trainer._once_log.said if "memory" in line],
    }  # fmt: skip


def _with_tokens_of_the_first(trainer: Any, path: Path, *, keeps: bool) -> list[bool]:
    """Generate, and train on what the run that had room generated; return, filled later, whether tokens were equal.

    Rounding alone makes later samples others: halves of a piece add their sums in another order.
    """
    import torch

    own, equal, kept = trainer.lean_generation.run, [], [] if keeps else torch.load(path)

    def run(*given: Any) -> Any:
        found = own(*given)
        if keeps:
            kept.append((found, torch.get_rng_state(), torch.cuda.get_rng_state()))
            torch.save(kept, path)
            return found
        meant, host, device = kept[len(equal)]
        equal.append(found[0] == meant[0])
        torch.set_rng_state(host)
        torch.cuda.set_rng_state(device)
        return meant

    trainer.lean_generation.run = run
    return equal


def _taken() -> Any:
    """Return the class below; torch must touch no device before the fork."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    class Taken(TorchDispatchMode):
        """Lower the allocator's limit in the first step and from random operators of random steps on, each for a while.

        ``limit`` None counts operators only. ``operators``: of each step of the run that had room.
        """

        def __init__(self, limit: int | None, operators: list[int], seed: int) -> None:
            super().__init__()
            self.steps: list[int] = []  # operators by step
            self.times = self._left = 0
            self._total = torch.cuda.get_device_properties().total_memory
            self._limit = limit
            self._begins: dict[tuple[int, int], int] = {(0, 0): operators[0]} if limit else {}
            source = random.Random((limit or 0) + seed)
            for _ in range(MOMENTS if limit else 0):
                step = source.randrange(1, len(operators))
                most = operators[step]
                self._begins[step, source.randrange(most)] = source.randrange(most // 4, most)

        def __torch_dispatch__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if self.steps:
                self._left -= 1
                if (lasts := self._begins.get((len(self.steps) - 1, self.steps[-1]))) is not None:
                    self.times, self._left = self.times + 1, max(self._left, lasts)
                    torch.cuda.set_per_process_memory_fraction((self._limit + 0.5) / self._total)
                elif self._left == 0:
                    torch.cuda.set_per_process_memory_fraction(1.0)
                self.steps[-1] += 1
            return function(*args, **(kwargs or {}))

    return Taken


def _each_step(tell: Any) -> Any:
    from transformers import TrainerCallback

    class EachStep(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            tell()

    return EachStep()


def build(asked: dict[str, Any], folder: Path) -> Any:
    """Build the lean trainer on a random Llama whose completions end by chance."""
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM, PrinterCallback

    from benchmarks.simulator.emulated.device_run import tokenizer
    from memprof.grpo import LeanGRPOConfig, LeanGRPOTrainer

    torch.manual_seed(0)
    path = folder / "model"
    if not path.exists():
        LlamaForCausalLM(LlamaConfig(**{**SHAPE, **asked.get("shape", {})})).save_pretrained(path)
    kwargs: dict[str, Any] = {"dtype": "float32", "device_map": None}
    if asked.get("four_bits"):
        kwargs = {"dtype": "bfloat16", "quantization_config": BitsAndBytesConfig(load_in_4bit=True)}
    adapter = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM", **asked["lora"]) \
        if "lora" in asked else None  # fmt: skip
    settings = {**_ROW, "max_steps": asked["steps"], "model_init_kwargs": kwargs, "output_dir": str(folder / "out"),
                **asked["settings"]}  # fmt: skip
    data = Dataset.from_dict({"prompt": ["abcdefghijkl"[i % 7:] * 2 + "xy"[i % 2] * (i % 5) for i in range(PROMPTS)]})
    trainer = LeanGRPOTrainer(
        model=str(path), reward_funcs=_reward, args=LeanGRPOConfig(**settings), train_dataset=data,
        processing_class=tokenizer(), peft_config=adapter,
    )  # fmt: skip
    trainer.remove_callback(PrinterCallback)
    return trainer


def _reward(completions: list[Any], completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [sum(ids) % 97 / 97 for ids in completion_ids]


if __name__ == "__main__":
    main()
