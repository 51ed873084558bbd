"""What is no file is refused in one sentence, and never waited for."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

COMMANDS = {
    "report": ["report", "{}"],
    "compare": ["compare", "{}", "{}"],
    "advise": ["advise", "{}"],
    "oom": ["oom", "{}"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_pipe_is_refused_and_not_waited_for(command: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "run.pickle")
    words = [part.format("run.pickle") for part in COMMANDS[command]]
    done = subprocess.run(
        [sys.executable, "-m", "memprof", *words], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 3
    assert "run.pickle: not a regular file" in done.stderr
    assert "Traceback" not in done.stderr


def test_so_are_a_socket_and_a_device(tmp_path: Path) -> None:
    from memprof.analysis.report_files import read_memprof_json
    from memprof.errors import InputError

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
