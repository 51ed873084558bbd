"""For the site (mkdocs.yml): files outside docs/ that pages link to are copied into it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
_OUTSIDE = re.compile(r"\]\(\.\./([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Add what is linked as ``../file``, under ``source/``."""
    for page in files.documentation_pages():
        for name, _ in _OUTSIDE.findall(page.content_string):
            if (ROOT / name).is_file() and files.get_file_from_path(_inside(name)) is None:
                files.append(File.generated(config, _inside(name), abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Turn those links the same way; any other is left, and the build's own check complains of it."""

    def turned(match: re.Match[str]) -> str:
        name, anchor = match.groups()
        up = "../" * page.file.src_uri.count("/")
        return f"]({up}{_inside(name)}{anchor or ''})" if (ROOT / name).is_file() else match.group()

    return _OUTSIDE.sub(turned, markdown)


def _inside(name: str) -> str:
    # A Markdown file would become a page of the site, with links of its own.
    return f"source/{name}" + (".txt" if name.endswith(".md") else "")
