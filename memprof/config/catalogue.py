"""Find configs of well-known models, shipped so that none need be downloaded to simulate them. No torch here."""

from __future__ import annotations

import json
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
        near = [n for n in known if model.split("/")[-1].lower()[:6] in n.lower()][:3]
        hint = f" Near it: {', '.join(near)}." if near else ""
        raise InputError(
            f"{model}: not in the catalogue, and no folder or config.json of that name; "
            f"download the model's config.json and give its path.{hint}"
        )
    return dict(known[found])


def _bare(model: str, by_lower: dict[str, str]) -> str:
    """Complete a name without its organisation, where that is unambiguous."""
    found = [name for name in by_lower if name.split("/")[-1] == model.lower()]
    return found[0] if len(found) == 1 else ""


def _read(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: not a model's config.json ({str(error)[:80]}).") from None
    if not isinstance(values, dict) or not values.get("model_type"):
        raise InputError(f"{path}: not a model's config.json (no model_type in it).")
    return values
