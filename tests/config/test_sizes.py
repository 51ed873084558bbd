"""One reader of sizes and cards: the same words mean the same bytes wherever a capacity is given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from memprof.integrations.callback.options import Options

from memprof.cli.group import main
from memprof.config import gpus
from memprof.config.gpus import capacity_bytes, find_gpu
from memprof.config.settings import Settings
from memprof.errors import UsageError
from memprof.files import read_toml
from memprof.recording.api import make_recorder
from memprof.units import parse_size
from tests.reports.sample import sample

BARE = r"^24 what\? 24GB or 24GiB\.$"
RTX_4090 = 24080 * 2**20


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [
        ("24GB", 24 * 10**9), ("24G", 24 * 10**9), ("24 gb", 24 * 10**9), ("24GiB", 24 * 2**30), ("24Gi", 24 * 2**30),
        ("1.5T", 15 * 10**11), ("600MiB", 600 * 2**20), ("512B", 512), ("25769803776B", 24 * 2**30), ("0", 0),
    ],
)  # fmt: skip
def test_sizes(text: str, n_bytes: int) -> None:
    assert parse_size(text) == n_bytes


@pytest.mark.parametrize(("size", "gib"), [("400MB", 0.37), ("1MiB", 1 / 1024), ("0.2GB", 0.19)])
def test_a_gpu_may_be_smaller_than_a_gibibyte(size: str, gib: float) -> None:
    """Small capacities stand for GPUs in examples; no GPU sold in whole gigabytes is compared with them."""
    gpu = find_gpu(size)
    assert gpu.total_bytes / 2**30 == pytest.approx(gib, abs=0.01)
    assert gpus.older_note(gpu) is None


@pytest.mark.parametrize("text", ["", "GB", "24GBs", "24 G B", "-24GB", "much"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(UsageError, match="is not a size"):
        parse_size(text)


def test_a_number_that_may_be_bytes_is_refused_too() -> None:
    with pytest.raises(UsageError, match=r"^25769803776 what\? Write 25769803776B if it is bytes\.$"):
        parse_size("25769803776")


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [
        ("4090", RTX_4090), ("RTX 4090", RTX_4090), ("rtx-4090", RTX_4090), ("NVIDIA GeForce RTX 4090", RTX_4090),
        ("H100", 81079 * 2**20), ("NVIDIA H100 80GB HBM3", 81079 * 2**20), ("NVIDIA A100-SXM4-80GB", 81050 * 2**20),
        ("Tesla T4", 15095 * 2**20), ("24GB", 24 * 10**9), (RTX_4090, RTX_4090),
    ],
)  # fmt: skip
def test_a_capacity_is_a_size_a_card_or_bytes(text: str | int, n_bytes: int) -> None:
    assert capacity_bytes(text) == n_bytes


def _callback(capacity: Any) -> int | None:
    options: dict[str, Any] = {"output_dir": None, "max_disk": None, "max_entries": None, "stacks": "python"}
    rest = {name: None for name in Options.__dataclass_fields__ if name not in {*options, "capacity"}}
    return Options.of(**options, capacity=capacity, **rest).capacity


def _recorder(capacity: Any) -> None:
    pytest.importorskip("torch")
    make_recorder("cpu", "trace", capacity=capacity)


@pytest.mark.parametrize("reads", [capacity_bytes, find_gpu, parse_size, _callback, _recorder])
def test_a_bare_number_is_refused_wherever_python_takes_a_capacity(reads: Any) -> None:
    with pytest.raises(UsageError, match=BARE):
        reads("24")


@pytest.mark.parametrize("reads", [capacity_bytes, _callback, _recorder])
def test_twenty_four_bytes_are_no_capacity(reads: Any) -> None:
    with pytest.raises(UsageError, match=BARE):
        reads(24)


def test_host_memory_is_a_size_too() -> None:
    with pytest.raises(UsageError, match=BARE):
        Settings(model="m", host_memory="24")


def test_commands_refuse_a_bare_number_and_know_cards(tmp_path: Path) -> None:
    pytest.importorskip("trl")
    from memprof.report.codec import dumps

    report, script = tmp_path / "report.json", tmp_path / "train.py"
    report.write_text(dumps(sample()[0]), encoding="utf-8")
    script.write_text("", encoding="utf-8")
    both = [str(report), str(report)]
    for command in (
        ["compare", *both, "--capacity", "24"],
        ["run", "--capacity", "24", str(script)],
        ["run", "--max-disk", "24", str(script)],
        ["advise", str(report), "--gpu", "24"],
        ["plan", "--model", "Qwen/Qwen3-8B", "--gpu", "24"],
        ["simulate", "--model", "Qwen/Qwen3-8B", "--gpu", "24"],
    ):
        done = CliRunner().invoke(main, command)
        assert (done.exit_code, "24 what? 24GB or 24GiB." in done.output) == (2, True), (command, done.output)
    done = CliRunner().invoke(main, ["compare", *both, "--capacity", "RTX 4090"])
    assert done.exit_code == 0
    assert "23.52 GiB" in done.output


def test_every_card_has_a_whole_row() -> None:
    cards = read_toml(Path(gpus.__file__).with_name("cards.toml"))
    wanted = {"mib", "capability", "processors", "half", "single", "memory", "host"}
    for name, row in cards["cards"].items():
        assert row.keys() - {"maker"} == wanted, name
        assert row.get("maker", "amd") in ("amd", "intel"), name
        assert all(row[part] > 0 for part in wanted - {"capability"}), name
        assert len(row["capability"]) == 2, name
        assert find_gpu(name).name == name
    for other, name in cards["aliases"].items():
        assert find_gpu(other).name == name, other


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("3090 Ti", "RTX 3090 Ti"), ("3090ti", "RTX 3090 Ti"), ("2080ti", "RTX 2080 Ti"), ("1080ti", "GTX 1080 Ti"),
        ("3060ti", "RTX 3060 Ti"), ("3070 Ti", "RTX 3070 Ti"), ("3080ti", "RTX 3080 Ti"), ("5060ti", "RTX 5060 Ti 8GB"),
        ("4060 Ti", "RTX 4060 Ti 8GB"), ("4060 Ti 16GB", "RTX 4060 Ti 16GB"), ("rtx4060ti-16g", "RTX 4060 Ti 16GB"),
        ("4090 24GB", "RTX 4090"), ("T4 16GB", "T4"), ("V100 32GB", "V100-32GB"), ("Tesla P100-PCIE-16GB", "P100"),
        ("NVIDIA GeForce RTX 3080 Ti Laptop GPU", "RTX 3080 Ti Laptop"), ("RTX 3080 Ti mobile", "RTX 3080 Ti Laptop"),
        ("L40", "L40"), ("A30", "A30"), ("RTX A4000", "A4000"), ("a5000", "A5000"),
    ],
)  # fmt: skip
def test_a_name_is_no_size(text: str, name: str) -> None:
    assert find_gpu(text).name == name


def test_every_name_is_found_in_the_ways_people_write_it() -> None:
    """Without its make, in lower case, without spaces, with NVIDIA's or a count before it."""
    for gpu in gpus.known_gpus():
        bare = gpu.name.removeprefix("RTX ").removeprefix("GTX ")
        for text in (
            gpu.name.lower(),
            gpu.name.replace(" ", ""),
            gpu.name.replace(" ", "-"),
            bare,
            f"NVIDIA {gpu.name}",
        ):
            found = find_gpu(text)
            assert found.name == gpu.name, text
            assert 2**30 < found.total_bytes < 2**39, text
        assert gpus.split_count(f"4x{bare}") == (4, bare)
        assert gpus.split_count(f"{bare} x 2") == (2, bare)


