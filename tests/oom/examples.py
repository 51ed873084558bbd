"""The examples of the knowledge files: a text for each message, as its program prints it, and what is read from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from memprof.oom.knowledge_files import MESSAGE_FILES, table


class Example(NamedTuple):
    text: str
    facts: Mapping[str, Any]


EXAMPLES = {
    entry["id"]: Example(entry["example"], entry.get("expect", {}))
    for name in MESSAGE_FILES
    for entry in table(name)["message"]
}
NOT_MEMORY_EXAMPLES: dict[str, str] = {entry["id"]: entry["example"] for entry in table("elsewhere")["message"]}
