"""A folder in which documented commands run: the files they name are there, and each command runs once a session."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from tests.forked import python

ROOT = Path(__file__).resolve().parents[1]

# Two narrow layers under a vocabulary as wide as a tile of TRL's loss, so that the ways to compute it differ.
TINY = (
    '{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 176,'
    ' "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 32768,'
    ' "max_position_embeddings": 4096, "tie_word_embeddings": true}'
)
SCRIPT = """
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

def reward(completions, **_):
    return [float(len(set(completion))) for completion in completions]

args = GRPOConfig(
    output_dir="out", max_steps=1, per_device_train_batch_size=2, num_generations=2, max_completion_length=8,
    use_cpu=True, bf16=False, dataloader_pin_memory=False, report_to="none", save_strategy="no",
)
data = Dataset.from_dict({"prompt": ["one", "two"]})
GRPOTrainer(model="tiny-model", reward_funcs=reward, args=args, train_dataset=data).train()
"""
OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.90 GiB. GPU 0 has a total capacity of 15.73 GiB of"
    " which 1.28 GiB is free. Including non-PyTorch memory, this process has 14.43 GiB memory in use. Of the allocated"
    " memory 11.82 GiB is allocated by PyTorch, and 2.41 GiB is reserved by PyTorch but unallocated.\n"
)
# Of the demo's two runs the second stands in for these; the first for every other snapshot or report that is named.
SECOND = ("lean.pickle", "after.pickle", "branch.json")
NAMED = re.compile(r"(?<![\w./-])[\w.-]+\.(?:pickle|json|log)\b")
WRITTEN = re.compile(r"(?:-o|--output|--json|>)\s*([\w./-]+)")
# A command is stopped after this; the slowest, six simulations of a small model, takes half a minute alone.
SECONDS = 300


def shortened(command: str) -> str:
    """The same command on a model of two narrow layers, without the searches that take minutes."""
    command = re.sub(r"(memprof (?:simulate|plan)\b.*?--model )[\w.-]+/[\w.-]+", r"\1tiny.json", command)
    if command.startswith("memprof plan") and not re.search("--(vary|no-search|serve-beside)", command):
        command += " --no-search"
    advises = command.startswith("memprof advise") or " --advise" in command
    if advises and "--estimate" not in command and "--seconds" not in command:
        command += " --seconds 0"
    return command


class Workspace:
    """A finished run, snapshots, reports, a small model's config and a script, under the names the pages use.

    Args:
        folder: an empty folder.
        demo: what the demo wrote.
    """

    def __init__(self, folder: Path, demo: Path) -> None:
        self.folder = folder
        shutil.copytree(demo, folder / "demo", ignore=shutil.ignore_patterns("_work", "_model"))
        for name in ("OUTPUT_DIR", "out"):
            shutil.copytree(demo / "tensorboard" / "full", folder / name)
        shutil.copytree(demo / "_model" / "tiny-random-llama", folder / "tiny-model")
        (folder / "tiny.json").write_text(TINY, encoding="utf-8")
        (folder / "train.py").write_text(SCRIPT, encoding="utf-8")
        (folder / "grpo.yaml").write_text("model: tiny.json\nlora_r: 8\nmax_completion_length: 64\n", encoding="utf-8")
        for name in ("benchmarks", "examples", "tests"):
            (folder / name).symlink_to(ROOT / name)
        self.environment = self._environment()
        self._done: dict[str, subprocess.CompletedProcess[str]] = {}

    def run(self, command: str) -> subprocess.CompletedProcess[str]:
        """How a shell command ended, made short; one that several pages show runs once."""
        command = shortened(command)
        if command not in self._done:
            self.provide(command)
            self._done[command] = self._forked(command) or self._started(command)
        return self._done[command]

    def _forked(self, command: str) -> subprocess.CompletedProcess[str] | None:
        """Run in a fork what needs the trainers and no shell."""
        words = shlex.split(command)
        if words[:2] == ["memprof", "simulate"]:
            return python(["-m", *words], self.folder, self.environment)
        if command.startswith("python examples/"):
            return python(words[1:], self.folder, self.environment)
        return None

    def _started(self, command: str) -> subprocess.CompletedProcess[str]:
        where = ROOT if command.startswith("make ") else self.folder
        return subprocess.run(
            ["sh", "-c", command], cwd=where, env=self.environment, capture_output=True, text=True, timeout=SECONDS
        )

    def python(self, code: str) -> subprocess.CompletedProcess[str]:
        """How a piece of Python ended."""
        self.provide(code)
        command = [sys.executable, "-c", code]
        return subprocess.run(command, cwd=self.folder, env=self.environment, capture_output=True, text=True)

    def provide(self, words: str) -> None:
        """Put one of the demo's files under each name that is read."""
        for name in set(NAMED.findall(words)) - set(WRITTEN.findall(words)):
            target = self.folder / name
            if target.exists():
                continue
            if target.suffix == ".log":
                target.write_text(OOM, encoding="utf-8")
            else:
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
