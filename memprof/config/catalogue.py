"""Find configs of well-known models, shipped so that none need be downloaded to simulate them. No torch here."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from memprof.errors import InputError


@lru_cache(maxsize=1)
def catalogue() -> dict[str, dict[str, Any]]:
    """Return config values by hub id."""
    text = Path(__file__).with_name("catalogue.json").read_text(encoding="utf-8")
    data: dict[str, dict[str, Any]] = json.loads(text)
    return {name: _resolve(data, name) for name in data if not name.startswith("_")}


def _resolve(data: dict[str, Any], name: str) -> dict[str, Any]:
    """Complete an entry, which may say ``"like": other`` and what differs."""
    entry = dict(data[name])
    other = entry.pop("like", None)
    return {**_resolve(data, other), **entry} if other else entry


def find_config(model: str) -> dict[str, Any]:
    """Return a model's config, by a folder, a JSON file, or a hub id of the catalogue (letter case is ignored).
    InputError where nothing is known by that name; the message says how to give a config."""
    path = Path(model)
    if path.is_dir():
        path = path / "config.json"
    if path.is_file():
        return _read(path)
    known = catalogue()
    by_lower = {name.lower(): name for name in known}
    found = by_lower.get(model.lower()) or by_lower.get(_bare(model, by_lower))
    if found is None:
        raise InputError(_not_found(model, known))
    return dict(known[found])


# Weights that nothing trains as they are, by what is in their names; what they are; what to add to the base model's.
_NOT_TRAINED = (
    (re.compile(r"[-_.]?gguf|[-_.]q\d\w*\.gguf$", re.I), "GGUF weights, llama.cpp's format for inference"),
    (re.compile(r"[-_](?:unsloth[-_])?bnb[-_][48]bit", re.I), "weights that bitsandbytes has quantized already"),
    (re.compile(r"[-_](?:awq|gptq)\b", re.I), "weights quantized for inference"),
    (re.compile(r"^mlx-community/|[-_]mlx\b", re.I), "MLX weights, Apple's format"),
)
_ENDINGS = re.compile(
    r"[-_.](?:gguf|awq|gptq|mlx|unsloth|bnb|int[48]|[348]bit|i?q\d+(?:[-_][0-9a-z]+)*|f16|bf16)$", re.IGNORECASE
)


def _not_found(model: str, known: Mapping[str, dict[str, Any]]) -> str:
    """Say what to do about a model whose config is not known."""
    bare = model.split("/")[-1]
    kind = next((words for pattern, words in _NOT_TRAINED if pattern.search(model)), None)
    if kind is not None:
        base = bare
        while (shorter := _ENDINGS.sub("", base)) != base:
            base = shorter
        same = [name for name in known if name.split("/")[-1].lower() == base.lower()]
        instead = same[0] if same else "the model they were made from"
        return (
            f"{model}: {kind}. Give {instead} with --load-in-4bit --lora-r 16, which quantizes it while it is loaded."
        )
    if bare.endswith(".py"):
        return f"{model}: a script is no model. Simulate it with memprof simulate --script {model}."
    near = [n for n in known if bare.lower()[:6] in n.lower()][:3]
    hint = f" Similar names in the catalogue: {', '.join(near)}." if near else ""
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", model):
        return (
            f"{model}: not in the catalogue, and no folder or config.json of that name; give a hub id, or the path of "
            f"the model's config.json.{hint}"
        )
    return (
        f"{model}: not in the catalogue, and no folder or config.json of that name. Run hf download {model} "
        f"config.json --local-dir {bare} (for a gated model after hf auth login), then give --model {bare}.{hint}"
    )


def _bare(model: str, by_lower: dict[str, str]) -> str:
    """Complete a name without its organisation, where that is unambiguous."""
    found = [name for name in by_lower if name.split("/")[-1] == model.lower()]
    return found[0] if len(found) == 1 else ""


def _read(path: Path) -> dict[str, Any]:
    if path.suffix.lower() in (".gguf", ".py"):
        raise InputError(_not_found(str(path), catalogue()))
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: not a model's config.json ({str(error)[:80]}).") from None
    if not isinstance(values, dict) or not values.get("model_type"):
        raise InputError(f"{path}: not a model's config.json (no model_type in it).")
    return values
