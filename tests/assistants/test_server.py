"""``memprof mcp`` driven by the protocol's own client over standard input and output, with all its tools."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from memprof.errors import InputError
from tests.cli.test_cli import call
from tests.cli.test_report_ranks import record
from tests.oom.wordings import WORDINGS

mcp = pytest.importorskip("mcp")

TOOLS = {"report", "explain", "compare", "oom", "simulate", "advise"}
MESSAGE = WORDINGS["2.4, private pools"].text
TINY = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512,
    "max_position_embeddings": 512, "tie_word_embeddings": True,
}  # fmt: skip


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A folder of two runs and a log, with a file beside it that nobody named."""
    folder = tmp_path / "runs"
    record(folder / "a.pickle", 2)
    record(folder / "b.pickle", 8)
    record(folder / "ranks" / "step_3" / "rank_0.pickle", 2)
    record(folder / "ranks" / "step_4" / "rank_0.pickle", 4)
    (folder / "train.log").write_text(f"[rank1]: {MESSAGE}\n", encoding="utf-8")
    (tmp_path / "secret.pickle").write_bytes((folder / "a.pickle").read_bytes())
    return folder


def with_client(
    talk: Callable[[Any], Awaitable[None]], *arguments: object, cwd: Path, environment: dict[str, str] | None = None
) -> None:
    """Start the server as an assistant does, and talk to it."""
    server = mcp.StdioServerParameters(
        command=sys.executable,
        args=["-m", "memprof", "mcp", *map(str, arguments)],
        env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
        cwd=cwd,
    )

    async def session() -> None:
        async with mcp.Client(server, read_timeout_seconds=300) as client:
            await talk(client)

    asyncio.run(session())


async def asked(client: Any, tool: str, **arguments: Any) -> tuple[bool, str]:
    """Whether a tool answered, and its text."""
    result = await client.call_tool(tool, arguments)
    return not result.is_error, "\n".join(part.text for part in result.content)


def test_what_is_offered(runs: Path) -> None:
    async def talk(client: Any) -> None:
        tools = {tool.name: tool for tool in (await client.list_tools()).tools}
        assert set(tools) == TOOLS
        for tool in tools.values():
            assert tool.annotations.read_only_hint is True
            assert tool.description
            assert "self" not in tool.input_schema["properties"]
        assert "out-of-memory" in client.instructions

    with_client(talk, runs, cwd=runs)


def test_the_reading_tools(runs: Path) -> None:
    async def talk(client: Any) -> None:
        good, text = await asked(client, "report", path="a.pickle")
        assert good, text
        assert "6.00 MiB" in text or "0.01 GiB" in text
        verdict = json.loads(call("report", runs / "a.pickle", "--json", "-").stdout)["headline"]["verdict"]
        assert verdict in text.partition("\n\n|")[0]  # the report's own sentence
        good, text = await asked(client, "report", path=str(runs / "ranks"), step=3)
        assert good, text
        assert "step_4/rank_0.pickle" in text  # listed, with why it is not shown
        good, text = await asked(client, "explain", path="b.pickle", top=1)
        assert good, text
        assert "GiB" in text
        assert "train.py:1 step" in text
        good, text = await asked(client, "compare", paths=["a.pickle", "b.pickle"], fail_above="2%")
        assert good, text
        assert "more than 2% above" in text
        for where in ({"text": MESSAGE}, {"path": "train.log"}):
            good, text = await asked(client, "oom", **where)
            assert good, text
            assert "requested" in text

    with_client(talk, runs, cwd=runs)


