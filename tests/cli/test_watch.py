"""``memprof watch``: one frame in a pipe, live on a terminal."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from memprof.analysis.counters import CountersFile
from memprof.cli import main
from tests.report.counters import append, counters_file

MIB = 2**20


def run_folder(folder: Path, *, ranks: int = 1, steps: int = 3, ended: bool = True) -> list[CountersFile]:
    """A run that counted ``steps`` steps: rank 1 a little fuller than rank 0."""
    about = {"model_name": "tiny", "device": "Pretend", "device_total_bytes": 24 * 2**30, "max_steps": 9}
    files = [counters_file(folder / "_memprof", r, {**about, "world_size": ranks}) for r in range(ranks)]
    for file, more in zip(files, range(ranks), strict=True):
        for step in range(1, steps + 1):
            append(file, counted(step, more * 1024 * MIB))
        append(
            file,
            {"step": 2, "phase": "backward", "peak_allocated": 3072 * MIB,
             "categories": {"weights": 1024 * MIB, "loss_logits": 2048 * MIB}, "groups": {"total": 3072 * MIB}}
        )  # fmt: skip
        if ended:
            append(file, {"ended": time.time(), "step": steps, "error": False})
    return files


def counted(step: int, more: int = 0) -> dict[str, Any]:
    peak = (2048 + 512 * step) * MIB + more
    return {
        "step": step, "time": time.time(), "recorded": step == 2, "peak_allocated": peak,
        "peak_reserved": peak + 256 * MIB, "allocated": 1024 * MIB, "host_rss": 900 * MIB,
        "phases": {"generate": 1536 * MIB, "backward": peak},
    }  # fmt: skip


def test_headings_end_in_the_number_of_their_step(tmp_path: Path) -> None:
    for file in run_folder(tmp_path, steps=12):
        append(file, {"step": 12, "phase": "backward", "peak_allocated": MIB, "categories": {"weights": MIB}})
    printed = CliRunner().invoke(main, ["watch", str(tmp_path), "--once"], standalone_mode=False).output
    heads = [line.split("  ")[0] for line in printed.splitlines()]
    assert "Phase, step 12" in heads
    assert "Category at the peak, step 12" in heads


def test_one_frame_says_it_all(tmp_path: Path) -> None:
    run_folder(tmp_path)
    done = CliRunner().invoke(main, ["watch", str(tmp_path), "--once"], standalone_mode=False)
    assert done.exit_code == 0
    text = done.output
    assert "tiny · Pretend · 24.00 GiB" in text
    assert "Step 3 of 9 · finished" in text
    lines = {line.split("  ")[0].strip(): line.split() for line in text.splitlines() if line}
    assert lines["Peak allocated"][2:4] == ["3.50", "3.50"]
    assert lines["Backward"][1:3] == ["3.50", "3.50"]
    assert lines["Generate"][1:3] == ["1.50", "1.50"]
    assert lines["L Loss logits"][3:5] == ["2.00", "67%"]
    assert lines["Total"][1] == "3.00"
    assert max(map(len, text.splitlines())) <= 100


def test_ranks_are_listed(tmp_path: Path) -> None:
    run_folder(tmp_path, ranks=2)
    text = CliRunner().invoke(main, ["watch", str(tmp_path)], standalone_mode=False).output
    rows = [line.split() for line in text.splitlines()]
    assert ["0", "3", "3.75", "3.50", "0.88"] in rows
    assert ["1", "3", "4.75", "4.50", "0.88"] in rows


def test_a_job_that_is_silent_is_said_to_be(tmp_path: Path) -> None:
    (file,) = run_folder(tmp_path, steps=1, ended=False)
    text = CliRunner().invoke(main, ["watch", str(tmp_path)], standalone_mode=False).output
    assert "ago" in text
    assert "stopped" not in text
    append(file, {**counted(2), "time": time.time() - 7200})
    assert "2 h ago; it may have been stopped" in CliRunner().invoke(main, ["watch", str(tmp_path)]).output


def test_before_the_first_step(tmp_path: Path) -> None:
    counters_file(tmp_path, 0, {"model_name": "evil [bold]\x1b[31m"})
    text = CliRunner().invoke(main, ["watch", str(tmp_path)], standalone_mode=False).output
    assert "No step has ended yet." in text
    assert "\x1b" not in text
    assert "[bold]" in text


@pytest.mark.parametrize("width", [40, 79, 200])
def test_other_widths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    run_folder(tmp_path, ranks=2)
    monkeypatch.setenv("COLUMNS", str(width))
    text = CliRunner().invoke(main, ["watch", str(tmp_path)], standalone_mode=False).output
    assert "Backward" in text
    assert max(map(len, text.splitlines())) <= width


def test_json_is_alone_on_stdout(tmp_path: Path) -> None:
    run_folder(tmp_path)
    data = json.loads(CliRunner().invoke(main, ["watch", str(tmp_path), "--format", "json"]).stdout)
    assert data["schema"] == "memprof.watch/1"
    assert data["ranks"][0]["newest"]["peak_allocated"] == 3584 * MIB


def test_nothing_to_watch_is_one_sentence(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "memprof", "watch", str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 3
    assert done.stderr.count("\n") == 1
    assert "MemProfCallback" in done.stderr or "callback" in done.stderr


def test_a_terminal_follows_the_run_until_it_ends(tmp_path: Path) -> None:
    (file,) = run_folder(tmp_path, steps=1, ended=False)
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "memprof", "watch", str(tmp_path), "--interval", "0.1"]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "60"}
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    try:
        seen = read_until(ours, "Step 1 of 9")
        append(file, counted(2))
        seen += read_until(ours, "Step 2 of 9")
        append(file, {"ended": time.time(), "step": 2, "error": False})
        seen += read_until(ours, "finished")
        assert process.wait(timeout=20) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    assert "Traceback" not in seen


def test_a_terminal_waits_for_a_run_that_has_not_begun(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "memprof", "watch", str(tmp_path / "run"), "--interval", "0.1"]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "60"}
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    try:
        read_until(ours, "waiting for a run")
        (tmp_path / "run").mkdir()
        run_folder(tmp_path / "run", steps=2)
        read_until(ours, "finished")
        assert process.wait(timeout=60) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def read_until(terminal: int, words: str, seconds: float = 30) -> str:
    import select

    seen, deadline = "", time.monotonic() + seconds
    while words not in seen:
        assert time.monotonic() < deadline, f"{words!r} was never shown: {seen[-800:]}"
        if select.select([terminal], [], [], 0.2)[0]:
            seen += os.read(terminal, 65536).decode(errors="replace")
    return seen


def scraped(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        return answer.read().decode()


def test_prometheus_is_served_what_the_counters_say(tmp_path: Path) -> None:
    prometheus = pytest.importorskip("prometheus_client.parser")
    files = run_folder(tmp_path, ranks=2, ended=False)
    command = [sys.executable, "-m", "memprof", "watch", str(tmp_path), "--serve", ":0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        line = next(one for one in process.stderr if one.startswith("http://127.0.0.1:"))
        port = int(line.removeprefix("http://127.0.0.1:").partition("/")[0])
        families = {f.name: f for f in prometheus.text_string_to_metric_families(scraped(port))}
        values = {(f, *s.labels.values()): s.value for f, family in families.items() for s in family.samples}
        assert values["memprof_step", "0"] == 3
        assert values["memprof_peak_allocated_bytes", "1"] == (2048 + 512 * 3 + 1024) * MIB
        assert values["memprof_category_bytes", "loss_logits", "0"] == 2048 * MIB
        assert values["memprof_phase_peak_bytes", "generate", "0"] == 1536 * MIB
        assert values["memprof_device_total_bytes", "0"] == 24 * 2**30
        assert values["memprof_training_ended", "1"] == 0
        assert ("memprof_reserved_bytes", "0") not in values  # not known
        files[0].append(counted(4))
        assert 'memprof_step{rank="0"} 4.0' in scraped(port)
        (tmp_path / "_memprof" / "counters.rank-0.jsonl").write_text("broken")
        assert "memprof_step{" not in scraped(port)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("address", ["9200", ":x", "host:70000", ""])
def test_an_address_that_is_none_is_a_usage_error(tmp_path: Path, address: str) -> None:
    run_folder(tmp_path)
    done = CliRunner().invoke(main, ["watch", str(tmp_path), "--serve", address])
    assert done.exit_code == 2
    assert "is not an address; write :9200 or 0.0.0.0:9200." in done.output
