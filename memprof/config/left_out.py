"""Name settings of a run that change its memory and that no simulation executes, and say what each usually changes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["LEFT_OUT", "left_out_of"]

#: By their names in ``TrainingArguments`` and the configs of TRL's trainers.
LEFT_OUT = {
    "torch_compile": "torch.compile is not simulated: it fuses operations, which keep fewer results for backward, and "
    "with CUDA graphs it holds a memory pool of its own",
    "use_liger_kernel": "Liger's kernels are not simulated here: they keep fewer results for backward than the model's "
    "own layers do",
    "packing": "packing is not simulated: every row is taken to be full, as packed rows nearly are",
    "padding_free": "padding_free is not simulated: all rows of a batch are taken to be of one length",
    "activation_offloading": "activation_offloading is not simulated: activations stay on the device, which holds more",
    "load_in_8bit": "8-bit weights are not simulated: weights have the dtype given, which holds more",
    "neftune_noise_alpha": "NEFTune's noise is not simulated: one more tensor as large as the embedded batch",
}


def left_out_of(given: Mapping[str, Any]) -> tuple[str, ...]:
    """List the names among ``given`` that are switched on and are in :data:`LEFT_OUT`."""
    return tuple(name for name in LEFT_OUT if given.get(name))
