"""Training scripts as people write them: their own trainer is simulated, and nothing is trained or written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

SCRIPT = """
import argparse
from pathlib import Path
import torch
from datasets import Dataset, load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

parser = argparse.ArgumentParser()
parser.add_argument("--model", required=True)
parser.add_argument("--lora", type=int)
parser.add_argument("--given", action="store_true", help="a loaded model instead of a name")
asked = parser.parse_args()
tokenizer = AutoTokenizer.from_pretrained(asked.model)
data = load_dataset("nobody/has-this", split="train").map(lambda row: {"prompt": row["question"]})
data = Dataset.from_list([{"prompt": "abcd" * n} for n in (3, 11, 7)] * 4)


class Mine(GRPOTrainer):
    def compute_loss(self, *args, **kwargs):
        Path(asked.model, "touched").write_text("")
        return super().compute_loss(*args, **kwargs)


def reward(completions, **_):
    raise RuntimeError("there is no text to judge")


model = asked.model
if asked.given:
    model = AutoModelForCausalLM.from_pretrained(asked.model, dtype=torch.bfloat16, device_map="auto").to("cuda")
trainer = Mine(
    model=model,
    reward_funcs=reward,
    args=GRPOConfig(
        Path(asked.model, "out"), per_device_train_batch_size=4, num_generations=4, max_completion_length=21, beta=0.1,
        optim="adamw_torch", report_to="none", save_steps=1,
    ),
    train_dataset=data,
    processing_class=tokenizer,
    peft_config=LoraConfig(r=asked.lora, lora_alpha=8, target_modules="all-linear") if asked.lora else None,
)
trainer.train()
Path(asked.model, "after").write_text("")
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


@pytest.fixture
def model(tiny: str, tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(Path(tiny, "config.json").read_text())
    return folder


def _phases(raw: dict[str, Any]) -> dict[tuple[int | None, str], int]:
    from memprof.analysis.analysis import analyze
    from memprof.snapshot.reader import snapshot_from_raw

    found: dict[tuple[int | None, str], int] = {}
    for part in analyze(snapshot_from_raw(raw)).phases:
        found[part.step, part.phase] = max(found.get((part.step, part.phase), 0), part.allocated_bytes)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "changes"),
    [
        pytest.param(["--lora", "3"], {"lora_r": 3}, id="a name and an adapter"),
        pytest.param(["--given"], {"dtype": "bfloat16"}, id="a loaded model", marks=pytest.mark.heavy),
    ],
)
def test_the_scripts_own_trainer_needs_what_its_settings_need(
    script: Path,
    model: Path,
    settings_for: Callable[..., Any],
    arguments: list[str],
    changes: dict[str, Any],
) -> None:
    from memprof.simulate.run import simulate_settings
    from memprof.simulate.script.script import simulate_script

    raw = simulate_script(script, ["--model", str(model), *arguments], {}, stacks=False)
    told = " ".join(raw["memprof"]["notes"])
    assert "own Mine was built and trained" in told
    assert "longest prompt has 11 tokens" in told
    assert "nobody/has-this" in told
    settings = settings_for(model=str(model), beta=0.1, prompt_length=11, completion_length=21, **changes)
    expected = _phases(simulate_settings(settings, stacks=False))
    found = _phases(raw)
    for key in ((s, p) for s in (1, 2) for p in ("generate", "reference_logprobs", "forward", "backward")):
        if key in expected:
            assert found[key] == expected[key], key
    # Only what the script itself writes is there: no folder of the trainer's, and nothing after train().
    assert {path.name for path in model.iterdir()} == {"config.json", "touched"}


def test_arguments_of_earlier_releases_are_left_out_with_a_note(tmp_path: Path) -> None:
    """Public programs of 2025 have them; the installed release does not know them, and no memory follows them."""
    trl = pytest.importorskip("trl")
    from memprof.simulate.script.world import script_world

    notes: list[str] = []
    with script_world(notes.append, {}, lambda fields: None):
        made = trl.GRPOConfig(str(tmp_path), warmup_ratio=0.1, logging_dir="logs", num_generations=4)
        with pytest.raises(TypeError, match="warmup_ration"):
            trl.GRPOConfig(str(tmp_path), warmup_ration=0.1)
    assert made.num_generations == 4
    assert notes == ["GRPOConfig: left out the arguments of an earlier release: warmup_ratio, logging_dir"]
    with pytest.raises(TypeError, match="warmup_ratio"):
        trl.GRPOConfig(str(tmp_path), warmup_ratio=0.1)


@pytest.mark.slow
def test_from_the_command_line(script: Path, model: Path, tmp_path: Path) -> None:
    from memprof.cli import main

    def run(*arguments: str) -> Any:
        return CliRunner().invoke(main, ["simulate", *arguments])

    own = ["--", "--model", str(model)]
    done = run("--script", str(script), "--completion-length", "9", "--gpu", "24GB", "--json", "-", *own)
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert report["fit"]["fits"] is True
    assert report["source"]["config"]["completion_length"] == 9
    assert report["source"]["config"]["script"] == "train.py"

    script.write_text(SCRIPT.replace("super().compute_loss(*args, **kwargs)", "torch.zeros(2).numpy().sum()"))
    broken = run("--script", str(script), "--json", "-", *own)
    assert broken.exit_code == 0, broken.output
    assert any("TRL's was, with its arguments" in note for note in json.loads(broken.stdout)["notes"])


@pytest.mark.slow
def test_a_script_is_executed_whole_where_that_is_asked(
    script: Path, model: Path, tmp_path: Path, loaded: list[str]
) -> None:
    from memprof.cli import main

    out, peaks = tmp_path / "out.json", []
    for more in ([], ["--no-shortcuts"]):
        loaded.clear()
        few = ["--completion-length", "7"]
        arguments = ["--script", str(script), *few, *more, "--json", str(out), "--", "--model", str(model)]
        done = CliRunner().invoke(main, ["simulate", *arguments])
        assert done.exit_code == 0, done.output
        assert bool(loaded) is not bool(more)
        peak = json.loads(out.read_text())["peak"]
        peaks.append([peak["allocated_bytes"], peak["reserved_bytes"]])
    assert peaks[0] == peaks[1]


def test_mistakes_are_one_sentence(tmp_path: Path, model: Path) -> None:
    from memprof.cli import main

    for text, arguments, code, words in (
        ("x = 1\n", [], 3, "ended without calling trainer.train()"),
        ("import sys\nsys.exit(2)\n", [], 3, "before it trained"),
        ("x = 1\n\nraise KeyError('deep')\n", [], 3, "line 3: KeyError"),
        ("x = 1\n", ["--lora-r", "4"], 2, "is set by the script"),
        (None, [], 3, "no such script"),
    ):
        file = tmp_path / "s.py"
        file.unlink(missing_ok=True)
        if text is not None:
            file.write_text(text)
        done = CliRunner().invoke(main, ["simulate", "--script", str(file), *arguments])
        assert done.exit_code == code, (text, done.output)
        assert words in done.stderr
        assert "Traceback" not in done.output
    stray = CliRunner().invoke(main, ["simulate", "--model", str(model), "--", "x"])
    assert stray.exit_code == 2
    assert "need --script" in stray.stderr
