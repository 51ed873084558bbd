"""Choose checkpointing and MLP tiles for a model and a device as the settings say, and apply both."""

from __future__ import annotations

from typing import Any

import torch

from memprof.errors import UsageError
from memprof.grpo import device as machine
from memprof.grpo.once_log import OnceLog
from memprof.grpo.techniques.checkpointing import apply_checkpointing
from memprof.grpo.techniques.layers import Undo, decoder_layers, mlp_of, text_config
from memprof.grpo.techniques.tiled_mlp import apply_tiled_mlp, why_not_tiled

#: Bytes of layer inputs, for one completion of full length, from which on they go to host memory.
OFFLOAD_FROM_BYTES = 2 << 30
#: Large enough that each of a tile's products keeps a GPU busy.
TILE_TOKENS = 4096
_LEAST_TILE = 256


def checkpointing_of(args: Any, model: Any, device: torch.device) -> str:
    """Choose the kind of checkpointing for ``args.checkpointing``: ``auto`` is TRL's own, on CUDA offloaded if long."""
    if args.checkpointing != "auto" or not args.gradient_checkpointing or machine.device_kind(device) != "cuda":
        return str(args.checkpointing)
    config, tokens = text_config(model), args.max_completion_length or 0
    boundary = config.num_hidden_layers * tokens * config.hidden_size * model.dtype.itemsize
    long = boundary >= OFFLOAD_FROM_BYTES
    return "offloaded" if long and _has_layers(model) else "auto"


def tile_of(args: Any, model: Any) -> int | None:
    """Choose the tokens of an MLP's tile for ``args.tiled_mlp``; 0 there is off.

    None tiles what is longer than :data:`TILE_TOKENS` under ``checkpointing="auto"``, where layers are checkpointed.
    """
    if args.tiled_mlp is not None:
        return int(args.tiled_mlp) or None
    recomputed = args.checkpointing == "auto" and args.gradient_checkpointing
    longer = (args.max_completion_length or 0) > TILE_TOKENS
    return TILE_TOKENS if recomputed and longer and _can_tile(model) else None


def _has_layers(model: Any) -> bool:
    try:
        return bool(decoder_layers(model))
    except UsageError:  # Mamba, LFM2: transformers' own checkpointing knows their layers
        return False


def _can_tile(model: Any) -> bool:
    try:
        return all(why_not_tiled(mlp_of(layer)) is None for layer in decoder_layers(model))
    except UsageError:  # OPT, Mamba, layers of several kinds: there is no such network, or none is found
        return False


class Techniques:
    """Checkpointing and tiles of one ``model``, the causal LM without wrappers, on ``device``; ``log`` is told what is
    chosen.

    ``settings``, the trainer's arguments, are read anew by each :meth:`apply`. ``checkpointing`` is the kind that is
    applied, ``auto`` for TRL's own; ``tile`` the tokens that go through an MLP together, None where it is not tiled.
    """

    def __init__(self, settings: Any, model: Any, device: torch.device, log: OnceLog) -> None:
        self._settings, self._model, self._device, self._log = settings, model, device, log
        self._undo: list[Undo] = []
        self._lighter: tuple[str, int | None] | None = None  # than the settings say
        self.checkpointing = "auto"
        self.tile: int | None = None

    def reduce_memory(self, tokens: int, *, draws: bool) -> str | None:
        """Checkpoint the layers harder, or run their MLPs in smaller tiles; return what, or None for nothing left.

        The gradient stays the same but for rounding: a model that ``draws`` has no tiles, whose dropout is another. A
        tile is smaller than the ``tokens`` of what has no room.
        """
        own = getattr(self._model, "is_gradient_checkpointing", False)
        kinds = () if self.checkpointing == "offloaded" or not _has_layers(self._model) else ("full", "offloaded")
        recomputed = self.checkpointing == "full" or (self.checkpointing == "auto" and own)
        for kind in kinds[recomputed:]:
            self._lighter = kind, self.tile
            self.apply()
            return f"checkpointing={kind!r}"
        tile = (self.tile or 2 * TILE_TOKENS) // 2
        while tile >= max(1, tokens):
            tile //= 2
        if draws or tile < _LEAST_TILE or not _can_tile(self._model):
            return None
        self._lighter = self.checkpointing, tile
        self.apply()
        return f"tiled_mlp={tile}"

    def apply(self) -> None:
        """Apply what the settings say now, in place of what was applied before."""
        while self._undo:
            self._undo.pop()()
        said = checkpointing_of(self._settings, self._model, self._device), tile_of(self._settings, self._model)
        self.checkpointing, self.tile = self._lighter or said
        if self.checkpointing != "auto":
            self._undo.append(apply_checkpointing(self._model, self.checkpointing, device=self._device).remove)
            self._log.say(f"checkpointing: {self.checkpointing}")
        if self.tile is not None:
            self._undo.append(apply_tiled_mlp(self._model, self.tile))
            self._log.say(f"MLPs in tiles of {self.tile} tokens")
