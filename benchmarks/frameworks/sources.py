"""Get a framework's newest wheel, without what it depends on, and read its files."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from functools import cached_property
from pathlib import Path


class Source:
    """Files of one framework: a wheel, or a folder that holds its packages.

    Attributes:
        name: the framework, as memprof's tables write it.
        version: of the wheel; "folder" of a folder.
    """

    def __init__(self, name: str, path: Path) -> None:
        self.name = name
        self._path = path
        self.version = path.name.split("-")[1] if path.suffix == ".whl" else "folder"

    @cached_property
    def files(self) -> dict[str, str]:
        """Return the text of Python and settings files, by path from the packages' folder."""
        kept = (".py", ".yaml", ".yml", ".json", ".toml", ".md")
        if self._path.suffix != ".whl":
            found = (p for p in self._path.rglob("*") if p.suffix in kept and p.is_file())
            return {p.relative_to(self._path).as_posix(): p.read_text("utf-8", "replace") for p in found}
        with zipfile.ZipFile(self._path) as wheel:
            texts = {n: wheel.read(n).decode("utf-8", "replace") for n in wheel.namelist() if n.endswith(kept)}
        # A wheel may have its packages below NAME.data/purelib/.
        return {re.sub(r"^[^/]+\.data/(?:pure|plat)lib/", "", name): text for name, text in texts.items()}

    @cached_property
    def words(self) -> frozenset[str]:
        """Return every name in the files, words of a dotted or hyphenated one too; hyphens are written as "_"."""
        return frozenset(
            part for text in self.files.values() for part in re.findall(r"[A-Za-z_]\w*", text.replace("-", "_"))
        )

    def has_text(self, text: str) -> bool:
        """Tell whether a file holds this text."""
        return any(text in content for content in self.files.values())


def newest(name: str, distribution: str, folder: Path) -> Source | None:
    """Return the newest wheel of a distribution, downloaded into ``folder``; None if there is none to be had."""
    into = folder / distribution
    if not (found := sorted(into.glob("*.whl"))):
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"]
        command += ["--retries", "0", "--timeout", "15"]
        wanted = ["--no-deps", "--only-binary", ":all:", "--dest", str(into), distribution]
        try:
            subprocess.run([*command, *wanted], check=True, capture_output=True, timeout=300)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
            return None
        found = sorted(into.glob("*.whl"))
    return Source(name, found[-1]) if found else None
