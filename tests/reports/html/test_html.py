"""The page as text: well-formed, escaped, self-contained, small. What it does in a browser is in test_browser.py."""

from __future__ import annotations

import base64
import gzip
import hashlib
import itertools
import json
import re
import stat
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from memprof.reports.document.text import plain
from memprof.reports.html.advice import is_code
from memprof.reports.html.elements import el, join
from memprof.reports.html.interactive_timeline import pack_columns
from memprof.reports.html.report import render_html, write_html
from plotly.offline import get_plotlyjs

from memprof.errors import InputError
from memprof.files import write_text
from memprof.report.codec import to_json
from memprof.text import clean_text
from tests.reports.sample import HOSTILE, hostile, sample
from tests.reports.typed import build_document, report_of

VOID = {"meta", "input", "br", "hr", "wbr"}


class Page(HTMLParser):
    """Tags with their attributes, text outside scripts, and whether every element was closed."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.scripts: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        (self.scripts if self.open and self.open[-1] in ("script", "style") else self.words).append(data)


def packed(page: str) -> dict[str, Any]:
    found = re.search(r'id="memprof-data">([A-Za-z0-9+/=]+)</script>', page)
    assert found is not None
    data: dict[str, Any] = json.loads(gzip.decompress(base64.b64decode(found.group(1))))
    return data


def unpacked(timeline: dict[str, Any]) -> dict[str, list[int]]:
    """The columns as the page's script reads them."""
    raw = gzip.decompress(base64.b64decode(timeline["points"]))
    n = timeline["n_points"]
    found = {}
    for c, name in enumerate(timeline["columns"]):
        planes = [raw[(8 * c + b) * n : (8 * c + b + 1) * n] for b in range(8)]
        steps = [int.from_bytes(bytes(p[i] for p in planes), "little", signed=True) for i in range(n)]
        found[name] = list(itertools.accumulate(steps))
    return found


@pytest.fixture(scope="module")
def page() -> str:
    return render_html(build_document(*sample()))


def test_page_is_well_formed_and_says_the_peak_without_scripts(page: str) -> None:
    parsed = Page(page)
    assert parsed.open == []
    words = " ".join(parsed.words)
    for expected in ("6.78", "backward, step 2", "Training memory", "GRPO memory", "KV cache", "yes, to the byte"):
        assert expected in words


def test_page_asks_the_network_for_nothing(page: str) -> None:
    for _, attributes in Page(page).tags:
        for name in ("src", "srcset", "data", "action", "poster"):
            assert name not in attributes
        assert (attributes.get("href") or "#").startswith("#")
    assert "default-src 'none'" in page


def test_policy_allows_the_pages_own_scripts_and_no_others(page: str) -> None:
    policy = next(a["content"] for _, a in Page(page).tags if a.get("http-equiv") == "Content-Security-Policy") or ""
    scripts = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    assert len(scripts) == 1
    scripts.append(get_plotlyjs())
    hashes = [base64.b64encode(hashlib.sha256(s.encode()).digest()).decode() for s in scripts]
    assert re.findall(r"'sha256-([^']+)'", policy) == hashes
    assert "unsafe-eval" not in policy
    assert "script-src 'unsafe-inline'" not in policy


def test_no_inline_handlers(page: str) -> None:
    assert not [name for _, attributes in Page(page).tags for name in attributes if name.startswith("on")]


def test_data_holds_the_report_and_its_peak(page: str) -> None:
    report, _ = sample()
    data = packed(page)
    assert data["report"] == json.loads(to_json(report_of(report)))
    timeline = data["timeline"]
    held = unpacked(timeline)
    stacked = [t["meta"] for t in timeline["figure"]["data"] if t.get("stackgroup")]
    assert sum(held[c][timeline["peak_point"]] for c in stacked) == report["peak"]["active_bytes"]
    assert stacked == [c for c in held if c not in ("event", "time", "phase", "reserved")]


def test_timelines_that_do_not_pack_are_thinned_until_the_page_is_small() -> None:
    """Nothing repeats in it: sizes and categories at random, so every event is news."""
    rng = np.random.default_rng(4)
    report, series = sample()
    n_points = 60_000
    steps = np.zeros((8, n_points), dtype=np.int64)
    steps[rng.integers(0, 8, n_points), np.arange(n_points)] = rng.integers(1, 2**40, n_points)
    columns = np.cumsum(steps, axis=1)
    total = columns.sum(axis=0)
    names = list(series["categories"])[:8]
    series |= {
        "instant": list(range(n_points)),
        "time_us": np.cumsum(rng.integers(1, 2000, n_points)).tolist(),
        "categories": {name: column.tolist() for name, column in zip(names, columns, strict=True)},
        "reserved": (total + rng.integers(0, 2**40, n_points)).tolist(),
        "phase_spans": [],
        "peak_point": int(np.argmax(total)),
    }
    page = render_html(build_document(report, series))
    held = unpacked(packed(page)["timeline"])
    assert len(page.encode()) < 3_000_000
    assert 5000 < len(held["time"]) < n_points
    assert max(map(sum, zip(*(held[name] for name in names), strict=True))) == total.max()


