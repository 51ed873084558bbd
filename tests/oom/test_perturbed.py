"""One text in many wrappings: colours, JSON, loggers, ranks and cuts change no verdict and end in no error."""

from __future__ import annotations

import gzip
import json
import lzma
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from memprof.cli.commands.oom import command
from memprof.oom.explain import explain_log
from tests.oom.test_arithmetic import CAUSES
from tests.oom.wordings import EXAMPLES

SHARED = sorted(Path(__file__).parents[3].glob("shared/oom*/*.txt"))[::4]
TRACEBACK = """Traceback (most recent call last):
  File "/root/run/train_mine.py", line 12, in step
    probs = torch.softmax(scores, dim=-1)
"""
TEXTS = {
    **{name: EXAMPLES[name].text for name in list(EXAMPLES)[::12]},
    **{name: f"{TRACEBACK}torch.OutOfMemoryError: {text}" for name, (_, _, text) in CAUSES.items()},
}


def lines(text: str, wrap: Callable[[str], str]) -> str:
    return "\n".join(map(wrap, text.split("\n")))


def colours(text: str) -> str:
    return lines(text, lambda line: f"\x1b[31m{line[:7]}\x1b[0m\x1b[1m{line[7:]}\x1b[0m")


WRAPPINGS: dict[str, Callable[[str], str]] = {
    "colours": colours,
    "docker's JSON lines": lambda text: lines(text, lambda line: json.dumps({"log": f"{line}\n", "stream": "stderr"})),
    "one JSON line": lambda text: json.dumps({"level": "error", "msg": "failed", "error": text}),
    "JSON in JSON": lambda text: json.dumps({"log": json.dumps({"message": text}) + "\n"}),
    "CRLF": lambda text: text.replace("\n", "\r\n"),
    "logging": lambda text: lines(text, lambda line: f"2025-03-01 10:11:12,123 - trainer - ERROR - {line}"),
    "brackets": lambda text: lines(text, lambda line: f"[2025-03-01 10:11:12] [ERROR] [run.py:12] {line}"),
    "compose": lambda text: lines(text, lambda line: f"node-3  | {line}"),
    "two ranks": lambda text: lines(text, lambda line: f"[rank0]: {line}\n[rank1]: {line}"),
}


def verdict(text: str) -> tuple[object, ...] | None:
    failures = explain_log(text).failures
    return tuple(getattr(failures[0], key) for key in ("kind", "cause", "requested_bytes")) if failures else None


@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_a_wrapping_changes_no_verdict(wrapping: str) -> None:
    texts = {**TEXTS, **{path.name + path.parent.name: path.read_text(errors="replace").strip("\n") for path in SHARED}}
    changed = [name for name, text in texts.items() if verdict(WRAPPINGS[wrapping](text)) != verdict(text)]
    assert not changed


@pytest.mark.parametrize("name", [name for name in TEXTS if name in CAUSES])
def test_a_text_cut_anywhere_is_no_error_and_the_whole_message_decides(name: str) -> None:
    text, draws = TEXTS[name], random.Random(name)
    whole = verdict(text)
    tail = "\n".join(["wandb: waiting", "Traceback (most recent call last):", '  File "/usr/bin/torchrun", line 8'] * 5)
    for _ in range(10):
        explain_log(text[: draws.randrange(len(text))])
        explain_log(text[draws.randrange(len(text)) :])
        cut = f"{text}\n{tail}"[: len(text) + draws.randrange(len(tail))]
        assert verdict(cut) == whole


PACKED = {
    "gzip": gzip.compress,
    "xz": lzma.compress,
    "UTF-16 without a mark": lambda data: data.decode().encode("utf-16-le"),
    "UTF-16 the other way": lambda data: data.decode().encode("utf-16-be"),
    "UTF-16 with its mark": lambda data: data.decode().encode("utf-16"),
}


@pytest.mark.parametrize("kind", PACKED)
def test_a_packed_log_is_read_from_a_file_and_from_standard_input(kind: str, tmp_path: Path) -> None:
    data = PACKED[kind](f"epoch 1\n{CAUSES['larger than the card'][2]}\n".encode())
    (tmp_path / "job.log").write_bytes(data)
    for args, given in (([str(tmp_path / "job.log")], None), (["-"], data)):
        ended = CliRunner().invoke(command, [*args, "--format", "json"], input=given)
        assert ended.exit_code == 0, ended.output
        assert json.loads(ended.stdout)["failures"][0]["cause"] == "larger_than_device"


@pytest.mark.parametrize("unit", ["x", '{"log":"memory 12.3 GiB allocated by trainer, killed ","time":"2025"},'])
def test_a_message_at_the_end_of_one_long_line_is_read(unit: str) -> None:
    (failure,) = explain_log(unit * (400_000 // len(unit)) + " " + CAUSES["larger than the card"][2]).failures
    assert failure.cause == "larger_than_device"