@pytest.mark.parametrize(
    "text", ["3090 Tii", "3090T", "24 T", "9TB", "0GB", "-24GB", "24GBs", "RTX 3080 12GB", "4090 48GB", ""]
)
def test_what_is_neither_a_name_nor_a_memory_size(text: str) -> None:
    with pytest.raises(UsageError):
        find_gpu(text)


@pytest.mark.parametrize(
    "text", ["MacBook", "MacBook Pro M3", "M3 Max", "m4", "Apple M2 Ultra", "mps", "TPU v4", "cpu"]
)
def test_other_devices_are_not_supported(text: str) -> None:
    with pytest.raises(UsageError, match=r"is not supported: memprof simulates only CUDA .* ROCm .* XPU"):
        find_gpu(text)


@pytest.mark.parametrize(
    ("text", "count", "single"),
    [
        ("2x4090", 2, "4090"), ("8xH100", 8, "H100"), ("8 x H100", 8, "H100"), ("8×A100 80GB", 8, "A100 80GB"),
        ("H100:4", 4, "H100"), ("2*24GB", 2, "24GB"), ("H100", 1, "H100"), ("RTX 4090", 1, "RTX 4090"),
    ],
)  # fmt: skip
def test_several_gpus(text: str, count: int, single: str) -> None:
    assert gpus.split_count(text) == (count, single)
    if count > 1:
        with pytest.raises(UsageError, match=f"means {count} GPUs"):
            find_gpu(text)


def test_a_count_is_the_number_of_gpus() -> None:
    pytest.importorskip("trl")
    for command in ("plan", "simulate"):
        asked = [command, "--model", "Qwen/Qwen3-8B", "--gpu", "8xH100", "--gpus", "4"]
        done = CliRunner().invoke(main, asked)
        assert (done.exit_code, "--gpu 8xH100 means 8 GPUs, and --gpus is 4" in done.output) == (2, True), done.output
