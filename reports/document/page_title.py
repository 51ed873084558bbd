"""Title a page, of one process or of a run's ranks, and say below the title what was recorded, where and how."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any

from memprof.reports.document.text import HISTORY_WORDS, KIND_WORDS, plain, sentence_list, thousands

from memprof.units import gib
from memprof.vocabulary import EMULATED

_MODEL_KEYS = ("model", "model_name", "model_name_or_path", "_name_or_path", "name_or_path")


def base_name(path: object) -> str:
    """Return a file's name, whichever way its path is written."""
    text = str(path)
    return PureWindowsPath(text).name if "\\" in text else PurePosixPath(text).name


def title_of(report: Mapping[str, Any]) -> str:
    """Name a report's run: by its model and how many ranks it has, else by its file or folder."""
    source = report["source"]
    config = source["config"] or {}
    model = next((config[k] for k in _MODEL_KEYS if isinstance(config.get(k), str) and config[k]), None)
    if report.get("across_ranks") and report.get("ranks"):
        return _run_title(report, model)
    if model:
        return plain(base_name(model.rstrip("/")) or model)
    return plain(base_name(source["files"][0])) if source["files"] else "Memory report"


def _run_title(report: Mapping[str, Any], model: str | None) -> str:
    """Name a run of several ranks: by its model, else by the folder that all its files are in."""
    ranks, world = len(report["ranks"]), report["across_ranks"]["world_size"]
    count = f"{ranks} of {world} ranks" if world and world != ranks else f"{ranks} rank{'' if ranks == 1 else 's'}"
    folders = {str(PurePosixPath(rank["file"]).parent) for rank in report["ranks"] if rank.get("file")}
    folder = PurePosixPath(folders.pop()) if len(folders) == 1 else PurePosixPath()
    # The callback's own folder says nothing; the trainer's output folder is above it.
    inner = folder.parent if folder.name.startswith("_memprof") else folder
    name = base_name(model.rstrip("/")) if model else inner.name
    return plain(f"{name}: {count}" if name else f"Run of {count}")


def subtitle_of(report: Mapping[str, Any]) -> tuple[str, ...]:
    """Say what was recorded, where and how."""
    source = report["source"]
    words = [KIND_WORDS.get(source["kind"], source["kind"])]
    if (source.get("device_name") or "").endswith(EMULATED):
        words[0] += " on an emulated device: memory is real, kernels and times are not"
    device = source.get("device_name") or f"device {source['device']}"
    total = source["device_total_bytes"]
    words.append(f"{device}, {gib(total)} GiB" if total and report["peak"]["reserved_bytes"] is not None else device)
    others = [str(d) for d in source.get("devices") or [] if d != source["device"]]
    if others:
        own = f"device {source['device']}; " if source.get("device_name") else ""
        words[-1] += f" ({own}the file also holds {sentence_list(others)}, see --device)"
    if source["torch"]:
        words.append(f"torch {source['torch']}")
    if (source["world_size"] or 1) > 1:
        shown = " shown in full" if report.get("across_ranks") else ""
        words.append(f"rank {source['rank']} of {source['world_size']}{shown}")
    words.append(f"{thousands(source['events'])} event{'' if source['events'] == 1 else 's'}")
    steps = sorted({p["step"] for p in report["phases"] if p["step"] is not None})
    if steps:
        words.append(f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}")
    if source["history"] != "complete":
        words.append(HISTORY_WORDS.get(source["history"], source["history"]))
    return tuple(plain(w) for w in words)
