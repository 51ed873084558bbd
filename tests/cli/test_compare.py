"""``memprof compare`` as people meet it: what it reads, what it writes, and one sentence for every mistake."""

from __future__ import annotations

import copy
import gzip
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from memprof.report.codec import dumps
from tests.cli.test_cli import call, json_of, shell
from tests.report.files import validate
from tests.reports.compared import leaner
from tests.reports.sample import sample
from tests.synthetic import SnapshotBuilder

MIB = 2**20


def snapshot(path: Path, *sizes: int, extra: dict[str, Any] | None = None) -> Path:
    run = SnapshotBuilder()
    for size in sizes:
        run.alloc(size, "step", "main")
    return run.save(path, extra)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("compare")
    simulated = sample("simulated")[0]
    found = {
        "small": snapshot(folder / "small.pickle", 4 * MIB, 2 * MIB),
        "large": snapshot(folder / "large.pickle", 4 * MIB, 8 * MIB),
        "report": folder / "trl.json",
        "lean": folder / "lean.json",
        "simulated": folder / "sim.json.gz",
        "both": folder / "both.json",
    }
    found["report"].write_text(dumps(sample()[0]))
    found["lean"].write_text(dumps(leaner()))
    found["simulated"].write_bytes(gzip.compress(dumps(simulated).encode()))
    answer = call("compare", found["report"], found["lean"], "--published", "unsloth-2025", "--json", found["both"])
    assert answer.exit_code == 0, answer.stderr
    return found


def compared(*arguments: object) -> dict[str, Any]:
    return json_of("compare", *arguments)


def test_snapshots_reports_and_simulations_mixed(files: dict[str, Path]) -> None:
    data = compared(files["small"], files["report"], files["simulated"])
    assert [(r["label"], r["badge"]) for r in data["runs"]] == [
        ("small", "measured"),
        ("trl", "measured"),
        ("sim", "simulated"),
    ]
    assert data["rows"][-1]["at_peak"] == [6 * MIB, *[sample()[0]["peak"]["active_bytes"]] * 2]


