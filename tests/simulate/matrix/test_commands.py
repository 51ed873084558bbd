"""The commands people type first, whole, on shapes of the packaged catalogue: each ends in an answer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

pytestmark = [pytest.mark.trl, pytest.mark.slow]

_MODEL = "--model Qwen/Qwen2.5-0.5B-Instruct"
_OFTEN = {
    "sft": "--trainer sft --max-length 512 --dtype bfloat16 --lora-r 16",
    "grpo": "--generation none --lora-r 16 --gradient-checkpointing --beta 0",
}
_HEAVY = {  # the matrix has DPO and RLOO on four layers
    "dpo": "--trainer dpo --max-length 512 --dtype bfloat16 --lora-r 16",
    "grpo in full": "--generation none --dtype float32 --gradient-checkpointing --beta 0",
    "lean rloo": "--trainer rloo --recipe lean --lora-r 16 --dtype bfloat16 --generation none",
}


@pytest.mark.parametrize(
    "command",
    [
        *(pytest.param(command, id=name) for name, command in _OFTEN.items()),
        *(pytest.param(command, id=name, marks=pytest.mark.heavy) for name, command in _HEAVY.items()),
    ],
)
def test_a_usual_command_ends_in_an_answer(command: str, tmp_path: Path) -> None:
    from memprof.cli import main

    out = tmp_path / "report.json"
    done = CliRunner().invoke(main, ["simulate", *_MODEL.split(), *command.split(), "--json", str(out)])
    assert done.exit_code == 0, done.output
    assert "Does it add up? Yes, to the byte." in done.stdout
    peak = json.loads(out.read_text())["peak"]
    assert peak["reserved_bytes"] >= peak["allocated_bytes"] > 494_032_768 * 2  # its weights in bfloat16
