"""``LeanRLOOTrainer``: TRL's ``RLOOTrainer`` with the same loss and gradients in a fraction of the memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from trl import RLOOConfig, RLOOTrainer

from memprof.grpo.config import LeanSettings
from memprof.grpo.step.schemes import LossTerms
from memprof.grpo.trainer import LeanTrainer


@dataclass
class LeanRLOOConfig(LeanSettings, RLOOConfig):
    """Arguments of :class:`LeanRLOOTrainer`: all of ``RLOOConfig``'s, and those of ``LeanSettings``."""

    # What GRPOConfig has and this loss has not.
    top_entropy_quantile: ClassVar[float] = 1.0
    cast_lm_head_to_fp32: ClassVar[bool] = False
    use_bias_correction_kl: ClassVar[bool] = False


class _Paired(RLOOTrainer):  # type: ignore[misc, unused-ignore]
    """Return completions and None from ``RLOOTrainer``'s generation: a pair, as from ``GRPOTrainer``'s."""

    def _generate_single_turn(self, *args: Any, **options: Any) -> tuple[Any, None]:
        return super()._generate_single_turn(*args, **options), None


class LeanRLOOTrainer(LeanTrainer, _Paired):  # type: ignore[misc, unused-ignore]
    """Drop-in for ``trl.RLOOTrainer``; ``args``: a ``LeanRLOOConfig`` or a plain ``RLOOConfig``."""

    _trained_as, _config = RLOOTrainer, LeanRLOOConfig
    _feature = "lean.rloo"

    # Each has its own: `memprof simulate --script` takes the place of a trainer's own constructor.
    if TYPE_CHECKING:
        __init__ = RLOOTrainer.__init__
    else:

        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, **named)

        __init__.__wrapped__ = RLOOTrainer.__init__  # whose signature it has

    def _generate_single_turn(self, *args: Any, **options: Any) -> Any:
        return super()._generate_single_turn(*args, **options)[0]

    def _loss_terms(self, **known: Any) -> LossTerms:
        return LossTerms(may_be_scaled_later=known.pop("is_wrapped"), **known)