def test_points_are_packed_without_loss() -> None:
    document = build_document(*sample())
    assert document.timeline is not None
    held = unpacked(packed(render_html(document))["timeline"])
    assert held["time"] == list(document.timeline.time_us)
    assert held["reserved"] == list(document.timeline.reserved or ())
    for category, values in document.timeline.categories.items():
        assert held[category] == list(values)
    extremes = [0, 2**62, -(2**62), 1, -1, 2**40 + 7]
    there = unpacked({"points": pack_columns([extremes]), "n_points": len(extremes), "columns": ["x"]})
    assert there == {"x": extremes}


def test_page_is_small(page: str) -> None:
    assert len(page.encode()) < 3_000_000


def test_page_is_the_same_each_time(page: str) -> None:
    assert render_html(build_document(*sample())) == page


def test_hostile_names_are_text() -> None:
    page = render_html(build_document(*hostile()))
    parsed = Page(page)
    kinds = [tag for tag, _ in parsed.tags]
    assert kinds.count("script") == 3  # the data, plotly, the page's own
    assert "img" not in kinds
    assert not [name for _, attributes in parsed.tags for name in attributes if name.startswith("on")]
    words = "".join(parsed.words)
    for name in HOSTILE:
        assert plain(clean_text(name), keep="\n")[1:] in words
    for harmful in ("\x1b", "\u202e", "\u2028", "\x00", "\ud800"):
        assert harmful not in page


def test_report_without_a_timeline_needs_no_plotly() -> None:
    report, _ = sample()
    page = render_html(build_document(report))
    assert "Plotly, Inc" not in page
    assert len(page) < 200_000


def test_markup_escapes_text_and_attributes() -> None:
    assert el("p", {"title": 'a"b<'}, "<&>") == '<p title="a&quot;b&lt;">&lt;&amp;&gt;</p>'
    assert el("p.a b", {"id": 1}, "y") == '<p class="a b" id="1">y</p>'
    assert el("p", {"hidden": True, "id": None, "x": False}) == "<p hidden></p>"
    assert join("<", el("br"), None, ["a", ("b",)]) == "&lt;<br>ab"


def test_writing_replaces_whole_files_only(tmp_path: Path) -> None:
    target = tmp_path / "page.html"
    target.write_text("before")
    write_html(build_document(*sample("trace")), target)
    assert target.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    assert [p.name for p in tmp_path.iterdir()] == ["page.html"]
    assert stat.S_IMODE(target.stat().st_mode) & 0o600 == 0o600


@pytest.mark.parametrize("place", ["missing/page.html", "."])
def test_unwritable_places_are_one_sentence_and_leave_nothing(tmp_path: Path, place: str) -> None:
    with pytest.raises(InputError, match=r"directory"):
        write_text(tmp_path / place, "x")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "setting",
    [
        *("--optim paged_adamw_8bit", "--offload_model true --offload_optimizer true", "gradient_checkpointing=True"),
        *("PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:512", "load_in_4bit: true"),
        *("pip install 'trl>=1.16'", "accelerate launch --use_fsdp --fsdp_version 2 train.py", "a.b=16 a.c=all-linear"),
        *("quantization_config = BitsAndBytesConfig(\n    load_in_4bit=True,\n)", "import torch"),
        *("beta=0  # no reference", "model.gradient_checkpointing_enable()"),
    ],
)
def test_a_setting_to_paste_is_code(setting: str) -> None:
    assert is_code(setting)


@pytest.mark.parametrize(
    "setting",
    [
        *("--compress-weight, or a lower first number of --percent (the share of the weights on the GPU)", ""),
        *("--offload (or --offload-train and --offload-rollout)", "checkpoint activations (torch.utils.checkpoint)"),
        *("a smaller batch", "--lowvram, or --reserve-vram 1.0", "adapter: lora, lora_r: 16", "vae, tiled"),
        *("actor.param_offload and optimizer_offload", "--train_batch_size 1 with more --gradient_accumulation_steps"),
    ],
)
def test_a_sentence_stands_in_no_box_of_code(setting: str) -> None:
    assert not is_code(setting)