def test_of_a_folder_the_recording_with_the_highest_peak_is_compared(files: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    highest = sample()[0]
    highest["peak"]["allocated_bytes"] *= 2
    (folder / "step-000002.rank-0.json").write_text(dumps(sample()[0]))
    (folder / "step-000009.rank-0.json").write_text(dumps(highest))
    data = compared(files["small"], folder)
    assert data["runs"][1]["report"]["peak"]["allocated_bytes"] == highest["peak"]["allocated_bytes"]
    assert data["runs"][1]["label"] == "step-000009.rank-0"


def test_a_comparison_is_taken_apart_into_its_runs(files: dict[str, Path]) -> None:
    data = compared(files["both"], files["small"])
    assert [(r["label"], r["badge"]) for r in data["runs"]] == [
        ("trl", "measured"),
        ("lean", "measured"),
        ("Unsloth (published)", "published"),
        ("TRL + FA2 (published)", "published"),
        ("small", "measured"),
    ]


def test_text_markdown_json_and_page(files: dict[str, Path], tmp_path: Path) -> None:
    page, data = tmp_path / "page.html", tmp_path / "data.json"
    result = call("compare", files["small"], files["large"], "-o", page, "--json", data, "--format", "markdown")
    assert result.exit_code == 0
    assert result.stdout.startswith("### small and large\n")
    assert json.loads(data.read_text())["schema"] == "memprof.compare/1"
    text = page.read_text(encoding="utf-8")
    assert text.count('class="timeline-svg"') == 2
    assert str(page) in result.stderr
    assert "2.0× as much as small" in call("compare", files["small"], files["large"]).stdout
    assert sorted(p.name for p in tmp_path.iterdir()) == ["data.json", "page.html"]


def test_what_is_in_one_and_not_in_the_other(files: dict[str, Path]) -> None:
    gained, lost = compared(files["small"], files["large"])["allocations_only_in"]
    assert [a["each_bytes"] for a in gained["allocations"]] == [8 * MIB]
    assert [a["each_bytes"] for a in lost["allocations"]] == [2 * MIB]
    assert gained["above_bytes"] == 0


def test_labels_and_capacity(files: dict[str, Path]) -> None:
    arguments = (files["report"], files["lean"], "--label", "before", "--label", "after", "--capacity", "7GiB")
    result = call("compare", *arguments)
    assert "after allocates at its peak 4.70 GiB, 31% less than before" in result.stdout
    assert re.search(r"^Fits 7\.00 +no +yes", result.stdout, re.MULTILINE)
    data = compared(*arguments, "--published", "unsloth-2025")
    assert [r["label"] for r in data["runs"]][:2] == ["before", "after"]
    assert data["capacity"]["fits"] == [False, True, False, False]


def test_one_run_beside_the_published_table(files: dict[str, Path]) -> None:
    data = compared(files["small"], "--published", "unsloth-2025")
    total = data["rows"][-1]
    assert [round(n / 2**30, 1) for n in total["at_peak"][1:]] == [54.3, 510.8]
    assert "not a peak" in call("compare", files["small"], "--published", "unsloth-2025").stdout


@pytest.mark.parametrize(
    ("first", "second", "limit", "code"),
    [
        ("small", "large", "2%", 1),
        ("small", "large", "99.9", 1),
        ("small", "large", "100%", 0),
        ("large", "small", "0%", 0),
        ("report", "lean", "2%", 0),
    ],
)
def test_gate(files: dict[str, Path], first: str, second: str, limit: str, code: int, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    result = call("compare", files[first], files[second], "--fail-above", limit, "-o", page)
    assert result.exit_code == code
    assert page.exists()
    assert "Total" in result.stdout
    if code:
        assert "large is 12582912 bytes, 100.00% above the 6291456 of small" in result.stderr
        assert len([line for line in result.stderr.splitlines() if line.startswith("memprof: ")]) == 1


def test_gate_in_a_real_process(files: dict[str, Path]) -> None:
    done = shell("compare", files["small"], files["large"], "--fail-above", "2%", "--json", "-")
    assert done.returncode == 1
    validate(json.loads(done.stdout))
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["small"], 2, "two runs"),
        (["small", "missing.pickle"], 3, "missing.pickle"),
        (["small", "page.html"], 3, "an HTML page"),
        (["small", "broken.json"], 3, "broken.json"),
        (["small", "explain.json"], 3, "memprof.explain/1"),
        (["small", "newer.json"], 3, "memprof.report/9"),
        (["small", "lacking.json"], 3, "object missing required field"),
        (["small", "wrong.json"], 3, "categories"),
        (["small", "noise.bin"], 3, "noise.bin"),
        (["small", "huge.json"], 3, "huge.json"),
        (["small", "endless.json"], 3, "endless.json"),
        (["small", "deep.json", "--redact"], 3, "deeper"),
        (["small", "cut.json.gz"], 3, "cut.json.gz"),
        (["small", "empty"], 3, "no snapshot"),
        (["small", "large", "--label", "one"], 2, "--label"),
        (["small", "large", "--capacity", "much"], 2, "much"),
        (["small", "large", "--capacity", "0GB"], 2, "must be greater than zero"),
        (["small", "large", "--fail-above", "a lot"], 2, "a lot"),
        (["small", "large", "--fail-above", "-3%"], 2, "percentage"),
        (["small", "--published", "somebody"], 2, "unsloth-2025"),
        (["small", "large", "--json", "-", "--format", "markdown"], 2, "--json -"),
        (["small", "large", "--device", "3"], 3, "device 3"),
        (["small", "large", "-o", "no/such/place.html"], 3, "no/such/place.html"),
    ],
)
def test_mistakes_are_one_sentence(
    files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], code: int, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "page.html").write_text("<!DOCTYPE html>\n<p>")
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken.json").write_text(dumps(sample()[0])[:5000])
    (tmp_path / "explain.json").write_text('{"schema": "memprof.explain/1", "allocations": []}')
    (tmp_path / "newer.json").write_text('{"schema": "memprof.report/9"}')
    (tmp_path / "lacking.json").write_text('{"schema": "memprof.report/1", "peak": {}}')
    wrong = sample()[0]
    wrong["peak"]["categories"]["weights"] += 1
    (tmp_path / "wrong.json").write_text(dumps(wrong))
    text = dumps(sample()[0])
    (tmp_path / "huge.json").write_text(text.replace('"max_requested_bytes": ', f'"max_requested_bytes": {"9" * 400}'))
    (tmp_path / "endless.json").write_text(text.replace('"beta": 0.0', '"beta": 1e999'))
    deep = "[" * 800 + "]" * 800
    (tmp_path / "deep.json").write_text(text.replace('"beta": 0.0', f'"beta": {deep}'))
    (tmp_path / "cut.json.gz").write_bytes(gzip.compress(text.encode())[:-200])
    (tmp_path / "noise.bin").write_bytes(bytes(range(256)))
    named = [files.get(a, a) for a in arguments]
    result = call("compare", *named)
    assert result.exit_code == code, result.output
    assert words in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


