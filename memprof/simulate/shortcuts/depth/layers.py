"""Choose shallow models from which a deep one follows: those whose layers repeat the deep model's in the same order."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch

from memprof.simulate.trainer.models import maker_of

#: The three shallow models together have at most this share of the deep model's layers, or deriving does not pay:
#: each of them costs as much as some six layers before its first layer.
WORTH = 0.375
_LONGEST_PERIOD = 8
#: A layer's number, by which it differs from all others.
_NUMBERS = {"layer_idx", "layer_id", "layer_index", "layer_number", "training"}
_PLAIN = (bool, int, float, str, type(None))


class Depths(NamedTuple):
    """Three depths to simulate, ``period`` apart, and how many periods the deep model has more than the first."""

    shallow: tuple[int, int, int]
    period: int
    repeats: int


_known: dict[tuple[str, float], Depths | None] = {}


def depths_of(config: Any) -> Depths | None:
    """Choose the depths to simulate in place of a model's; None where its layers do not repeat, or it is not deep."""
    key = (str(config.to_json_string(use_diff=False)), WORTH)
    if key not in _known:
        _known[key] = _chosen(config, WORTH)
    return _known[key]


def _chosen(config: Any, worth: float) -> Depths | None:
    total = layers_of(config)
    if total is None or hasattr(config, "vision_config"):
        return None
    kinds = _kinds(config, total)
    for period in range(1, min(_LONGEST_PERIOD, total // 4) + 1) if kinds is not None else ():
        assert kinds is not None
        first = _first_repeated(kinds, period)
        start = max(2, first + 1)
        start += (total - start) % period
        shallow = (start, start + period, start + 2 * period)
        if sum(shallow) > worth * total:
            continue
        if _kinds(with_layers(config, shallow[2]), shallow[2]) == kinds[: shallow[2]]:
            return Depths(shallow, period, (total - start) // period)
    return None


def layers_of(config: Any) -> int | None:
    """Return a config's number of layers; None where it has none."""
    found = getattr(config.get_text_config(decoder=True), "num_hidden_layers", None)
    return found if isinstance(found, int) else None


def with_layers(config: Any, layers: int) -> Any:
    """Return a copy of a config with fewer layers, the first ones."""
    made = copy.deepcopy(config)
    text = made.get_text_config(decoder=True)
    total = text.num_hidden_layers
    for name, value in list(vars(text).items()):
        if isinstance(value, list) and len(value) == total:
            setattr(text, name, value[:layers])
    text.num_hidden_layers = layers
    return made


def _first_repeated(kinds: Sequence[Hashable], period: int) -> int:
    """Return the first layer from which on every layer is of the kind of the layer one ``period`` later."""
    first = len(kinds) - period
    while first > 0 and kinds[first - 1] == kinds[first - 1 + period]:
        first -= 1
    return first


def _kinds(config: Any, layers: int) -> list[Hashable] | None:
    """Describe each decoder layer by its modules, their plain attributes and parameters; None without such layers."""
    with torch.device("meta"):
        model = maker_of(config)(copy.deepcopy(config), dtype=torch.bfloat16)
    lists = [m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == layers]
    return [_kind(layer) for layer in lists[0]] if len(lists) == 1 else None


def _kind(layer: torch.nn.Module) -> Hashable:
    return tuple(
        (
            name,
            type(module),
            tuple((k, v) for k, v in vars(module).items() if k not in _NUMBERS and isinstance(v, _PLAIN)),
            tuple((k, tuple(p.shape), p.dtype) for k, p in module.named_parameters(recurse=False)),
        )
        for name, module in layer.named_modules()
    )
