"""Train with TRL's own GRPO and RLOO trainers and losses in a fraction of the memory.

:class:`LeanGRPOTrainer` takes the place of ``trl.GRPOTrainer``, :class:`LeanGRPOConfig` that of ``trl.GRPOConfig``;
:class:`LeanRLOOTrainer` and :class:`LeanRLOOConfig` those of RLOO.
Importing this package is cheap: TRL and torch are loaded on first use of either.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memprof.grpo.config import LeanGRPOConfig
    from memprof.grpo.rloo import LeanRLOOConfig, LeanRLOOTrainer
    from memprof.grpo.trainer import LeanGRPOTrainer

__all__ = ["LeanGRPOConfig", "LeanGRPOTrainer", "LeanRLOOConfig", "LeanRLOOTrainer"]

_HOME = {
    "LeanGRPOConfig": "memprof.grpo.config",
    "LeanGRPOTrainer": "memprof.grpo.trainer",
    "LeanRLOOConfig": "memprof.grpo.rloo",
    "LeanRLOOTrainer": "memprof.grpo.rloo",
}
_EXTRA = dict.fromkeys(("torch", "transformers", "trl", "accelerate", "datasets"), "trl")


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'memprof.grpo' has no attribute {name!r}")
    from memprof.errors import import_for

    return getattr(import_for(f"memprof.grpo.{name}", _HOME[name], _EXTRA), name)


def __dir__() -> list[str]:
    return sorted(__all__)
