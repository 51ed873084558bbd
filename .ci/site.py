"""For the site (mkdocs.yml): files outside docs/ that pages link to are copied into it, under source/."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
_LINK = re.compile(r"\]\(([^)#:\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Add what is linked, and what is linked from there."""
    for page in files.documentation_pages():
        _add_linked(page.content_string, "docs/" + page.src_uri, files, config)
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Turn the links the same way; a broken one is left, and the build's own check complains of it."""
    here = _outside(page.file.src_uri)

    def turned(match: re.Match[str]) -> str:
        target = _target(here, match.group(1))
        if not (ROOT / target).is_file():
            return match.group()
        return f"]({os.path.relpath(_inside(target), os.path.dirname(page.file.src_uri))}{match.group(2) or ''})"

    return _LINK.sub(turned, markdown)


def _add_linked(text: str, here: str, files: Files, config: Any) -> None:
    for link, _ in _LINK.findall(text):
        target = _target(here, link)
        if target.startswith("docs/") or not (ROOT / target).is_file() or files.get_file_from_path(_inside(target)):
            continue
        files.append(File.generated(config, _inside(target), abs_src_path=str(ROOT / target)))
        if target.endswith(".md"):
            _add_linked((ROOT / target).read_text(encoding="utf-8"), target, files, config)


def _target(here: str, link: str) -> str:
    """A link's file, from the repository's root."""
    return os.path.normpath(os.path.join(os.path.dirname(here), link))


def _inside(name: str) -> str:
    """Where a file of the repository is in the site."""
    return name.removeprefix("docs/") if name.startswith("docs/") else f"source/{name}"


def _outside(uri: str) -> str:
    """Where a file of the site is in the repository."""
    return uri.removeprefix("source/") if uri.startswith("source/") else f"docs/{uri}"
