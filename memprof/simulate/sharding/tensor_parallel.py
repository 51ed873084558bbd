"""Divide a model's matrices over ranks by transformers' own tensor-parallel plan."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from memprof.compat import transformers as transformers_names
from memprof.errors import UsageError

_QUERIES, _KEYS = ("q_proj",), ("k_proj", "v_proj")


def shard_tensors(model: Any, mesh: Any) -> None:
    """Divide a model's matrices over a mesh by transformers' plan for it; norms stay whole on every rank.

    Raises:
        UsageError: transformers has no plan for this model, or the plan cuts through attention heads.
    """
    config = transformers_names.TP_CONFIG.get()(tp_size=mesh.size())
    with _untied(model):
        try:
            plan, _, _ = transformers_names.TP_PLANS.of(model)(config)
        except ValueError as error:
            raise UsageError(f"--sharding tp: {str(error).splitlines()[0]}") from None
        _check_heads(model, plan, mesh.size())
        transformers_names.TP_APPLY.get()(model, mesh, plan)


@contextmanager
def _untied(model: Any) -> Iterator[None]:
    """Give the head a weight of its own while the model is divided: transformers ties a divided model afterwards."""
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    tied = head is not None and head.weight is embeddings.weight
    if tied:
        head.weight = nn.Parameter(head.weight.detach())
    yield
    if tied:
        model.tie_weights()


def _check_heads(model: Any, plan: Mapping[str, str], ranks: int) -> None:
    """Refuse a plan that leaves a rank with a part of an attention head, which no attention code can use.

    Raises:
        UsageError: it names the heads, and on how many GPUs they can be.
    """
    queries, keys = (_heads(model, plan, names) for names in (_QUERIES, _KEYS))
    if all(count % ranks == 0 for count in queries | keys):
        return
    common = math.gcd(*queries, *keys)
    fitting = [str(count) for count in range(2, common + 1) if common % count == 0]
    instead = f"use --gpus {' or '.join(fitting)}" if fitting else "use --sharding fsdp2"
    told = " and ".join(
        f"{', '.join(map(str, sorted(counts)))} {what}"
        for counts, what in ((queries, "query heads"), (keys, "key and value heads"))
        if counts
    )
    raise UsageError(
        f"--sharding tp gives each GPU whole attention heads: {told} cannot be divided by {ranks}; {instead}."
    )


def _heads(model: Any, plan: Mapping[str, str], projections: tuple[str, ...]) -> set[int]:
    """Count the heads that the plan divides, in all layers."""
    found = set()
    for name, style in plan.items():
        attention, _, projection = name.rpartition(".")
        width = getattr(model.get_submodule(attention), "head_dim", None) if projection in projections else None
        if style == "colwise" and isinstance(width, int):
            found.add(model.get_submodule(name).out_features // width)
    return found
