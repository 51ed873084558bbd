"""A real TensorBoard, as a process of its own, for the tests."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def tensorboard(logdir: Path | str, *options: str, log: Path, prefix: str = "") -> Iterator[str]:
    """The address of a TensorBoard on ``logdir``; what it says goes to ``log``."""
    port = _free_port()
    command = [sys.executable, "-m", "tensorboard.main", "--host=127.0.0.1", f"--port={port}", *options]
    if logdir:
        command.append(f"--logdir={logdir}")
    if prefix:
        command.append(f"--path_prefix={prefix}")
    with open(log, "w") as stream:
        process = subprocess.Popen(command, stdout=stream, stderr=stream, cwd=log.parent, env=dict(os.environ))
    base = f"http://127.0.0.1:{port}{prefix}"
    try:
        _wait(process, base, log)
        yield base
        assert process.poll() is None, f"TensorBoard ended: {log.read_text()[-2000:]}"
    finally:
        process.terminate()
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait(process: subprocess.Popen[bytes], base: str, log: Path, seconds: float = 90) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        assert process.poll() is None, f"TensorBoard did not start: {log.read_text()[-2000:]}"
        try:
            get(f"{base}/data/plugins_listing")
            return
        except OSError:
            time.sleep(0.2)
    raise AssertionError(f"TensorBoard does not answer: {log.read_text()[-2000:]}")


def get(address: str) -> tuple[int, dict[str, str], bytes]:
    """Status, headers (lower case) and body; an error's too."""
    try:
        with urllib.request.urlopen(address, timeout=120) as answer:
            return answer.status, {k.lower(): v for k, v in answer.headers.items()}, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, {k.lower(): v for k, v in error.headers.items()}, error.read()


def listing(base: str) -> list[dict[str, Any]]:
    """What the tab offers."""
    found: list[dict[str, Any]] = json.loads(get(f"{base}/data/plugin/memprof/recordings")[2])["recordings"]
    return found
