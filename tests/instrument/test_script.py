"""``memprof run`` cannot be told from ``python`` by the script it runs, nor by whoever started it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import zipfile
from pathlib import Path

import pytest

from memprof.instrument.script import Script
from tests.instrument.programs import LOOP, left_in, python, signalled

RUN = ("-m", "memprof", "run")

PROBE = """
import json, os, sys, __main__
print(json.dumps({
    "argv": sys.argv, "name": __name__, "file": os.path.abspath(__file__), "path": sys.path[0],
    "stdin": sys.stdin.read(),
    "main": __main__.__dict__ is globals(), "spec": None if __spec__ is None else __spec__.name,
    "package": __package__ or "", "doc": __doc__, "names": sorted(n for n in globals() if n != "__annotations__"),
}))
"""


@pytest.mark.parametrize("how", ["file", "module", "package", "folder", "archive"])
def test_what_a_script_sees_of_itself(tmp_path: Path, how: str) -> None:
    (tmp_path / "pkg").mkdir()
    for name in ("train.py", "pkg/__init__.py", "pkg/__main__.py", "pkg/tool.py"):
        (tmp_path / name).write_text("" if name.endswith("__init__.py") else PROBE)
    with zipfile.ZipFile(tmp_path / "app.zip", "w") as archive:
        archive.writestr("__main__.py", PROBE)
    target = {
        "file": ["train.py"], "module": ["-m", "pkg.tool"], "package": ["-m", "pkg"], "folder": ["pkg"],
        "archive": ["app.zip"],
    }[how]  # fmt: skip
    arguments = [*target, "--lr", "3e-4", "-m", "--out", "x", "--", "tail"]
    alone = python(*arguments, cwd=tmp_path, stdin="typed")
    watched = python(*RUN, *arguments, cwd=tmp_path, stdin="typed")
    assert alone.returncode == 0, alone.stderr
    assert (watched.returncode, watched.stdout, watched.stderr) == (0, alone.stdout, "")
    assert left_in(tmp_path / "_memprof") == []


ENDINGS = {
    "exit code": "import sys; sys.exit(7)",
    "exit with a sentence": "import sys; sys.exit('no such model')",
    "error": "def f(x):\n    raise ValueError(x)\ntry:\n    f(1)\nexcept ValueError as e:\n    raise OSError from e",
    "syntax": "x = = 1",
    "interrupt": "raise KeyboardInterrupt",
    "own hook": "import sys\nsys.excepthook = lambda t, e, tb: print('mine', t, tb.tb_frame.f_code.co_filename)\n1 / 0",
    "hook that exits": "import sys\nsys.excepthook = lambda *_: sys.exit(5)\n1 / 0",
    "hook that fails": "import sys\nsys.excepthook = lambda *_: {}[1]\n1 / 0",
    "thread": "import threading, time\nthreading.Thread(target=lambda: (time.sleep(0.2), print('late'))).start()",
    "exit handler": "import atexit\natexit.register(print, 'bye')\nraise SystemExit(3)",
    "os._exit": "import os\nos._exit(9)",
    "killed": "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)",
    "terminated": "import os, signal\nos.kill(os.getpid(), signal.SIGTERM)",
    "spawned children": (
        "import multiprocessing as m\ndef f(x):\n    return x * x\nif __name__ == '__main__':\n"
        "    with m.get_context('spawn').Pool(1) as p:\n        print(p.map(f, [1, 2]))"
    ),
}


@pytest.mark.parametrize("how", ENDINGS)
def test_every_ending_is_the_scripts_own(tmp_path: Path, how: str) -> None:
    (tmp_path / "s.py").write_text(ENDINGS[how] + "\n")
    alone, watched = (python(*before, "s.py", cwd=tmp_path) for before in ((), RUN))
    assert (watched.returncode, watched.stdout, watched.stderr) == (alone.returncode, alone.stdout, alone.stderr)


def test_a_missing_module_is_refused_as_python_does(tmp_path: Path) -> None:
    alone, watched = (python(*before, "-m", "no_such_module", cwd=tmp_path) for before in ((), RUN))
    assert (watched.returncode, watched.stderr) == (alone.returncode, alone.stderr)


def test_ctrl_c_reaches_the_script(tmp_path: Path) -> None:
    (tmp_path / "s.py").write_text(
        "import time\ntry:\n    print('ready', flush=True)\n    time.sleep(30)\n"
        "except KeyboardInterrupt:\n    print('cleaning up')\n    raise\n"
    )

    def interrupt(process: subprocess.Popen[str]) -> None:
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)

    code, out, err = signalled([*RUN, "s.py"], tmp_path, interrupt, "ready")
    assert (code, out) == (-signal.SIGINT, "ready\ncleaning up\n")
    assert "KeyboardInterrupt" in err
    assert "memprof" not in err


def test_mistakes_end_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "s.py").write_text("print('never')")
    (tmp_path / "file").touch()
    for arguments, code, says in (
        (["nowhere.py"], 3, "nowhere.py: there is no such script"),
        (["--out", "file/below", "s.py"], 3, "file/below: cannot be written to (file is no folder)"),
        (["--capacity", "plenty", "s.py"], 2, "is not a known GPU"),
        (["--steps", "0", "s.py"], 2, "are no steps"),
        (["--steps", "1", "--every", "2", "s.py"], 2, "exclude each other"),
        ([], 2, "Missing argument 'SCRIPT'"),
    ):
        done = python(*RUN, *arguments, cwd=tmp_path)
        assert (done.returncode, done.stdout) == (code, ""), arguments
        assert says in done.stderr
        assert "Traceback" not in done.stderr


def test_a_loop_computes_the_same_and_a_second_run_leaves_the_first_one_as_it_was(tmp_path: Path) -> None:
    """Switched off, nothing is watched."""
    (tmp_path / "loop.py").write_text(LOOP)
    alone = python("loop.py", cwd=tmp_path)
    off = python(*RUN, "loop.py", cwd=tmp_path, MEMPROF="0")
    assert left_in(tmp_path / "_memprof") == []
    watched = python(*RUN, "--no-table", "loop.py", cwd=tmp_path)
    assert alone.returncode == 0, alone.stderr
    assert (off.stdout, off.stderr) == (alone.stdout, alone.stderr)
    assert watched.stdout == alone.stdout
    assert watched.stderr == alone.stderr + f"memprof: _memprof{os.sep}report.html\n"
    first = {p.name: p.read_bytes() for p in (tmp_path / "_memprof").iterdir()}
    assert set(first) == {"step-000001.rank-0.pickle", "step-000001.rank-0.json", "report.html"}
    again = python(*RUN, "--no-table", "loop.py", cwd=tmp_path)
    assert {p.name: p.read_bytes() for p in (tmp_path / "_memprof").iterdir()} == first
    assert left_in(tmp_path / "_memprof-2") == sorted(first)
    assert again.stderr.splitlines()[-2:] == [
        f"memprof: _memprof-2{os.sep}report.html",
        "memprof: _memprof contains an earlier run; this run is written to _memprof-2.",
    ]
    asked = python(*RUN, "--no-table", "--out", "_memprof", "loop.py", cwd=tmp_path)
    assert "this run is written to _memprof-3." in asked.stderr
    assert left_in(tmp_path / "_memprof-3") == sorted(first)
    read = python("-m", "memprof", "advise", ".", "--estimate", "--json", "-", cwd=tmp_path)
    assert "_memprof-3" in json.loads(read.stdout)["source"]["files"][0]
    sources = [json.loads(p.read_text())["source"] for p in sorted(tmp_path.glob("_memprof*/*.json"))]
    assert len({source["run_id"] for source in sources}) == 3
    assert sorted(sources, key=lambda source: source["run_started"]) == sources


def test_a_run_that_recorded_nothing_says_so(tmp_path: Path) -> None:
    (tmp_path / "s.py").write_text("import torch\nprint(torch.zeros(2).sum().item())\n")
    seen = python(*RUN, "s.py", cwd=tmp_path)
    assert (seen.returncode, seen.stdout) == (0, "0.0\n")
    assert seen.stderr == "memprof: nothing was recorded: no model ran in the steps that were to be recorded.\n"
    assert left_in(tmp_path / "_memprof") == []


def test_a_command_of_this_environment_can_be_the_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    commands = tmp_path / "bin"
    monkeypatch.setattr("sys.executable", str(commands / "python"))
    commands.mkdir()
    first = {"swift": "#!/opt/x/bin/python", "deep": "#!/bin/sh\n': ' exec /a/long/path/python", "ls": "\x7fELF"}
    for name, text in first.items():
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    named = [Script.named(name, (), False).name for name in (*first, "other")]
    assert named == [str(commands / "swift"), str(commands / "deep"), "ls", "other"]
    assert Script.named("swift", (), True).name == "swift"
    (tmp_path / "swift").touch()
    assert Script.named("swift", (), False).name == "swift"  # a file of that name comes first


def test_nothing_recorded_in_a_process_that_the_script_started(tmp_path: Path) -> None:
    """A loop there is not recorded: the child could be an engine or a reward server."""
    (tmp_path / "loop.py").write_text(LOOP)
    seen = python(*RUN, "-m", "torch.distributed.run", "--nproc_per_node", "1", "loop.py", cwd=tmp_path)
    assert seen.returncode == 0, seen.stderr
    assert "no transformers.Trainer trained in the processes that the script started" in seen.stderr
    alone = python("loop.py", cwd=tmp_path)
    assert seen.stdout == alone.stdout


def test_nothing_heavy_is_imported_before_the_scripts_first_line(tmp_path: Path) -> None:
    """The script sets its environment before it imports torch or transformers; a script without them needs neither."""
    script = tmp_path / "first.py"
    heavy = ("torch", "transformers", "trl", "peft", "accelerate", "datasets", "numpy")
    script.write_text(f"import sys\nprint([name for name in {heavy!r} if name in sys.modules])")
    seen = python(*RUN, "--out", str(tmp_path / "out"), str(script), cwd=tmp_path)
    assert seen.returncode == 0, seen.stderr
    assert seen.stdout.strip() == "[]"


@pytest.mark.parametrize("missing", ["transformers", "torch"])
def test_a_script_runs_without_what_it_does_not_use(tmp_path: Path, missing: str) -> None:
    script = tmp_path / "plain.py"
    script.write_text(f"import sys\nsys.modules[{missing!r}] = None\nprint('done')")
    seen = python(*RUN, "--out", str(tmp_path / "out"), str(script), cwd=tmp_path)
    assert (seen.returncode, seen.stdout.strip()) == (0, "done"), seen.stderr
