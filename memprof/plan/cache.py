"""Keep results of simulations on disk, by a hash of everything they depend on."""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from memprof import files
from memprof._version import __version__
from memprof.files import cache_is_off, write_whole

_SCHEMA = 5  # raise this when a change of the simulator changes its figures
_PACKAGES = ("torch", "transformers", "trl", "peft", "accelerate")


def cache_folder() -> Path:
    """Return where results are kept: ``$MEMPROF_CACHE``, else the user's cache folder."""
    given = os.environ.get("MEMPROF_CACHE")
    return Path(given) if given and not cache_is_off() else files.cache_folder() / "plan"


def key_of(
    settings: dict[str, Any],
    model_config: dict[str, Any],
    gpu: str | dict[str, Any] | None,
    sizes: dict[str, Any] | None = None,
) -> str:
    """Name one simulation by a hash of its settings, the model's config, and the versions that execute it.

    ``sizes``: what its run is resized to (:func:`memprof.plan.sizes.choices`).
    """
    parts = {
        "schema": _SCHEMA,
        "memprof": __version__,
        "versions": {name: _version(name) for name in _PACKAGES},
        "settings": settings,
        "model": model_config,
        "gpu": gpu,
        **({} if sizes is None else {"sizes": sizes}),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def load(key: str) -> dict[str, Any] | None:
    """Return a stored result, or None; a file that cannot be used is no result."""
    if cache_is_off():
        return None
    try:
        data = json.loads((cache_folder() / f"{key}.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return data if isinstance(data, dict) else None


def store(key: str, row: dict[str, Any]) -> None:
    """Store a result; errors of the disk are ignored, since the next plan then only takes longer."""
    if cache_is_off():
        return
    folder = cache_folder()
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / f"{key}.json", json.dumps(row))


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
