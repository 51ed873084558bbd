"""Remove paths, hosts, names, command lines and tokens, so that a report can be shared.

Plain data (a report, an explanation) is copied and the copy cleaned. A snapshot is cleaned in place before it is
written. Figures, categories, module names, functions and line numbers stay, because a report is about them.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import re
import socket
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any

from memprof.frame_paths import own_folders

__all__ = ["HIDDEN", "redact", "redact_snapshot", "redact_text", "short_path"]

HIDDEN = "<redacted>"

# Settings whose value is hidden whatever it looks like: secrets, people and places.
_PRIVATE_KEY = re.compile(
    r"(?i)(?:^|[_.-])(?:token|secret|password|passwd|api_?key|access_?key|private_?key|credentials?|auth(?:orization)?|cookie"
    r"|host(?:name)?|user(?:name)?|login|e?mail|entity|organi[sz]ation|argv|cmd(?:line)?|command(?:_?line)?|cwd|env(?:iron)?"
    r"|master_addr|ip(?:_?address)?)(?:$|[_.-])"
)
# Settings named after tokens of text, which are no secrets.
_INNOCENT_KEY = re.compile(
    r"(?i)(?:eos|bos|pad|unk|sep|cls|mask|special|image|num|max|min|completion|prompt|truncated|mask_truncated)_tokens?(?:_id|_ids)?"
    r"|(?:eos|bos|pad|unk|sep|cls|mask)_token|tokens_per|include_num_input_tokens|user_metadata|hub_strategy"
)
_SECRETS = re.compile(
    r"\b(?:hf|api_org)_[A-Za-z0-9]{16,}\b"
    r"|\b(?:sk|pk|rk)-[A-Za-z0-9_-]{16,}\b"
    r"|\bgh[pousr]_[A-Za-z0-9]{20,}\b|\bgithub_pat_[A-Za-z0-9_]{20,}\b|\bglpat-[A-Za-z0-9_-]{16,}\b"
    r"|\b(?:AKIA|ASIA)[A-Z0-9]{16}\b|\bAIza[A-Za-z0-9_-]{30,}"
    r"|\bxox[abprs]-[A-Za-z0-9-]{10,}|\bey[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{5,}"
    r"|\b(?:wandb_v1_)?[0-9a-f]{40}\b"
    r"|(?i:\bbearer\s+)[A-Za-z0-9._~+/-]{8,}=*"
)
_EMAIL = re.compile(r"\b[A-Za-z0-9._%+-]{1,64}@[A-Za-z0-9.-]{1,255}\.[A-Za-z]{2,24}\b")
_URL = re.compile(r"\b([a-z][a-z0-9+.-]*)://[^\s'\"]+", re.IGNORECASE)
_ADDRESS = re.compile(r"(?<![\d.])(?:\d{1,3}\.){3}\d{1,3}(?![\d.])(?::\d+)?")

# A path has two parts or more. Below a root, a part may hold spaces but not begin or end with one. Lengths are bounded
# so that matching takes linear time on any text.
_PART = r"[^\s/\\:*?\"<>|](?:[^/\\:*?\"<>|\n]{0,120}[^\s/\\:*?\"<>|])?"
_WORD = r"[^\s/\\:*?\"<>|()]{1,120}"
_PATH = re.compile(
    rf"(?<![\w.…/\\])(?:(?:[A-Za-z]:|~)?[/\\]{{1,2}}{_PART}(?:[/\\]+{_PART})+|{_WORD}(?:[/\\]+{_WORD})+)"
)

# User and host names that identify nobody and occur in ordinary text.
_GENERIC = {
    "root", "user", "ubuntu", "admin", "localhost", "home", "runner", "jovyan", "main", "train", "python", "model",
    "trl", "torch", "demo",
}  # fmt: skip


def redact(data: Any) -> Any:
    """Return a copy of plain data with every string cleaned and every private setting hidden."""
    clean = _cleaner()
    cleaned = _walk(data, clean)
    source = cleaned.get("source") if isinstance(cleaned, dict) else None
    if isinstance(source, dict) and isinstance(source.get("files"), list):
        source["files"] = [re.split(r"[/\\]", str(name))[-1] for name in source["files"]]
    if isinstance(source, dict):
        _number_nodes(cleaned, source)
    return cleaned


def _number_nodes(report: dict[str, Any], source: dict[str, Any]) -> None:
    """Replace the machines' names by numbers, in place: names tell who owns them."""
    across = report.get("across_ranks")
    ranks = [r for r in report.get("ranks") or [] if isinstance(r, dict)]
    places = [*ranks, source, *(across.get("nodes") or [] if isinstance(across, dict) else [])]
    known: dict[str, str] = {}
    for place in places:
        if isinstance(place.get("node"), str):
            place["node"] = known.setdefault(place["node"], f"node-{len(known)}")
    for rank in ranks:
        if isinstance(rank.get("file"), str):
            rank["file"] = re.split(r"[/\\]", rank["file"])[-1]


