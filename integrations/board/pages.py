"""Make the tab's report pages by running ``memprof`` in a separate process.

A damaged or hostile file, a lack of memory or an endless analysis then ends that process and not TensorBoard. It also
keeps the analysis and its libraries out of TensorBoard's process.
"""

from __future__ import annotations

import html
import re
import subprocess
import sys
import tempfile
from collections import OrderedDict
from pathlib import Path
from threading import Lock

from memprof.integrations.board.recordings import BoardRecording

_SECONDS = 300
_KEPT = 16
# The page's own content security policy, which stands before anything that a file wrote.
_POLICY = re.compile(r'<meta http-equiv="Content-Security-Policy" content="([^"]*)">')
_HASH = re.compile(r"'sha256-([A-Za-z0-9+/=]+)'")
# The command line's prefix of an error sentence on standard error.
_OURS = re.compile(r"^(?:memprof|Error|Usage): ?", re.MULTILINE)


class Page:
    """Hold a page and the hashes of its scripts; ``problem`` is the sentence shown instead of a report."""

    def __init__(self, text: str, problem: str | None = None) -> None:
        self.text = text
        self.problem = problem
        #: SHA-256 of every script that the page runs, as its own content security policy names it.
        self.hashes: list[str] = _HASH.findall(policy[1]) if (policy := _POLICY.search(text)) else []


class Pages:
    """Make pages, one at a time, and keep the newest of them."""

    def __init__(self) -> None:
        self._busy = Lock()
        self._kept: OrderedDict[tuple[object, ...], Page] = OrderedDict()

    def of(self, recordings: list[BoardRecording]) -> Page:
        """Return the report page of one recording, or the page that compares two."""
        key = tuple((r.run, r.step, r.rank, r.changed) for r in recordings)
        with self._busy:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
            page = _made(recordings)
            self._kept[key] = page
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
            return page


def _made(recordings: list[BoardRecording]) -> Page:
    with tempfile.TemporaryDirectory(prefix="memprof-tab-") as folder:
        target = Path(folder) / "page.html"
        try:
            done = subprocess.run(
                [sys.executable, "-m", "memprof", *_arguments(recordings), "-o", str(target)],
                cwd=folder, timeout=_SECONDS,
                stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return _sorry(f"memprof stopped reading {_names(recordings)} after {_SECONDS} seconds.")
        except OSError as error:
            return _sorry(f"memprof could not be started ({error}).")
        if done.returncode == 0 and target.is_file():
            return Page(target.read_text(encoding="utf-8"))
        said = _OURS.sub("", done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "")
        return _sorry(said or f"memprof ended with code {done.returncode} over {_names(recordings)}.")


def _arguments(recordings: list[BoardRecording]) -> list[str]:
    files = [str(r.pickle) for r in recordings]
    if len(files) == 1:
        return ["report", *files]
    labels = [f"--label={r.run} · step {r.step}" for r in recordings]
    return ["compare", *files, *labels]


def _names(recordings: list[BoardRecording]) -> str:
    return " and ".join(r.pickle.name for r in recordings)


def _sorry(sentence: str) -> Page:
    page = f"""<!DOCTYPE html>
<html lang="en" data-ready="yes"><head><meta charset="utf-8"><title>memprof</title>
<style>body{{font:15px/1.5 system-ui,sans-serif;margin:3rem;max-width:46rem;color:#24292f;background:#fff}}
:root[data-theme=dark] body{{color:#d6dbe1;background:#14181d}}</style></head>
<body><h1>No report</h1><p>{html.escape(sentence)}</p></body></html>"""
    return Page(page, sentence)
