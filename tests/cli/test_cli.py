"""The command line as people meet it: what is printed where, exit codes, and one sentence for every mistake."""

from __future__ import annotations

import ctypes
import gzip
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

from memprof._version import __version__
from memprof.cli import main
from memprof.cli.inputs import reuse_freed_memory
from tests.report.files import validate
from tests.synthetic import SnapshotBuilder

MIB = 2**20


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three blocks, one freed: 6 MiB at the peak, 4 MiB at the end."""
    run = SnapshotBuilder()
    run.alloc(1 * MIB, "from_pretrained", "main")
    run.alloc(3 * MIB, "main")
    gone = run.alloc(2 * MIB, "step", "main")
    run.free(gone)
    return run.save(tmp_path_factory.mktemp("cli") / "run.pickle")


def call(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(a) for a in arguments])


def json_of(command: str, *arguments: object) -> dict[str, Any]:
    """The JSON of a command's answer, held against its schema."""
    result = call(command, *arguments, "--json", "-")
    assert result.exit_code == 0, result.stderr
    answer: dict[str, Any] = json.loads(result.stdout)
    validate(answer)
    return answer


def report_of(*arguments: object) -> dict[str, Any]:
    return json_of("report", *arguments)


def shell(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """The real thing, in a process of its own."""
    command = [sys.executable, "-m", "memprof", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, **options)


def test_report_prints_a_table(snapshot: Path) -> None:
    result = call("report", snapshot)
    assert result.exit_code == 0
    assert "Total" in result.stdout
    assert "Does it add up? Yes, to the byte." in result.stdout


# What a small report once loaded for nothing, each a tenth to a hundredth of its start.
_NOT_FOR_A_REPORT = (
    "difflib", "hashlib", "numpy.ma", "secrets", "statistics",
    "memprof.advice.by_settings", "memprof.config.gpus", "memprof.config.settings",
    "memprof.oom.failure", "memprof.redact", "memprof.report.plan", "memprof.snapshot.remote",
    "memprof.snapshot.unpickle",
)  # fmt: skip
# How many of memprof's modules a small report with a page may load.
_MOST_MODULES = 157


def test_a_report_starts_without_what_it_does_not_need(snapshot: Path) -> None:
    _report_that_passes(
        f"assert not set({_NOT_FOR_A_REPORT}) & set(sys.modules), set({_NOT_FOR_A_REPORT}) & set(sys.modules)\n"
        "assert os.environ['OPENBLAS_NUM_THREADS'] == '1'",
        snapshot,
    )


def test_a_small_page_loads_no_more_modules(snapshot: Path, tmp_path: Path) -> None:
    count = "len([name for name in sys.modules if name.partition('.')[0] == 'memprof'])"
    # plotly's Python classes, a fifth of the start, are not needed: the page has plotly.js and a figure in JSON.
    check = f"assert {count} <= {_MOST_MODULES}, {count}\nassert 'plotly.graph_objects' not in sys.modules"
    _report_that_passes(check, snapshot, "-o", tmp_path / "page.html")


def _report_that_passes(check: str, *arguments: object) -> None:
    """Run ``memprof report`` in a process that checks at its end what it loaded."""
    ended = "try: main()\nexcept SystemExit as end: assert not end.code"
    code = f"import os, sys\nfrom memprof.cli import main\n{ended}\n{check}"
    environment = {name: value for name, value in os.environ.items() if name != "OPENBLAS_NUM_THREADS"}
    command = [sys.executable, "-c", code, "report", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == 0, done.stderr


def test_a_command_that_python_calls_leaves_its_environment(snapshot: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    assert call("report", snapshot).exit_code == 0
    assert "OPENBLAS_NUM_THREADS" not in os.environ


def test_json_stands_alone_on_stdout(snapshot: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    for arguments in (["--json", "-"], ["--format", "json"], ["--json", "-", "-o", page]):
        result = call("report", snapshot, *arguments)
        report = json.loads(result.stdout)
        validate(report)
        assert report["peak"]["allocated_bytes"] == 6 * MIB
        assert report["max_requested_bytes"] == 6 * MIB
    assert page.exists()
    assert "Page:" in result.stderr


def test_a_reports_json_is_reported_like_its_snapshot(snapshot: Path, tmp_path: Path) -> None:
    call("report", snapshot, "--json", tmp_path / "report.json")
    assert call("report", tmp_path / "report.json").stdout == call("report", snapshot).stdout
    assert call("report", tmp_path / "report.json", "-o", tmp_path / "page.html").exit_code == 0
    assert "</html>" in (tmp_path / "page.html").read_text(encoding="utf-8")
    call("explain", snapshot, "--json", tmp_path / "explain.json")
    refused = call("report", tmp_path / "explain.json")
    assert refused.exit_code == 3
    assert "memprof.explain/1" in refused.stderr
    assert call("report", tmp_path / "report.json", "--device", 0).exit_code == 2


def test_files_are_written_and_named_on_stderr(snapshot: Path, tmp_path: Path) -> None:
    page, data = tmp_path / "page.html", tmp_path / "data.json"
    result = call("report", snapshot, "-o", page, "--json", data, "--format", "markdown")
    assert result.exit_code == 0
    assert result.stdout.startswith("### ")
    assert json.loads(data.read_text())["schema"] == "memprof.report/1"
    assert page.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    assert str(page) in result.stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == ["data.json", "page.html"]


def test_allocations_option(snapshot: Path) -> None:
    for asked, listed in (("1", 1), ("all", 3), ("50", 3), ("0", 0)):
        report = json.loads(call("report", snapshot, "--json", "-", "--allocations", asked).stdout)
        assert len(report["peak"]["allocations"]) == listed


def test_gzip_is_read_too(snapshot: Path, tmp_path: Path) -> None:
    packed = tmp_path / "run.pickle.gz"
    packed.write_bytes(gzip.compress(snapshot.read_bytes()))
    assert json.loads(call("report", packed, "--json", "-").stdout)["peak"]["allocated_bytes"] == 6 * MIB


def test_redact_takes_out_who_and_where(tmp_path: Path) -> None:
    run = SnapshotBuilder()
    run.alloc(MIB, "main")
    run.events[-1]["frames"][0]["filename"] = "/home/lovelace/secret-project/train.py"
    extra = {"schema": "memprof.snapshot/1", "config": {"hub_token": "hf_abcdefghijklmnopqrst", "beta": 0.04}}
    path = run.save(tmp_path / "run.pickle", extra)
    page = tmp_path / "page.html"
    plain = call("report", path, "--json", "-")
    assert "lovelace" in plain.stdout
    result = call("report", path, "--json", "-", "-o", page, "--redact")
    shared = result.stdout + page.read_text(encoding="utf-8")
    assert result.exit_code == 0
    for private in ("lovelace", "secret-project", "hf_abcdefghijklmnopqrst", str(tmp_path)):
        assert private not in shared
    assert "train.py:1 main" in shared
    assert json.loads(result.stdout)["source"]["config"]["beta"] == 0.04


def test_explain_lists_what_is_alive(snapshot: Path) -> None:
    answer = json.loads(call("explain", snapshot, "--json", "-").stdout)
    validate(answer)
    sizes = [a["bytes"] for a in answer["allocations"]]
    assert sizes == [3 * MIB, 2 * MIB, 1 * MIB]
    text = call("explain", snapshot).stdout
    assert "train.py:1 step" in text
    assert hex(answer["allocations"][0]["address"]) in text


def test_explain_folds_alike_blocks_and_shows_whole_stacks_when_asked(tmp_path: Path) -> None:
    run = SnapshotBuilder()
    for _ in range(5):
        run.alloc(2 * MIB, "layer", "main")
    run.alloc(3 * MIB, "head", "main")
    path = run.save(tmp_path / "run.pickle")
    done = call("explain", path)
    assert "6 allocations on 2 lines, 13.00 MiB, alive at peak, largest first" in done.stderr
    assert "in 5 blocks of 2.00 MiB" in done.stdout
    assert done.stdout.index("in 5 blocks") < done.stdout.index("head")
    assert len(json.loads(call("explain", path, "--json", "-").stdout)["allocations"]) == 6
    whole = call("explain", path, "--full-stacks").stdout
    assert "in 5 blocks of 2.00 MiB" in whole
    assert "--full-stacks" not in whole


def test_report_says_how_far_from_out_of_memory_on_a_card_asked_about(snapshot: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    done = call("report", snapshot, "--capacity", "4090", "--json", tmp_path / "r.json", "-o", page)
    assert done.exit_code == 0
    assert "of 23.52 GiB (the GPU given)" in done.stdout
    assert "of 23.52 GiB (the GPU given)" in page.read_text(encoding="utf-8")
    report = json.loads((tmp_path / "r.json").read_text(encoding="utf-8"))
    validate(report)
    assert report["capacity"] == {"bytes": 24080 * MIB, "from": "option"}
    bare = call("report", snapshot, "--capacity", "24")
    assert (bare.exit_code, "24 what? 24GB or 24GiB." in bare.stderr) == (2, True)


def test_explain_by_address_category_time_and_number(snapshot: Path) -> None:
    everything = json.loads(call("explain", snapshot, "--all", "--format", "json").stdout)["allocations"]
    inside = everything[1]["address"] + 5
    assert json.loads(call("explain", snapshot, "--address", hex(inside), "--json", "-").stdout)["allocations"] == [
        everything[1]
    ]
    one = json.loads(call("explain", snapshot, "--top", "1", "--json", "-").stdout)["allocations"]
    assert one == everything[:1]
    category = everything[0]["category"]
    same = json.loads(call("explain", snapshot, "--category", category, "--json", "-").stdout)["allocations"]
    assert same == [a for a in everything if a["category"] == category]
    early = json.loads(call("explain", snapshot, "--at", everything[2]["born_us"], "--json", "-").stdout)["allocations"]
    assert [a["address"] for a in early] == [everything[2]["address"]]
    later = json.loads(call("explain", snapshot, "--at", "device-peak", "--json", "-").stdout)["allocations"]
    # The device peak is when the allocator takes the segment, just before the block is handed out.
    assert [a["address"] for a in later] == [everything[0]["address"], everything[2]["address"]]
    assert "### " not in call("explain", snapshot, "--format", "markdown").stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["report"], "SNAPSHOT"),
        (["report", "{file}", "--format", "xml"], "xml"),
        (["report", "{file}", "--allocations", "many"], "'many' is neither"),
        (["report", "{file}", "--allocations", "-3"], "neither"),
        (["report", "{file}", "{file}"], "the same file is given twice"),
        (["report", "{file}", "--json", "-", "--format", "markdown"], "alone"),
        (["explain", "{file}", "--all", "--top", "3"], "exclude"),
        (["explain", "{file}", "--at", "lunch"], "lunch"),
        (["explain", "{file}", "--at", "phase:lunch"], "lunch"),
        (["explain", "{file}", "--at", "1"], "outside the recording"),
        (["explain", "{file}", "--category", "food"], "food"),
        (["explain", "{file}", "--address", "here"], "here"),
        (["explain", "{file}", "--top", "0"], "0"),
        (["cook"], "cook"),
    ],
)
def test_wrong_usage_is_one_sentence_and_exit_2(snapshot: Path, arguments: list[str], words: str) -> None:
    result = call(*[a.replace("{file}", str(snapshot)) for a in arguments])
    assert result.exit_code == 2, result.output
    assert words in result.stderr
    assert "Traceback" not in result.output
    assert result.stdout == ""


def test_a_device_that_is_not_there_is_one_sentence(snapshot: Path) -> None:
    result = call("report", snapshot, "--device", "7")
    assert result.exit_code in (2, 3)
    assert "device 7" in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


class _Runs:
    """Unpickling one of these would run a command."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch PWNED",)


def bad_files(folder: Path, good: bytes) -> dict[str, Path]:
    contents = {
        "empty": b"",
        "text": b"this is no snapshot\n",
        "truncated": good[: len(good) // 2],
        "global": pickle.dumps({"segments": [], "device_traces": [_Runs()]}),
        "shape": pickle.dumps({"weights": [1, 2, 3]}, protocol=4),
        "number": pickle.dumps(42, protocol=4),
        "binary": bytes(range(256)),
        "gzip": gzip.compress(good)[:60],
        "json": b'{"segments": 3}',
    }
    for name, content in contents.items():
        (folder / f"{name}.pickle").write_bytes(content)
    files = {name: folder / f"{name}.pickle" for name in contents}
    (folder / "folder.pickle").mkdir()
    return {**files, "directory": folder / "folder.pickle", "missing": folder / "nowhere.pickle"}


BAD = ("empty", "text", "truncated", "global", "shape", "number", "binary", "gzip", "json", "directory", "missing")


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("command", ["report", "explain"])
def test_unusable_input_is_one_sentence_and_exit_3(snapshot: Path, tmp_path: Path, kind: str, command: str) -> None:
    path = bad_files(tmp_path, snapshot.read_bytes())[kind]
    output = tmp_path / "out.json"
    done = shell(command, path, "--json", output, cwd=tmp_path)
    assert done.returncode == 3, done.stderr
    assert done.stdout == ""
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert path.name in done.stderr
    assert "Traceback" not in done.stderr
    assert not output.exists()
    assert not (tmp_path / "PWNED").exists()


@pytest.mark.parametrize("option", ["-o", "--json"])
@pytest.mark.parametrize("place", ["no/such/folder/out", "folder", "locked/out"])
def test_unwritable_output_is_one_sentence_and_exit_3(snapshot: Path, tmp_path: Path, option: str, place: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "locked").mkdir(mode=0o500)
    if place.startswith("locked") and os.access(tmp_path / "locked", os.W_OK):
        pytest.skip("this user may write anywhere")
    done = shell("report", snapshot, option, tmp_path / place)
    assert done.returncode == 3, done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert list((tmp_path / "folder").iterdir()) == []
    assert not [p for p in tmp_path.rglob("*") if p.is_file()]


@pytest.mark.parametrize("rules", ["", "not toml [", '[[rule]]\nname = "x"\n'], ids=["missing", "no-toml", "no-rule"])
def test_unusable_rules_are_one_sentence(snapshot: Path, tmp_path: Path, rules: str) -> None:
    path = tmp_path / "rules.toml"
    if rules:
        path.write_text(rules)
    result = call("report", snapshot, "--rules", path)
    assert result.exit_code in (2, 3), result.output
    assert len(result.stderr.strip().splitlines()) == 1
    assert "Traceback" not in result.output


def test_hostile_file_names_are_shown_not_obeyed(tmp_path: Path) -> None:
    done = shell("report", tmp_path / "\x1b[31mred\nline.pickle")
    assert done.returncode == 3
    assert "\x1b" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_version_and_help() -> None:
    assert __version__ in call("--version").stdout
    listed = call("--help").stdout
    for command in ("report", "explain", "demo"):
        assert f"\n  {command}" in listed
        assert call(command, "--help").exit_code == 0
    assert call("report", "-h").stdout == call("report", "--help").stdout


def test_a_reader_that_goes_away_is_no_error(snapshot: Path) -> None:
    script = f'"{sys.executable}" -m memprof report "{snapshot}" --format json --allocations all | head -c 1'
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout == "{"
    assert done.stderr == ""


LOADED = """
import sys
from memprof.cli import main
try:
    main({arguments!r})
except SystemExit as end:
    assert (end.code or 0) == {code}, end.code
names = {{name.partition('.')[0] for name in sys.modules}}
print("LOADED", sorted(names & {heavy!r}), file=sys.stderr)
"""


@pytest.mark.parametrize(
    ("words", "streams", "code", "says"),
    [
        ("report {}", ">&-", 0, ""),
        ("report no.pickle", ">&-", 3, "memprof: no.pickle: cannot be read (No such file or directory).\n"),
        ("report {}", ">/dev/full", 3, "memprof: cannot go on: No space left on device.\n"),
        ("report --nope", "2>/dev/full", 2, ""),
        ("oom -", "<&-", 3, "memprof: standard input contains no out-of-memory message."),
    ],
)
def test_closed_and_full_streams(snapshot: Path, words: str, streams: str, code: int, says: str) -> None:
    command = f"exec {sys.executable} -m memprof {words.format(snapshot)} {streams}"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == code
    assert done.stderr.startswith(says)
    assert done.stderr.count("\n") == (1 if says else 0)


@pytest.mark.parametrize(
    ("arguments", "heavy"),
    [
        (["--help"], {"torch", "plotly", "numpy", "rich", "msgspec", "transformers"}),
        (["report", "--help"], {"torch", "plotly", "numpy", "rich", "msgspec", "transformers"}),
        (["report", "{file}", "--format", "json"], {"torch", "plotly", "rich", "transformers"}),
        (["report", "{file}", "-o", "{page}"], {"torch", "transformers", "trl", "pandas"}),
        (["explain", "{file}"], {"torch", "plotly", "transformers"}),
        (["simulate", "--model", "no-such-model"], {"torch", "transformers", "trl", "plotly"}),
    ],
)
def test_nothing_needless_is_loaded(snapshot: Path, tmp_path: Path, arguments: list[str], heavy: set[str]) -> None:
    filled = [a.format(file=snapshot, page=tmp_path / "p.html") for a in arguments]
    code = LOADED.format(arguments=filled, heavy=heavy, code=3 if "no-such-model" in filled else 0)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stderr.strip().splitlines()[-1] == "LOADED []"


# ---- the C library keeps freed memory in the process of a command that reads a large file --------------------------


@pytest.mark.parametrize(("n_bytes", "calls"), [(256 << 20, 3), (1 << 20, 0)])
def test_freed_memory_is_kept_for_large_files_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n_bytes: int, calls: int
) -> None:
    asked: list[tuple[int, int]] = []
    library = SimpleNamespace(mallopt=lambda *given: asked.append(given))
    monkeypatch.setattr(ctypes, "CDLL", lambda _: library)
    path = tmp_path / "large.pickle"
    with path.open("wb") as file:
        file.truncate(n_bytes)
    reuse_freed_memory(path)
    assert len(asked) == calls


@pytest.mark.parametrize("missing", [AttributeError, TypeError, OSError])
def test_another_c_library_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: type[Exception]
) -> None:
    def library(_: None) -> Any:
        raise missing

    monkeypatch.setattr(ctypes, "CDLL", library)
    path = tmp_path / "large.pickle"
    with path.open("wb") as file:
        file.truncate(256 << 20)
    reuse_freed_memory(path)
    reuse_freed_memory(tmp_path / "none.pickle")