def redact_text(text: str) -> str:
    """Return one string, cleaned."""
    return _cleaner()(text)


# Parts of memprof's own key that may name people and places. The rest is figures and names of phases and modules.
_WORDS = ("config", "notes", "oom")


def redact_snapshot(raw: dict[str, Any]) -> None:
    """Clean a raw snapshot in place: the file names of all frames, and the text under the ``"memprof"`` key."""
    extra = raw.get("memprof", {})
    own = [*(extra.pop("own_folders", None) or []), *own_folders()]
    seen: set[int] = set()
    lists = [s.get("frames") for s in raw.get("segments", [])]
    lists += [b.get("frames") for s in raw.get("segments", []) for b in s.get("blocks", [])]
    lists += [event.get("frames") for trace in raw.get("device_traces", []) for event in trace]
    for frames in lists:
        if not isinstance(frames, list) or id(frames) in seen:  # most lists are shared between events
            continue
        seen.add(id(frames))
        for frame in frames:
            if id(frame) not in seen:
                seen.add(id(frame))
                frame["filename"] = _own_path(frame.get("filename", ""), own) or short_path(frame.get("filename", ""))
    extra.update({name: redact(extra[name]) for name in _WORDS if extra.get(name)})


def _walk(value: Any, clean: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, dict):
        return {clean(str(k)): HIDDEN if _private(str(k), v) else _walk(v, clean) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_walk(item, clean) for item in value]
    return value


def _private(key: str, value: Any) -> bool:
    """Tell whether a setting holds text under the name of a secret; figures and whole sections do not count."""
    return isinstance(value, (str, list, tuple)) and bool(_PRIVATE_KEY.search(key)) and not _INNOCENT_KEY.search(key)


def _cleaner() -> Callable[[str], str]:
    names = _own_names()
    pattern = re.compile("|".join(rf"(?<!\w){re.escape(n)}(?!\w)" for n in names)) if names else None

    @lru_cache(maxsize=65536)  # stacks repeat their frames
    def clean(text: str) -> str:
        text = _SECRETS.sub(HIDDEN, text)
        text = _EMAIL.sub(HIDDEN, text)
        text = _URL.sub(rf"\1://{HIDDEN}", text)
        text = _ADDRESS.sub(HIDDEN, text)
        text = _paths(text)
        return pattern.sub(HIDDEN, text) if pattern else text

    return clean


def _paths(text: str) -> str:
    return _PATH.sub(_path_in_text, text) if "/" in text or "\\" in text else text


def short_path(path: str) -> str:
    """Shorten a path: begin at the library's name or at ``python3.x``; keep only the file name of other files."""
    return _in_library(path) or re.split(r"[/\\]", path)[-1]


def _own_path(path: str, own: Iterable[Sequence[str]]) -> str | None:
    """Return the import path of a file of memprof that lies beside the package, as in an editable install."""
    slashed = path.replace("\\", "/")
    return next((f"{name}/{slashed[len(folder) :]}" for folder, name in own if slashed.startswith(folder)), None)


def _in_library(path: str) -> str | None:
    parts = re.split(r"[/\\]+", path)
    for i in range(len(parts) - 2, -1, -1):
        if parts[i] in ("site-packages", "dist-packages"):
            return "/".join(parts[i + 1 :])
        if re.fullmatch(r"python3\.\d+", parts[i]):
            return "/".join(parts[i:])
    return None


def _path_in_text(match: re.Match[str]) -> str:
    """Apply :func:`short_path`, except to relative paths, which may be a model's name or two words."""
    path = match.group()
    absolute = path[0] in "/\\~" or path[1:2] == ":"
    return _in_library(path) or (f"…/{short_path(path)}" if absolute else path)


def _own_names() -> list[str]:
    """Return this machine's and this user's names, longest first, without short and generic ones."""
    found = {socket.gethostname(), socket.gethostname().split(".")[0], os.path.basename(os.path.expanduser("~"))}
    with contextlib.suppress(KeyError, OSError):
        found.add(getpass.getuser())
    return sorted((name for name in found if len(name) > 2 and name.lower() not in _GENERIC), key=len, reverse=True)
