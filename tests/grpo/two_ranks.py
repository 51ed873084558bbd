"""Run by torchrun in two gloo processes: TRL's trainer and the lean one under DDP and FSDP2, compared on each rank.

Writes ``rank-N.json`` into the folder given: distances and what each rank saw.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.forked import write_and_leave
from tests.grpo.step.test_out_of_memory import RunsOut, running_out
from tests.grpo.trainers import (
    Rollouts,
    build,
    groups,
    logged,
    loss_and_gradients,
    tiny_llama,
    tiny_mixture,
    with_policies,
    worst,
)


def main(folder: Path) -> None:
    """One micro-batch that differs between the ranks, then a short run."""
    found: dict[str, Any] = {
        "single": one_step(folder / "a", {}),
        "twice": one_step(folder / "b", {"top_entropy_quantile": 0.5}),
        "shared": one_step(folder / "c", {}, {"prefix_sharing": True}),
    }
    found["short"] = one_step(folder / "j", {}, {"on_oom": "adapt"}, loss=short_on_one_rank)
    found["coupled"] = one_step(folder / "f", {}, loss=patched_loss)
    from transformers import DistributedConfig

    shards = {"model_init_kwargs": {"distributed_config": DistributedConfig(fsdp_size=2)}}
    found["sharded"] = one_step(folder / "d", shards, model=str(folder / "model"))
    found["experts"] = one_step(folder / "g", {}, model=tiny_mixture())
    found["summed"] = one_step(folder / "i", {}, {"gradient_sums": "fp32"}, model=tiny_llama(torch.bfloat16))
    found["sharded_experts"] = one_step(folder / "h", shards, model=str(folder / "experts"))
    found["run"] = short_run(folder)
    found["budget"] = chosen_for_all(folder / "e")
    found["ran_out"] = short
    write_and_leave(folder, found)


def one_step(
    folder: Path,
    settings: dict[str, Any],
    lean: dict[str, Any] | None = None,
    model: Any = None,
    loss: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> dict[str, Any]:
    results, pieces = [], 0
    for kind in ("trl", "lean"):
        extra = {"max_tokens_per_piece": 24, **(lean or {})} if kind == "lean" else {}
        trainer = build(kind, model or tiny_llama(), folder, loss_type="dapo", **settings, **extra)
        rank = trainer.accelerator.process_index
        # Rank 1 has fewer rows with anything to learn, and shorter ones: fewer pieces.
        inputs = groups(4, seed=20 + rank, completion=13 - 5 * rank)
        if rank:
            inputs["completion_mask"][:2] = 0
        inputs = with_policies(trainer, inputs, beta=0.0)
        inputs["num_items_in_batch"] = torch.tensor(60)
        sharded = hasattr(next(trainer.model.parameters()), "full_tensor")
        assert sharded == isinstance(model, str)
        trainer.model_wrapped = trainer.model if sharded else trainer.accelerator.prepare_model(trainer.model)
        trainer.accelerator.gradient_state._set_sync_gradients(True)
        backwards = count_backwards(trainer)
        with loss():
            results.append(loss_and_gradients(trainer, inputs, trainer.model_wrapped))
        pieces = backwards[0]
    for _, gradients, _ in results:
        gradients.update({name: grad.full_tensor() for name, grad in gradients.items() if hasattr(grad, "full_tensor")})
    (value, gradients, metrics), (lean_loss, lean_gradients, lean_metrics) = results
    return {
        "loss": [value, lean_loss],
        "distance": worst(lean_gradients, gradients),
        "norms": [float(gradient.norm()) for gradient in lean_gradients.values()],
        "metrics": [metrics, lean_metrics],
        "pieces": pieces,
    }


@contextmanager
def short_on_one_rank() -> Iterator[None]:
    """Let memory run out twice in a piece of rank 0, and never on rank 1."""
    with pytest.MonkeyPatch.context() as patch:
        mode = RunsOut(*((150, 400) if torch.distributed.get_rank() == 0 else ()))
        with running_out(patch, mode):
            yield
        short.append(mode.raised)


#: How often memory ran out, for TRL's trainer and for the lean one.
short: list[int] = []


@contextmanager
def patched_loss() -> Iterator[None]:
    """A term over the whole micro-batch in TRL's own class: on rank 0 alone it is anything else than zero."""
    from trl import GRPOTrainer

    own = GRPOTrainer._compute_loss
    scale = 3.0 if torch.distributed.get_rank() == 0 else 0.0

    def coupled(self: Any, model: Any, inputs: Any) -> torch.Tensor:
        handed, ask = [], self._get_per_token_logps_and_entropies

        def listening(*args: Any, **kwargs: Any) -> Any:
            handed.append(ask(*args, **kwargs))
            return handed[-1]

        self._get_per_token_logps_and_entropies = listening
        loss: torch.Tensor = own(self, model, inputs)
        del self._get_per_token_logps_and_entropies
        each = (handed[0][0] * inputs["completion_mask"]).sum(1)
        return loss + scale * (each - each.mean()).pow(2).sum()

    GRPOTrainer._compute_loss = coupled
    try:
        yield
    finally:
        GRPOTrainer._compute_loss = own


def chosen_for_all(folder: Path) -> dict[str, Any]:
    """What a memory budget leads to on this rank where rank 0 chooses, and where it finds nothing."""
    from memprof.config.settings import Settings
    from memprof.errors import DoesNotFit, UsageError
    from memprof.grpo import budget
    from memprof.plan.budget_search import Choice
    from tests.plan.rows import simulated_row

    settings = Settings(
        "HuggingFaceTB/SmolLM2-135M",
        recipe="lean",
        gradient_checkpointing="selective",
        tiled_mlp=48,
        generation_batch=2,
    )
    expected = simulated_row(categories={"weights": 1})

    def chosen(trainer: Any, total: int) -> Any:
        assert trainer.accelerator.process_index == 0
        return Choice(settings, expected, total, (), 1), []

    def refused(trainer: Any, total: int) -> Any:
        assert trainer.accelerator.process_index == 0
        raise DoesNotFit("Nothing fits.")

    budget._chosen = chosen
    args = build("lean", tiny_llama(), folder, memory_budget="1GB").args
    budget._chosen = refused
    try:
        build("lean", tiny_llama(), folder, memory_budget="1GB")
        said = ""
    except UsageError as error:
        said = str(error)
    return {"chosen": [args.checkpointing, args.tiled_mlp, args.generation_batch], "said": said}


def count_backwards(trainer: Any) -> list[int]:
    count, backward = [0], trainer.accelerator.backward

    def counting(*args: Any, **kwargs: Any) -> None:
        count[0] += 1
        backward(*args, **kwargs)

    trainer.accelerator.backward = counting
    return count


def short_run(folder: Path) -> list[Any]:
    rank = torch.distributed.get_rank()
    model = str(folder / "model")
    rollouts = Rollouts()
    runs = []
    for kind in ("trl", "lean"):
        settings: dict[str, Any] = {"max_steps": 3, "gradient_accumulation_steps": 2, "beta": 0.04}
        trainer = build(kind, model, folder / f"run-{rank}", **settings)
        rollouts.record(trainer) if kind == "trl" else rollouts.replay(trainer)
        trainer.train()
        weights = [float(parameter.double().norm()) for parameter in trainer.model.parameters()]
        runs.append({"logged": logged(trainer), "weights": weights})
    return runs


if __name__ == "__main__":
    main(Path(sys.argv[1]))
