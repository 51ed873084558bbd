"""Keep results of simulations on disk, by a hash of everything they depend on."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec

from memprof import files
from memprof._version import __version__
from memprof.config.gpus import Gpu
from memprof.files import cache_is_off, write_whole
from memprof.plan.simulations import SimulatedRow, SizeChoices
from memprof.report.base import Settings

_SCHEMA = 5  # raise this when a change of the simulator changes its figures
_PACKAGES = ("torch", "transformers", "trl", "peft", "accelerate")


def cache_folder() -> Path:
    """Return where results are kept: ``$MEMPROF_CACHE``, else the user's cache folder."""
    given = os.environ.get("MEMPROF_CACHE")
    return Path(given) if given and not cache_is_off() else files.cache_folder() / "plan"


def key_of(
    settings: Settings,
    model_config: Mapping[str, object],
    gpu: str | Gpu | None,
    sizes: SizeChoices | None = None,
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
        "gpu": msgspec.to_builtins(gpu),
        **({} if sizes is None else {"sizes": msgspec.to_builtins(sizes)}),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def load(key: str) -> SimulatedRow | None:
    """Return a stored result, or None; a file that cannot be used is no result."""
    if cache_is_off():
        return None
    try:
        return msgspec.json.decode((cache_folder() / f"{key}.json").read_bytes(), type=SimulatedRow)
    except (OSError, ValueError):
        return None


def store(key: str, row: SimulatedRow) -> None:
    """Store a result; errors of the disk are ignored, since the next plan then only takes longer."""
    if cache_is_off():
        return
    folder = cache_folder()
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / f"{key}.json", msgspec.json.encode(row).decode())


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
