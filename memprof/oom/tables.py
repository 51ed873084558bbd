"""Read the knowledge files: ``memprof/oom/knowledge/*.toml``."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_FOLDER = Path(__file__).parent / "knowledge"

#: Files of messages. Of two that match the same words, the one in the earlier file (or higher up in it) is taken.
MESSAGE_FILES = ("engines", "libraries", "accelerators", "host")


@cache
def table(name: str) -> dict[str, Any]:
    """Return one file as it stands."""
    read: dict[str, Any] = tomllib.loads((_FOLDER / f"{name}.toml").read_text(encoding="utf-8"))
    return read
