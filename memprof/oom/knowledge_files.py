"""Read the knowledge files: ``memprof/oom/knowledge/*.toml``."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from memprof.files import read_toml

_FOLDER = Path(__file__).parent / "knowledge"

#: Files of messages. Of two that match the same words, the one in the earlier file (or higher up in it) is taken.
MESSAGE_FILES = ("engines", "libraries", "accelerators", "host")


@cache
def table(name: str) -> dict[str, Any]:
    """Return one file as it stands."""
    return read_toml(_FOLDER / f"{name}.toml")
