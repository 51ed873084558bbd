"""Two ranks train the tiny model, watched and unwatched: what ``tests/integrations/test_ranks.py`` starts.

torchrun --nproc_per_node 2 tests/integrations/ranks_run.py MODEL FOLDER KIND...
"""

from __future__ import annotations

import faulthandler
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from memprof import MemProfCallback
from tests.integrations.runs import QUESTIONS, grpo, length_reward, outcome, tokenizer


def fsdp2(model: Path, out: Path, callbacks: list[Any]) -> Any:
    """The trainer of ``runs.grpo`` on a model that transformers shards over both ranks while it loads."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, DistributedConfig, PrinterCallback
    from trl import GRPOConfig, GRPOTrainer

    sharded = AutoModelForCausalLM.from_pretrained(
        model, distributed_config=DistributedConfig(fsdp_size=2), dtype=torch.float32
    )
    settings = {
        "max_steps": 2, "per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 12,
        "beta": 0.0, "learning_rate": 1e-2, "gradient_checkpointing": False, "bf16": False, "use_cpu": True,
        "dataloader_pin_memory": False, "seed": 3, "logging_steps": 1, "save_strategy": "no", "report_to": "none",
        "disable_tqdm": True,
    }  # fmt: skip
    trainer = GRPOTrainer(
        model=sharded,
        reward_funcs=[length_reward],
        args=GRPOConfig(output_dir=str(out), **settings),
        train_dataset=Dataset.from_list([{"prompt": q} for q in QUESTIONS]),
        processing_class=tokenizer(),
        callbacks=callbacks,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def ddp(model: Path, out: Path, callbacks: list[Any]) -> Any:
    return grpo(model, out, callbacks)


def digest(trainer: Any) -> dict[str, str]:
    """Logs and this rank's parameters, to the bit."""
    if not any(hasattr(p, "_local_tensor") for p in trainer.model.parameters()):
        return dict(outcome(trainer))
    logs = [{k: v for k, v in row.items() if k in ("loss", "grad_norm", "reward")} for row in trainer.state.log_history]
    sums = hashlib.sha256()
    for _, parameter in sorted(trainer.model.named_parameters()):
        local: torch.Tensor = parameter._local_tensor
        sums.update(local.detach().contiguous().numpy().tobytes())
    return {"logs": repr(logs), "parameters": sums.hexdigest()}


def main() -> None:
    faulthandler.dump_traceback_later(140, exit=True)
    torch.set_num_threads(1)
    model, folder, kinds = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
    for kind in kinds:
        make = {"ddp": ddp, "fsdp2": fsdp2}[kind]
        found: dict[str, Any] = {}
        for name in ("alone", "watched"):
            trainer = make(model, folder / kind, [MemProfCallback()] if name == "watched" else [])
            trainer.train()
            found[name] = digest(trainer)
        found["shapes"] = [[list(p.shape), p.requires_grad] for p in trainer.model.parameters()]
        found["rewards"] = [r["reward_std"] for r in trainer.state.log_history if "reward_std" in r]
        (folder / f"{kind}.rank-{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
