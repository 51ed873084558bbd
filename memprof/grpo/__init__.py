"""Train with TRL's own GRPO and RLOO trainers and losses in a fraction of the memory.

:class:`LeanGRPOTrainer` takes the place of ``trl.GRPOTrainer``, :class:`LeanGRPOConfig` that of ``trl.GRPOConfig``;
:class:`LeanRLOOTrainer` and :class:`LeanRLOOConfig` those of RLOO.
Importing this package is cheap: TRL and torch are loaded on first use of either.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memprof.grpo.moved import keep_old_names

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
_INSTALLED_BY = {"torch", "transformers", "trl", "accelerate", "datasets"}

keep_old_names()


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'memprof.grpo' has no attribute {name!r}")
    from importlib import import_module

    try:
        home = import_module(_HOME[name])
    except ModuleNotFoundError as missing:
        package = (missing.name or "").partition(".")[0]
        if package not in _INSTALLED_BY:
            raise
        from memprof.errors import how_to_install

        command = how_to_install("trl")
        raise ModuleNotFoundError(f"memprof.grpo.{name} needs {package}: {command}", name=package) from missing
    return getattr(home, name)


def __dir__() -> list[str]:
    return sorted(__all__)
