"""A folder in which documented commands run: the files they name are there, and each command runs once a session."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

__all__ = ["Workspace"]

ROOT = Path(__file__).resolve().parents[1]

# Two narrow layers under a vocabulary as wide as a tile of TRL's loss, so that the ways to compute it differ.
TINY = (
    '{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 176,'
    ' "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 32768,'
    ' "max_position_embeddings": 4096, "tie_word_embeddings": true}'
)
LOOP = """
import torch
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(2):
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
# Of the demo's two runs the second stands in for these; the first for every other snapshot or report that is named.
SECOND = ("lean.pickle", "after.pickle", "branch.json")
NAMED = re.compile(r"(?<![\w./-])[\w.-]+\.(?:pickle|json)\b")
WRITTEN = re.compile(r"(?:-o|--output|--json|>)\s*([\w./-]+)")
# A command is stopped after this; the slowest, six simulations of a small model, takes half a minute alone.
SECONDS = 300


class Workspace:
    """A finished run, snapshots, reports, a small model's config and a script, under the names the pages use.

    Args:
        folder: an empty folder.
        demo: what the demo wrote.
    """

    def __init__(self, folder: Path, demo: Path) -> None:
        self.folder = folder
        shutil.copytree(demo, folder / "demo", ignore=shutil.ignore_patterns("_work", "_model"))
        shutil.copytree(demo / "tensorboard" / "full", folder / "OUTPUT_DIR")
        (folder / "tiny.json").write_text(TINY, encoding="utf-8")
        (folder / "train.py").write_text(LOOP, encoding="utf-8")
        (folder / "grpo.yaml").write_text("model: tiny.json\nlora_r: 8\nmax_completion_length: 64\n", encoding="utf-8")
        for name in ("benchmarks", "examples", "tests"):
            (folder / name).symlink_to(ROOT / name)
        self.environment = self._environment()
        self._done: dict[str, subprocess.CompletedProcess[str]] = {}

    def run(self, command: str) -> subprocess.CompletedProcess[str]:
        """How a shell command ended; one that several pages show runs once."""
        if command not in self._done:
            self.provide(command)
            where = ROOT if command.startswith("make ") else self.folder
            self._done[command] = subprocess.run(
                ["sh", "-c", command], cwd=where, env=self.environment, capture_output=True, text=True, timeout=SECONDS
            )
        return self._done[command]

    def python(self, code: str) -> subprocess.CompletedProcess[str]:
        """How a piece of Python ended."""
        self.provide(code)
        command = [sys.executable, "-c", code]
        return subprocess.run(command, cwd=self.folder, env=self.environment, capture_output=True, text=True)

    def provide(self, words: str) -> None:
        """Put one of the demo's files under each name that is read."""
        for name in set(NAMED.findall(words)) - set(WRITTEN.findall(words)):
            target = self.folder / name
            if not target.exists():
                source = ("lora" if name in SECOND else "full") + target.suffix
                shutil.copyfile(self.folder / "demo" / source, target)

    def _environment(self) -> dict[str, str]:
        """``memprof`` and ``python`` are this interpreter's; results of plans are shared between pages."""
        tools = self.folder / "bin"
        tools.mkdir()
        for name, words in (("python", ""), ("memprof", " -m memprof")):
            tool = tools / name
            tool.write_text(f'#!/bin/sh\nexec "{sys.executable}"{words} "$@"\n', encoding="utf-8")
            tool.chmod(0o755)
        return {
            **os.environ,
            "PATH": os.pathsep.join([str(tools), str(Path(sys.executable).parent), os.environ["PATH"]]),
            "OMP_NUM_THREADS": "1",
            "MEMPROF_CACHE": str(self.folder / "cache"),
            "GITHUB_STEP_SUMMARY": str(self.folder / "summary.md"),
        }
