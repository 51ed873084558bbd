"""Train with a stand-in engine on the card, its weights and pool beside the policy's or in their place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.cuda.programs import tiny
from tests.cuda.programs.answer import answer

MIB = 2**20


class Engine:
    """Obeys what TRL asks of ``vllm_generation``, with sleep: weights and pool are on the card in its calls only."""

    def __init__(self, trainer: Any, pool_bytes: int) -> None:
        self._trainer, self._pool_bytes = trainer, pool_bytes
        self._weights: list[torch.Tensor] = []
        self.beside: list[int] = []

    def sync_weights(self) -> None:
        torch.cuda.empty_cache()
        self.beside.append(torch.cuda.memory_allocated())
        self._weights = [p.detach().to("cuda", copy=True) for p in self._trainer.model.parameters()]

    def generate(self, prompts: list[list[int]], **_: Any) -> Any:
        pool = torch.empty(self._pool_bytes, dtype=torch.uint8, device="cuda")
        new = [[5 + i % 7, 9 + len(ids) % 5, 1] for i, ids in enumerate(prompts)]
        del pool
        self._weights = []
        torch.cuda.empty_cache()
        return prompts, new, [[[-1.0]] * len(ids) for ids in new], None


def main(asked: dict[str, Any]) -> dict[str, Any]:
    """Train three steps with and without parking; ``limit`` and ``pool`` in bytes."""
    return {name: one(Path(asked["folder"]), name, asked, parks=name == "parked") for name in asked["names"]}


def one(folder: Path, name: str, asked: dict[str, Any], *, parks: bool) -> dict[str, Any]:
    tiny.fresh()
    trainer = tiny.trainer(folder, {"name": name, "lean": True, "settings": {"max_steps": 3}, **asked["case"]}, [])
    engine = Engine(trainer, asked["pool"])
    trainer.use_vllm, trainer.vllm_importance_sampling_correction = True, False
    trainer._last_loaded_step, trainer.vllm_generation, trainer.args.park_weights = -1, engine, parks
    fraction = asked["limit"] / torch.cuda.get_device_properties(0).total_memory if asked.get("limit") else 1.0
    torch.cuda.set_per_process_memory_fraction(fraction)
    error = None
    try:
        trainer.train()
    except torch.OutOfMemoryError as caught:
        error = str(caught)
    torch.cuda.set_per_process_memory_fraction(1.0)
    weights = sum(p.nbytes for p in trainer.model.parameters())
    return {"error": error, "beside": engine.beside, "weights": weights, "parked": trainer._offload.parked_bytes,
            **tiny.outcome(trainer)}  # fmt: skip


if __name__ == "__main__":
    answer(main)