def test_answers_without_names(tmp_path: Path) -> None:
    from tests.test_redact import PLANTED, left_in, planted

    (tmp_path / "a.pickle").write_bytes(pickle.dumps(planted(), protocol=4))
    log = "\n".join([*PLANTED.values(), MESSAGE])

    async def talk(client: Any) -> None:
        for tool, arguments in (
            ("report", {"path": "a.pickle"}),
            ("explain", {"path": "a.pickle"}),
            ("compare", {"paths": ["a.pickle", "a.pickle"]}),
            ("oom", {"text": log}),
        ):
            good, text = await asked(client, tool, **arguments)
            assert good, text
            assert not left_in(text)
        for path in ("/data/secretlab/none.pickle", "/etc/hostname", "bad.pickle"):  # refusals have words too
            good, text = await asked(client, "report", path=path)
            assert not good
            assert not left_in(text.replace(path, ""))
            assert str(tmp_path.parent) not in text

    (tmp_path / "bad.pickle").write_text("hf_abcdefghij0123456789")
    with_client(talk, "--redact", tmp_path, cwd=tmp_path)


def test_simulating_and_advising(tmp_path: Path) -> None:
    """Both run TRL's own step, of a model small enough for a test."""
    pytest.importorskip("trl")
    model = tmp_path / "tiny"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(TINY))
    settings = {"num_generations": 2, "per_device_train_batch_size": 2, "prompt_length": 16, "completion_length": 16}
    settings["generation"] = "none"

    async def talk(client: Any) -> None:
        good, text = await asked(client, "simulate", model="./tiny", settings=settings)
        assert good, text
        assert "Peak" in text or "peak" in text
        good, text = await asked(client, "simulate", model="./tiny", settings={"output": "/tmp/x"})
        assert (good, "output: no such setting" in text) == (False, True)
        record(tmp_path / "a.pickle", 2)
        good, text = await asked(client, "advise", path="a.pickle", seconds=5)
        assert text
        assert "Traceback" not in text

    with_client(talk, cwd=tmp_path)


HOSTILE_PATHS = {
    "../secret.pickle": "outside the folders",
    "/etc/passwd": "outside the folders",
    "out.pickle": "outside the folders",  # a link that leads there
    "nowhere.pickle": "cannot be read",
    "a\0b": "cannot be read",
    "pipe": "neither a file nor a folder",
    "--help": "cannot be read",
    "x" * 5000: "cannot be read",
}


def test_a_hostile_path_is_refused_in_a_sentence(runs: Path) -> None:
    (runs / "out.pickle").symlink_to(runs.parent / "secret.pickle")
    os.mkfifo(runs / "pipe")

    async def talk(client: Any) -> None:
        for path, says in HOSTILE_PATHS.items():
            for tool, arguments in (("report", {"path": path}), ("compare", {"paths": ["a.pickle", path]})):
                good, text = await asked(client, tool, **arguments)
                assert (good, says in text) == (False, True), text
                assert "Traceback" not in text
        good, text = await asked(client, "oom", path="train.log")
        assert good, text  # the server goes on

    with_client(talk, runs, cwd=runs)


def test_a_folder_whose_recordings_are_a_link_to_elsewhere_is_refused(runs: Path) -> None:
    """``report`` looks into ``_memprof`` below a folder, which can be a link."""
    outside = runs.parent / "outside"
    record(outside / "step-000001.rank-0.pickle", 2)
    (runs / "linked").mkdir()
    (runs / "linked" / "_memprof").symlink_to(outside)
    (runs / "inside").mkdir()
    (runs / "inside" / "_memprof").symlink_to(runs / "ranks")
    (runs / "mixed").mkdir()
    (runs / "inside" / "loop.json").symlink_to(runs / "inside" / "loop.json")
    (runs / "mixed" / "rank_0.pickle").symlink_to(runs.parent / "secret.pickle")

    commands = pytest.importorskip("memprof.assistants.commands")
    reader = commands.Reader([runs], commands.Limits())
    with pytest.raises(InputError, match="outside the folders"):
        reader.path("linked")
    with pytest.raises(InputError, match="outside the folders"):
        reader.path("mixed")
    assert reader.path("inside") == str(runs / "inside")
    assert reader.path("a.pickle") == str(runs / "a.pickle")


