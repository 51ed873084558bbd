"""The table of the largest allocations: folded before it is cut, and whole figures at every width."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from memprof.reports.answers.report import largest
from memprof.reports.document.build import document_of
from memprof.reports.document.model import AllocationRow
from memprof.reports.terminal.screen import console_of, text_of
from memprof.reports.terminal.table import draw_table, shorten_left

from memprof.analysis.analysis import Analysis, analyze
from memprof.units import gib
from tests.report.plain import fold
from tests.reports.document.drawn import render_markdown, render_terminal
from tests.reports.sample import hostile, sample
from tests.reports.test_terminal import same
from tests.reports.typed import build_document, rows_of

WIDTHS = (60, 72, 80, 100, 120)
SNAPSHOTS = sorted(
    p.name for p in (Path(__file__).resolve().parents[2].parent / "shared" / "snapshots").glob("*.pickle")
)


def listed(name: str, mib: int, category: str, evidence: str, *stack: str) -> dict[str, Any]:
    return {
        "address": 0x7F00_0000_0000, "bytes": mib * 2**20, "category": category, "detail": None, "name": name or None,
        "evidence": evidence, "rule": None, "alternatives": [], "phase": "forward", "born_us": 1, "died_us": 2,
        "retained": False, "tag": None, "stack": list(stack),
    }  # fmt: skip


def peft() -> tuple[AllocationRow, ...]:
    """Names as PEFT makes them, a file whose name alone is long, and a size of seven digits."""
    layers = [f"base_model.model.model.layers.{i}.mlp.down_proj.base_layer.weight" for i in range(28)]
    adapters = [f"base_model.model.model.layers.{i}.self_attn.q_proj.lora_A.default.weight" for i in range(28)]
    found = [listed(name, 45, "weights", "fingerprint", "/v/modeling_utils.py:5021 from_pretrained") for name in layers]
    found += [
        listed(name, 2, "adapters", "owner", "/v/peft/tuners/lora/layer.py:288 update_layer") for name in adapters
    ]
    found += [
        listed("", 900, "loss_logits", "shape", "/v/trl/trainer/grpo_trainer_with_a_long_name.py:11842 _compute_loss"),
        listed("", 1_200_000, "kv_cache", "stack", "/v/transformers/cache_utils.py:118 update"),
    ]
    return rows_of(fold(found), 2**40)


def drawn(rows: tuple[AllocationRow, ...], width: int, colour: bool = False) -> str:
    console = console_of(width, colour)
    found = largest(rows)
    assert found is not None
    console.print(*draw_table(found, width, colour))
    return text_of(console)


@pytest.mark.parametrize("width", WIDTHS)
def test_names_give_way_and_figures_do_not(width: int) -> None:
    text = drawn(peft(), width)
    assert max(map(len, text.split("\n"))) <= width
    for words in ("1171.88", "1.23", "0.05", "0.88", "fingerprint", "×28"):
        assert words in text
    assert ("Allocated at" in text) == (width > 72)
    if width > 72:
        for place in ("modeling_utils.py:5021", "layer.py:288", "grpo_trainer_with_a_long_name.py:11842"):
            assert place in text
    same(f"largest-{width}.txt", text)
    same(f"largest-{width}-colour.txt", drawn(peft(), width, colour=True))


def test_names_lose_their_beginning_at_a_dot() -> None:
    assert shorten_left("layers.*.mlp.weight", 40) == "layers.*.mlp.weight"
    assert shorten_left("base_model.model.layers.*.mlp.weight", 13) == "….mlp.weight"
    assert shorten_left("averyveryverylongname", 6) == "…gname"
    assert [shorten_left("name", n) for n in (0, 1, 2)] == ["", "…", "…e"]


@pytest.mark.parametrize("width", WIDTHS)
def test_reports_keep_their_width_whatever_the_names(width: int) -> None:
    for report, series in (sample(), hostile()):
        text = render_terminal(build_document(report, series), width)
        assert max(map(len, text.split("\n"))) <= width


def analysed(shared: Path, name: str) -> Analysis:
    return analyze(shared / "snapshots" / name)


@pytest.mark.parametrize("name", SNAPSHOTS)
def test_every_table_begins_with_the_largest_of_the_json(shared: Path, name: str) -> None:
    analysis = analysed(shared, name)
    report = json.loads(json.dumps(analysis.to_dict()))
    first = report["peak"]["largest"][0]
    document = build_document(report)
    assert document.allocations[0].bytes == first["bytes"] == document_of(analysis).allocations[0].bytes
    assert first["bytes"] >= report["peak"]["allocations"][0]["bytes"]
    size = gib(first["bytes"])
    for width in WIDTHS:
        lines = render_terminal(document, width).split("\n")
        at = next(i for i, line in enumerate(lines) if line.startswith("Largest alive"))
        assert re.search(rf"(?<![\d.]){re.escape(size)}  {first['evidence']}\b", lines[at + 1])
        assert max(map(len, lines)) <= width
        assert not re.search(r"\d…", "\n".join(lines[at : at + 11]))
    table = render_markdown(document).split("| Largest alive at the ")[1].split("\n")
    assert f"| {size.replace('<', '&lt;')} |" in table[2]


@pytest.mark.parametrize("name", SNAPSHOTS)
def test_groups_add_up_to_the_categories(shared: Path, name: str) -> None:
    analysis = analysed(shared, name)
    sums: dict[str, int] = {}
    blocks = 0
    for group in analysis.largest(None):
        sums[group.category] = sums.get(group.category, 0) + group.bytes
        blocks += group.count
        assert group.bytes == group.count * group.each_bytes
    peak = analysis.peak
    assert sums == {c: n for c, n in peak.categories.items() if n}
    assert blocks == len(peak.rows)


def test_any_number_of_alike_blocks_is_listed() -> None:
    """A report's JSON may give any count: the number of blocks allocates nothing."""
    (alike,) = fold([listed("w", 1, "weights", "stack", "train.py:1 <module>")])
    (row,) = rows_of([{**alike, "count": 2**40}], 2**40)
    assert row.count == 2**40
    assert len(row.lives) < 2**20
