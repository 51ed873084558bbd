"""What is no file is refused in one sentence, and never waited for."""

from __future__ import annotations

import os
import pickle
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from tests.cli.test_cli import call

MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
# What reads a file or a folder, by command and parameter; {} is the file.
READING = {
    ("report", "snapshots"): "{}", ("report", "source_folder"): "{good} -o page.html --source {}",
    ("report", "rules"): "{good} --rules {}",
    ("compare", "inputs"): "{good} {}", ("compare", "rules"): "{good} {good} --rules {}",
    ("explain", "snapshot"): "{}", ("explain", "rules"): "{good} --rules {}",
    ("advise", "source"): "{} --estimate", ("oom", "log"): "{}", ("watch", "folder"): "{} --once",
    ("simulate", "config_file"): "--config {}", ("simulate", "model"): "--model {}",
    ("simulate", "reward_model"): f"--model {MODEL} --reward-model {{}}",
    ("simulate", "completion_lengths"): f"--model {MODEL} --gpu 24GB --completion-lengths {{}}",
    ("simulate", "script"): "--script {}", ("simulate", "like"): "--like {}",
    ("plan", "config_file"): "--config {} --gpu 24GB", ("plan", "model"): "--model {} --gpu 24GB",
    ("plan", "reward_model"): f"--model {MODEL} --gpu 24GB --reward-model {{}}",
    ("run", "script"): "{}", ("mcp", "folders"): "{}",
}  # fmt: skip
# What writes one; a folder to write to is one that can be made.
WRITING = {
    ("report", "page"): "{good} -o {}", ("report", "json_file"): "{good} --json {}",
    ("compare", "page"): "{good} {good} -o {}", ("compare", "json_file"): "{good} {good} --json {}",
    ("explain", "json_file"): "{good} --json {}", ("oom", "json_file"): "{log} --json {}",
    ("advise", "page"): "{good} --estimate -o {}", ("advise", "json_file"): "{good} --estimate --json {}",
    ("simulate", "page"): f"--model {MODEL} -o {{}}", ("simulate", "json_file"): f"--model {MODEL} --json {{}}",
    ("plan", "page"): f"--model {MODEL} --gpu 24GB -o {{}}",
    ("plan", "json_file"): f"--model {MODEL} --gpu 24GB --json {{}}",
    ("run", "out"): "--out {} {good}", ("emulate", "out"): "--out {} -- python x.py", ("demo", "out"): "--out {}",
}  # fmt: skip


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """What may stand in the place of a file, and two files."""
    from benchmarks.faults.inputs import snapshot, texts

    folder = tmp_path_factory.mktemp("special")
    names = ("pipe", "socket", "device", "folder", "good.pickle", "log.txt")
    files = {name.partition(".")[0]: folder / name for name in names}
    os.mkfifo(files["pipe"])
    files["device"].symlink_to("/dev/zero")
    files["folder"].mkdir()
    files["good"].write_bytes(pickle.dumps(snapshot(), protocol=4))
    files["log"].write_text(texts()[0], encoding="utf-8")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(files["socket"]))
        yield {name: str(file) for name, file in files.items()}


def _takes_a_file(parameter: click.Parameter) -> bool:
    return isinstance(parameter.type, click.Path) or parameter.name in ("model", "reward_model", "completion_lengths")


def test_every_command_that_takes_a_file_is_tried() -> None:
    from memprof.cli import main

    context = click.Context(main)
    commands = {name: main.get_command(context, name) for name in main.list_commands(context)}
    taken = {(n, p.name) for n, c in commands.items() if c is not None for p in c.params if _takes_a_file(p)}
    assert taken | {("run", "script")} == {*READING, *WRITING}


def _refused(command: str, words: str, file: str, given: dict[str, str]) -> None:
    done = call(command, *words.format(file, **given).split())
    assert done.exit_code in (2, 3), done.output
    assert done.output.startswith("memprof: ")
    assert done.output.count("\n") == 1
    assert stat.S_IFMT(os.stat(file).st_mode) in (stat.S_IFIFO, stat.S_IFSOCK, stat.S_IFCHR, stat.S_IFDIR)


# Those that import torch first go to the heavy ones: plan reads the same.
TRIED = [
    pytest.param(p, id="-".join(p), marks=[pytest.mark.heavy] * (p[0] == "simulate" and "model" in p[1]))
    for p in READING
]


@pytest.mark.parametrize("place", TRIED)
def test_what_is_no_file_is_refused_and_not_waited_for(place: tuple[str, str], given: dict[str, str]) -> None:
    taken = place[0] in ("run", "mcp")  # a folder: as Python runs it, a place to read
    for kind in ("pipe", "socket", "device") if taken else ("pipe", "socket", "device", "folder"):
        _refused(place[0], READING[place], given[kind], given)


@pytest.mark.parametrize("place", WRITING, ids="-".join)
def test_nothing_takes_the_place_of_what_is_no_file(place: tuple[str, str], given: dict[str, str]) -> None:
    for kind in ("pipe", "socket") if place[1] == "out" else ("pipe", "socket", "folder"):  # nobody reads the pipe
        if place[0] not in ("simulate", "plan") or kind == "folder":  # what is refused before the work
            _refused(place[0], WRITING[place], given[kind], given)


def test_so_are_a_socket_and_a_device(tmp_path: Path) -> None:
    from memprof.errors import InputError
    from tests.report.files import read_memprof_json

    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "s"))
        for path in (tmp_path / "s", Path("/dev/zero")):
            with pytest.raises(InputError, match="not a regular file"):
                read_memprof_json(path)


def test_settings_a_model_rules_and_counters_wait_for_no_pipe(tmp_path: Path) -> None:
    from memprof.analysis.counters import read_counters
    from memprof.attribution.rules import load_rules
    from memprof.config.catalogue import find_config
    from memprof.config.settings import read_settings
    from memprof.errors import InputError

    os.mkfifo(pipe := tmp_path / "config.json")
    for read in (read_settings, read_counters, load_rules):
        with pytest.raises(InputError, match=r"config\.json: not a regular file"):
            read(pipe)
    with pytest.raises(InputError, match=r"no folder or config\.json of that name"):
        find_config(str(tmp_path))
