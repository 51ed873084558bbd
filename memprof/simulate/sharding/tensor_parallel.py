"""Divide a model's matrices over ranks by transformers' own tensor-parallel plan."""

from __future__ import annotations

from typing import Any

from memprof.compat import transformers as transformers_names
from memprof.errors import UsageError

__all__ = ["shard_tensors"]


def shard_tensors(model: Any, mesh: Any) -> None:
    """Divide a model's matrices over a mesh by transformers' plan for it; norms stay whole on every rank.

    Raises:
        UsageError: transformers has no plan for this model.
    """
    config = transformers_names.TP_CONFIG.get()(tp_size=mesh.size())
    try:
        plan, _, _ = transformers_names.TP_PLANS.of(model)(config)
    except ValueError as error:
        raise UsageError(f"--sharding tp: {str(error).splitlines()[0]}") from None
    transformers_names.TP_APPLY.get()(model, mesh, plan)
