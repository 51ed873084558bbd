"""Run by torchrun in two gloo processes: TRL's SFT trainer with a mixture of experts, sharded by accelerate's FSDP2.

``moe_two_ranks FOLDER`` trains the model of ``FOLDER/config.json`` for a step, and writes ``rank-N.json``: the bytes of
every buffer that FSDP2 stages a collective in, in order, and for each layer which parameters were whole while its
experts ran.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from tests.forked import write_and_leave
from tests.simulate.sharding.adapter_two_ranks import POLICY, _as_a_gpu

ROWS, TOKENS = 2, 32


def main(folder: Path) -> None:
    from memprof.compat import torch_sharding as sharding_names

    os.environ.update(POLICY, FSDP_AUTO_WRAP_POLICY="TRANSFORMER_BASED_WRAP")
    _as_a_gpu()
    owner, name = sharding_names.ALLOCATE.place()
    allocate = getattr(owner, name)
    sizes: list[int] = []

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        made = allocate(self, *args, **kwargs)
        if sharding_names.REDUCE_INPUT.name not in sys._getframe(1).f_locals:  # which becomes the gradients
            sizes.append(made.nbytes)
        return made

    setattr(owner, name, counted)
    trainer = _trainer(folder)
    whole = _watched(trainer.model)
    trainer.train()
    write_and_leave(folder, {"sizes": sizes, "whole": whole})


def _trainer(folder: Path) -> Any:
    import torch
    from datasets import Dataset
    from transformers import AutoConfig, AutoModelForCausalLM
    from trl import SFTConfig, SFTTrainer

    from memprof.simulate.trainer.build import make_tokenizer

    torch.manual_seed(0)
    arguments = SFTConfig(
        output_dir=str(folder / "out"), max_steps=1, per_device_train_batch_size=ROWS, use_cpu=True, bf16=False,
        report_to="none", save_strategy="no", logging_strategy="no", disable_tqdm=True, optim="adamw_torch",
        gradient_checkpointing=False, max_length=None,
    )  # fmt: skip
    return SFTTrainer(
        model=AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16),
        args=arguments,
        train_dataset=Dataset.from_dict({"input_ids": [[0] * (TOKENS - 1) + [2]] * 2 * ROWS}),
        processing_class=make_tokenizer(),
    )


def _watched(model: Any) -> dict[str, list[str]]:
    """Note, in the midst of each layer's forward, the parameters of all layers that are whole."""
    from torch.distributed.tensor import DTensor

    seen: dict[str, list[str]] = {}

    def note(index: int) -> Any:
        def noted(module: Any, args: Any) -> None:
            found = [n for n, p in model.model.layers.named_parameters() if not isinstance(p, DTensor)]
            seen.setdefault(str(index), found)

        return noted

    for index, layer in enumerate(model.model.layers):
        layer.mlp.register_forward_pre_hook(note(index))
    return seen


if __name__ == "__main__":
    main(Path(sys.argv[1]))