@pytest.mark.parametrize("value", ["a\0b", "x" * 3_000_000])
def test_arguments_that_no_process_takes_are_refused_in_a_sentence(runs: Path, value: str) -> None:
    commands = pytest.importorskip("memprof.assistants.commands")
    reader = commands.Reader([runs], commands.Limits())
    with pytest.raises(InputError, match="cannot be run on these arguments"):
        asyncio.run(reader.run("explain", f"--at={value}", "--", "a.pickle"))


def test_a_file_named_like_an_option_is_a_file_and_nothing_is_written(runs: Path) -> None:
    names = ("--json=written.json", "-o", "--help")
    for name in names:
        shutil.copy(runs / "a.pickle", runs / name)
    before = {path: path.stat().st_mtime_ns for path in runs.rglob("*")}

    async def talk(client: Any) -> None:
        for name in names:
            good, text = await asked(client, "report", path=name)
            assert (good, "GiB" in text) == (True, True), text
        good, text = await asked(client, "explain", path="a.pickle", at="--json=written.json")
        assert not good, text
        good, text = await asked(client, "compare", paths=["a.pickle", "b.pickle"], fail_above="--json=written.json")
        assert not good, text

    with_client(talk, runs, cwd=runs)
    assert {path: path.stat().st_mtime_ns for path in runs.rglob("*")} == before


def test_a_huge_file_and_a_long_answer_are_bounded(runs: Path) -> None:
    with open(runs / "huge.pickle", "wb") as file:
        file.truncate(5 * 2**30)
    (runs / "many.log").write_text(
        "\n".join(f"[rank{rank}]: " + MESSAGE.replace("2.00 GiB", f"2.{rank:02d} GiB") for rank in range(60))
    )

    async def talk(client: Any) -> None:
        good, text = await asked(client, "report", path="huge.pickle")
        assert (good, "larger than the 4.00 GiB" in text) == (False, True), text
        good, text = await asked(client, "oom", path="many.log")
        assert good, text
        assert len(text) < 2300
        assert "more characters were cut off" in text
        good, text = await asked(client, "oom", text=MESSAGE, path="many.log")
        assert (good, "either a text or a path" in text) == (False, True)

    with_client(talk, runs, "--characters", 2000, cwd=runs)


def test_a_command_that_takes_too_long_is_ended(runs: Path) -> None:
    async def talk(client: Any) -> None:
        good, text = await asked(client, "simulate", model="Qwen/Qwen2.5-7B-Instruct")
        assert (good, "took longer than 1 s" in text) == (False, True), text

    with_client(talk, "--seconds", 1, runs, cwd=runs)


@pytest.mark.parametrize("closed", ["input", "both"])
def test_a_client_that_goes_away_ends_the_server_quietly(runs: Path, closed: str) -> None:
    server = subprocess.Popen(
        [sys.executable, "-m", "memprof", "mcp", str(runs)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=runs,
    )  # fmt: skip
    hello = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "t", "version": "0"}}
    request = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": hello}
    assert server.stdin is not None
    assert server.stdout is not None
    assert server.stderr is not None
    server.stdin.write(json.dumps(request).encode() + b"\n")
    server.stdin.flush()
    assert json.loads(server.stdout.readline())["id"] == 1
    if closed == "both":
        server.stdout.close()
        server.stdin.write(json.dumps({"jsonrpc": "2.0", "id": 2, "method": "ping"}).encode() + b"\n")
        server.stdin.flush()
    server.stdin.close()
    assert server.wait(30) in (0, 141)
    assert b"Traceback" not in server.stderr.read()


def test_without_the_package_a_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch, runs: Path) -> None:
    for name in [n for n in sys.modules if n.startswith("memprof.assistants")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "mcp.server", None)
    result = call("mcp", runs)
    assert (result.exit_code, "pip install '.[mcp]'" in result.stderr) == (2, True), result.stderr
