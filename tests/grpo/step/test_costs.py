"""What a micro-batch costs beside TRL's: operators, gradients of the head, conversions of the head."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("trl")

from tests.grpo.trainers import VOCABULARY, batch, build, run_step, tiny_llama, with_policies

pytestmark = pytest.mark.trl

_VIEWS = ("aten::view", "aten::t", "aten::transpose", "aten::detach", "aten::slice", "aten::expand", "aten::alias")


class Operators(TorchDispatchMode):
    """Count operators, backward's too; ``seen`` is given each operator's results."""

    def __init__(self) -> None:
        super().__init__()
        self.counted: Counter[str] = Counter()
        self.heads: set[int] = set()
        self.converted = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = str(func.name()).partition(".")[0]
        if name not in _VIEWS:
            self.counted[name] += 1
        for found in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(found, torch.Tensor) and tuple(found.shape) == (VOCABULARY, 32):
                self.converted += name == "aten::_to_copy" and found.dtype == torch.bfloat16
                if name in ("aten::empty", "aten::zeros", "aten::new_zeros"):
                    self.heads.add(found.data_ptr())
        return out


def counted(trainer: Any, micro_batches: list[Any]) -> Operators:
    trainer.model.train()
    run_step(trainer, micro_batches[0])
    with Operators() as operators:
        for inputs in micro_batches:
            run_step(trainer, inputs)
    return operators


def rows_of_their_own(inputs: Any) -> list[Any]:
    """The same rows as micro-batches of one."""
    rows = inputs["prompt_ids"].shape[0]
    return [{k: v[i : i + 1] if v.dim() else v for k, v in inputs.items()} for i in range(rows)]


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize(
    ("off_policy", "beta"), [(False, 0.0), (True, 0.04)], ids=["known_beforehand", "by_log_probability"]
)
@pytest.mark.parametrize("one_by_one", [False, True])
def test_operators_of_a_micro_batch_of_eight_rows(
    one_by_one: bool, off_policy: bool, beta: float, lora: bool, tmp_path: Path
) -> None:
    """As many as TRL's for one micro-batch in one piece; in eight pieces, as TRL's for eight micro-batches."""
    model = tiny_llama(num_hidden_layers=8)
    settings: dict[str, Any] = {"lora": lora, "gradient_checkpointing": True}
    theirs = build("trl", model, tmp_path, **settings)
    ours = build("lean", model, tmp_path, **settings, max_tokens_per_piece=1 if one_by_one else 1000)
    inputs = with_policies(theirs, batch(8, off_policy=off_policy), beta=beta)
    theirs.beta = ours.beta = beta
    for trainer in (theirs, ours):
        trainer.model.gradient_checkpointing_enable({"use_reentrant": False})
    trls = counted(theirs, rows_of_their_own(inputs) if one_by_one else [inputs])
    lean = counted(ours, [inputs])
    assert lean.counted.total() <= 1.1 * trls.counted.total(), (lean.counted - trls.counted).most_common(12)


def test_a_piece_has_one_gradient_of_the_head(tmp_path: Path) -> None:
    ours = build("lean", tiny_llama(), tmp_path, max_tokens_per_piece=1000, loss_chunk_tokens=7)
    found = counted(ours, [with_policies(ours, batch(8), beta=0.0)])
    assert len(found.heads) <= 2


def test_the_head_is_converted_once_for_a_piece(tmp_path: Path) -> None:
    ours = build("lean", tiny_llama(), tmp_path, bf16=True, max_tokens_per_piece=1000, loss_chunk_tokens=7)
    found = counted(ours, [with_policies(ours, batch(8), beta=0.0)])
    assert found.converted == 1