ODD: tuple[Any, ...] = (None, 0, -1, 2**63, 1.5, "", "\x1b[31m</script>", [], {}, [None], {"a": 1}, True, "generate")


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in plain data, of lists the first two entries' only."""
    items = value.items() if isinstance(value, dict) else enumerate(value[:2]) if isinstance(value, list) else ()
    return [path, *[place for key, item in items for place in places(item, (*path, key))]]


@pytest.mark.parametrize("seed", range(40))
def test_damaged_reports_never_end_in_a_traceback(files: dict[str, Path], tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    data = json.loads(dumps(sample("trace" if seed % 3 else "cuda")[0]))
    for _ in range(1 + seed % 3):
        *path, last = rng.choice(places(data)[1:])
        there = data
        for key in path:
            there = there[key]
        if isinstance(there, dict) and rng.random() < 0.4:
            del there[last]
        else:
            there[last] = copy.deepcopy(rng.choice(ODD))
    (tmp_path / "damaged.json").write_text(json.dumps(data))
    result = call("compare", tmp_path / "damaged.json", files["lean"], "-o", tmp_path / "page.html")
    assert result.exit_code in (0, 3), result.exception
    assert (tmp_path / "page.html").exists() is (result.exit_code == 0)


def test_redact_takes_out_who_and_where(tmp_path: Path) -> None:
    paths = []
    for name, size in (("a", MIB), ("b", 2 * MIB)):
        run = SnapshotBuilder()
        run.alloc(size, "main")
        run.events[-1]["frames"][0]["filename"] = "/home/lovelace/secret-project/train.py"
        config = {
            "hub_token": f"hf_abcdefghijklmnopqrst{name}",
            "beta": size / MIB,
            "output_dir": f"/home/lovelace/{name}",
        }
        paths.append(run.save(tmp_path / f"{name}.pickle", {"schema": "memprof.snapshot/1", "config": config}))
    page = tmp_path / "page.html"
    assert "lovelace" in call("compare", *paths, "--json", "-").stdout
    result = call("compare", *paths, "--json", "-", "-o", page, "--redact")
    assert result.exit_code == 0
    data = json.loads(result.stdout)
    validate(data)
    for private in ("lovelace", "secret-project", "hf_abcdefghijklmnopqrst", str(tmp_path)):
        assert private not in result.stdout + page.read_text(encoding="utf-8")
    assert data["config_diff"][0]["setting"] == "beta"
    assert data["allocations_only_in"][0]["allocations"][0]["stack"] == ["…/train.py:1 main"]


def test_comparing_imports_no_torch(files: dict[str, Path]) -> None:
    import subprocess
    import sys

    code = (
        "import sys; from memprof.cli import main\n"
        f"main(['compare', {str(files['small'])!r}, {str(files['large'])!r}], standalone_mode=False)\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
