"""Run by torchrun in two gloo processes: TRL's SFT trainer with a LoRA, sharded by accelerate's FSDP2.

``adapter_two_ranks FOLDER POLICY`` writes ``rank-N.json``: for each decoder layer, which layers were whole while its
own forward ran. accelerate shards on accelerators only, so the processes are told to be a GPU's; what is sharded lies
on the CPU.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from tests.forked import write_and_leave

POLICY = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
    "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
}  # as TRL's accelerate_configs/fsdp2.yaml sets them


def main(folder: Path, policy: str) -> None:
    os.environ.update(POLICY, FSDP_AUTO_WRAP_POLICY=policy)
    _as_a_gpu()
    trainer = _trainer(folder)
    seen = _watched(trainer.model)
    trainer.train()
    write_and_leave(folder, seen)


def _as_a_gpu() -> None:
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    begin = PartialState.__init__

    def begun(self: Any, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        if self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = DistributedType.MULTI_GPU

    PartialState.__init__ = begun


def _trainer(folder: Path) -> Any:
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import LlamaConfig, LlamaForCausalLM
    from trl import SFTConfig, SFTTrainer

    from memprof.simulate.trainer.build import make_tokenizer
    from tests.simulate.conftest import TINY

    torch.manual_seed(0)
    values = {name: value for name, value in TINY.items() if name != "model_type"}
    model = LlamaForCausalLM(LlamaConfig(**values))
    arguments = SFTConfig(
        output_dir=str(folder / "out"), max_steps=1, per_device_train_batch_size=1, use_cpu=True, bf16=False,
        report_to="none", save_strategy="no", logging_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    return SFTTrainer(
        model=model,
        args=arguments,
        train_dataset=Dataset.from_dict({"input_ids": [[0, 0, 0, 0, 2]] * 4}),
        processing_class=make_tokenizer(),
        peft_config=LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"),
    )


def _watched(model: Any) -> dict[str, list[int]]:
    """Note, in the midst of each layer's forward, the layers whose parameters are whole."""
    from torch.distributed.tensor import DTensor

    layers = model.get_base_model().model.layers
    seen: dict[str, list[int]] = {}

    def note(index: int) -> Any:
        def noted(module: Any, args: Any) -> None:
            whole = [i for i, layer in enumerate(layers) if not any(isinstance(p, DTensor) for p in layer.parameters())]
            seen.setdefault(str(index), whole)

        return noted

    for index, layer in enumerate(layers):
        layer.mlp.register_forward_pre_hook(note(index))
    return seen


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
