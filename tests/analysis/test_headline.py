"""The headline: each place named beside the share it really holds, and a verdict that is the answer."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from memprof.advice.analyze_with_advice import analyze as analyze_with_advice
from memprof.analysis.allocations.places import place_of, users_line
from memprof.analysis.analysis import analyze
from memprof.analysis.headline import _cause, _out_of_memory, missing_bytes, peak_phase, peak_words
from memprof.analysis.peaks.next_step import next_step
from memprof.report import Report
from memprof.report.advice import Place
from memprof.report.codec import from_builtins, to_builtins
from memprof.report.run import OutOfMemory
from memprof.snapshot import snapshot_from_raw
from memprof.units import amount
from memprof.vocabulary import Category, Phase
from tests.report.plain import as_report, headline_of, with_headline
from tests.reports.sample import sample
from tests.synthetic import SnapshotBuilder, frame

GIB = 2**30
MIB = 2**20
_FEW = ("cs336-medium-train-ctx1024-t211", "linear-grad-t24", "sketchkv-llama-kvcache-t24")
# Written apart from place_of: a line of Python that is not of a package that carries out others' lines.
_PYTHON = re.compile(r"\.py:\d+")
_PACKAGE = re.compile(r"/(?:site|dist)-packages/(\w+)/")
_CARRIERS = {"einops", "einx", "jaxtyping", "beartype", "accelerate", "peft", "bitsandbytes", "lightning", "triton"}


def _place(stack: list[str]) -> str | None:
    for line in stack:
        package = _PACKAGE.search(line)
        name = package.group(1) if package else ""
        carried = name in _CARRIERS or (name == "torch" and "/torch/optim/" not in line)
        carried = carried or (name == "transformers" and "/transformers/models/" not in line)
        library = line.startswith("<") or (not package and "/lib/python3" in line)
        if _PYTHON.search(line) and not carried and not library:
            return line
    return None


def _check(path: Path) -> None:
    """Hold every share of a snapshot's headline against ``memprof explain --all``."""
    told = subprocess.run(
        [sys.executable, "-m", "memprof", "explain", str(path), "--all", "--format", "json"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    report = analyze(path).to_dict()
    rows = json.loads(told.stdout)["allocations"]
    for place in report["headline"]["places"]:
        mine = [a for a in rows if _place(a["stack"]) == place["frame"]]
        category = max({a["category"] for a in mine}, key=lambda c: sum(a["bytes"] for a in mine if a["category"] == c))
        held = sum(a["bytes"] * a.get("count", 1) for a in mine if a["category"] == category)
        assert held == place["bytes"], place
        assert place["share"] == pytest.approx(held / report["peak"]["categories"][category], abs=1e-4)
        cause = report["headline"]["cause"]
        assert amount(place["bytes"]) in cause or ("many places" in cause and place != report["headline"]["places"][0])


@pytest.mark.parametrize("name", _FEW)
def test_places_hold_what_the_headline_says(shared: Path, name: str) -> None:
    _check(shared / "snapshots" / f"{name}.pickle")


def test_a_place_that_holds_nothing_is_no_cause(shared: Path) -> None:
    """Activation gradients without a stack, and 512 bytes of them with one: "0% from run_resnet50_snapshot.py:85"."""
    found = analyze(shared / "snapshots" / "resnet50-pytorchblog-t22.pickle").to_dict()["headline"]
    assert found["places"] == []
    assert " from " not in found["cause"]


@pytest.mark.heavy
def test_places_of_every_snapshot(shared: Path) -> None:
    for path in sorted([*(shared / "snapshots").glob("*.pickle"), *(shared / "truth").glob("*.pickle")]):
        _check(path)


def test_a_place_is_the_models_line_not_plumbing() -> None:
    site = "/v/lib/python3.11/site-packages"
    model = f"{site}/transformers/models/llama/modeling_llama.py:215 forward"
    cast = f"{site}/peft/tuners/tuners_utils.py:9 _cast_input_dtype"
    call = f"{site}/transformers/integrations/sdpa_attention.py:96 sdpa_attention_forward"
    assert place_of([f"{site}/torch/nn/functional.py:1 linear", cast, model, "/home/me/train.py:3 main"]) == model
    assert place_of([call, model]) == model
    assert place_of([cast]) == cast  # nothing else is there
    assert place_of(["??:0 at::native::add"]) == ""
    command = [f"{site}/click/core.py:911 invoke", f"{site[: site.rindex('/lib/')]}/bin/memprof:8 <module>"]
    assert place_of(command) == users_line(command) == ""  # memprof itself made it
    assert place_of([model, *command]) == model


def test_each_place_has_its_own_share() -> None:
    """6 and 3 blocks of 16 MiB are made at two lines, 1 at a third: the first alone holds half."""
    builder = SnapshotBuilder()
    for count, line in ((6, 174), (3, 181), (1, 190)):
        for _ in range(count):
            builder._block(16 * MIB, [frame("forward", "models.py", line)])
    found = analyze(snapshot_from_raw(builder.raw())).to_dict()["headline"]
    assert [(p["frame"], p["bytes"], p["share"]) for p in found["places"]] == [
        ("models.py:174 forward", 96 * MIB, 0.6)
    ]  # fmt: skip
    assert ", 96.0 MiB of it in forward (models.py:174)." in found["cause"]


def _sample(source: dict[str, Any] | None = None, peak: dict[str, Any] | None = None, **parts: Any) -> Report:
    """The sample's report with other values; its peak lists no allocations and has no advice."""
    report = sample()[0]
    none = {"allocations": [], "largest": [], "findings": [], "guessed": {}, "pending_free_bytes": 0}
    more = {"advice": [], "headline": None, "oom": None, **parts}
    changed = {"source": report["source"] | (source or {}), "peak": report["peak"] | none | (peak or {})}
    return as_report({**report, **changed, **more})


def test_places_are_said_of_their_own_category_alone() -> None:
    """Weights stand beside the activations that line 11 makes: it made none of the weights."""
    categories = {"weights": 110 * MIB, "activations": 90 * MIB}
    report = _sample({"history": "complete"}, {"active_bytes": 200 * MIB, "categories": categories}, phases=[])
    place = Place(frame="train.py:11 forward", bytes=90 * MIB, share=1.0)
    assert _cause(report, Category.ACTIVATIONS, [place]).endswith(
        "of activations (45%), 90.0 MiB of the activations in forward (train.py:11)."
    )


def test_a_guess_is_called_one_and_a_dump_has_no_peak() -> None:
    peak = {"active_bytes": 200 * MIB, "reserved_bytes": 240 * MIB, "guessed": {"weights": 55 * MIB},
            "categories": {"weights": 110 * MIB, "kv_cache": 90 * MIB}}  # fmt: skip
    words = "110 MiB of weights (55% of it) and 90.0 MiB of KV cache (45%)."
    dump = _sample({"history": "none"}, peak, phases=[])
    assert _cause(dump, Category.KV_CACHE, []) == f"{words} Inferred: weights."
    known = _sample({"history": "none"}, peak | {"guessed": {"weights": 54 * MIB}}, phases=[])
    assert _cause(known, Category.KV_CACHE, []) == words


SAID = {
    # A dump: no peak, what lies idle, and what to do about both.
    "cs336-state-only-51g-t26": ("51.30 GiB; the peak before it is not known", "19.39 of the 70.69 GiB reserved are",
                                 "empty_cache() gives 17.68 GiB back", "_record_memory_history(max_entries=100000)"),
    # Its own empty_cache() gave that back before the recording's first allocation.
    "cs336-compile-fwd-ctx256-t26": ("59.00 GiB were reserved before the peak and handed back: 21.27 are reserved at",),
    "flexgen-opt1.3b-a-t20": ("made by the same line: pytorch_backend.py:195 ran once for each", "share one copy"),
    "cs336-2.7b-fullstep-ctx512-t26": ("27.87 GiB of activations (42% of these 66.73 GiB)", "checkpointing"),
    "cs336-2.7b-fwd-ctx256-amp-t26": ("6.75 GiB of activations (26%) and 6.80 GiB of weight casts (26%)",
                                      "autocast without its cache", "saves 12.19 GiB", "cache_enabled=False"),
    "SYNTHETIC-mosaic-output": ("The purpose of 2.10 GiB (100%) is unknown",),
    "sketchkv-llama-kvcache-t24": ("2.71 GiB of KV cache (18%), ", " of it in ", "(cache_utils_V2.py:"),
    "tomi-opt-toy-t23": ("17.2 MiB of workspace (100% of the peak)", "Nothing to change"),
    "linear-grad-t24": ("1.12 GiB of activations (27%), allocated at profile_grad.py:11 with what they hold, are left",
                        "How: del the variable"),
}  # fmt: skip


@pytest.mark.parametrize("name", SAID)
def test_verdict_cause_and_action_speak_of_the_same_bytes(shared: Path, name: str) -> None:
    found = analyze_with_advice(shared / "snapshots" / f"{name}.pickle").to_dict(0)["headline"]
    words = " ".join(found[part] for part in ("verdict", "cause", "action"))
    for said in SAID[name]:
        assert said.lower() in words.lower()


def test_two_moments_of_a_cuda_recording_without_phases_are_no_purpose() -> None:
    """Blocks of unknown lines, some freed and some kept: their lifetimes alone say nothing."""
    builder = SnapshotBuilder()
    kept = [builder.alloc(16 * MIB, "foo", "bar") for _ in range(4)]
    builder.free(builder.alloc(MIB, "baz"))
    builder.free(kept[0])
    peak = analyze(snapshot_from_raw(builder.raw())).to_dict()["peak"]
    assert peak["categories"]["unattributed"] == peak["active_bytes"]


@pytest.mark.parametrize(
    ("history", "events", "words"),
    [("none", 0, "Allocated at the dump"), ("started_late", 1, "Allocated at the dump"),
     ("started_late", 2, "Peak allocated memory"), ("complete", 1, "Peak allocated memory")],
)  # fmt: skip
def test_a_single_event_is_no_history(history: str, events: int, words: str) -> None:
    assert peak_words(_sample({"history": history, "events": events, "kind": "cuda"}).source) == words


def _oom(**known: Any) -> OutOfMemory:
    return from_builtins({"phase": "other", "step": None, "stack": [], **known}, OutOfMemory)


def test_running_out_in_no_known_phase_names_none() -> None:
    oom = _oom(requested_bytes=GIB, device_free_bytes=None)
    assert _out_of_memory(oom) == "Out of memory: 1.00 GiB did not fit"
    assert _out_of_memory(replace(oom, phase=Phase.FORWARD)) == "Out of memory in forward: 1.00 GiB did not fit"


def test_a_phase_that_nothing_tells_apart_is_not_named() -> None:
    span = sample()[0]["phases"][0]
    other, forward = ({**span, "phase": phase} for phase in ("other", "forward"))
    stacks, marks = {"phases_known_by": "stacks"}, {"phases_known_by": "marks"}
    assert peak_phase(_sample(stacks, {"phase": "other"}, phases=[other])) is None
    assert peak_phase(_sample(stacks, {"phase": "other"}, phases=[other, forward])) == "other"
    assert peak_phase(_sample(marks, {"phase": "other"}, phases=[other])) == "other"


_AHEAD = {"still": {"gradients": 5 * GIB}, "moment": "backward", "needed_bytes": 9 * GIB, "available_bytes": 4 * GIB,
          "short_bytes": 5 * GIB}  # fmt: skip


@pytest.mark.parametrize(
    ("oom", "missing"),
    [
        ({"requested_bytes": 3 * GIB, "device_free_bytes": GIB, "fits_defragmented": False}, 2 * GIB),
        ({"requested_bytes": 3 * GIB, "device_free_bytes": GIB, "fits_defragmented": True}, 0),
        ({"requested_bytes": GIB, "device_free_bytes": 0, "ahead": _AHEAD}, 5 * GIB),
        ({"requested_bytes": GIB, "device_free_bytes": 9 * GIB, "limit_bytes": 8 * GIB,
          "reserved_bytes": 8 * GIB - MIB}, GIB - MIB),
        ({"requested_bytes": GIB, "device_free_bytes": None}, 0),
    ],
)  # fmt: skip
def test_what_was_missing(oom: dict[str, Any], missing: int) -> None:
    assert missing_bytes(_oom(**oom)) == missing


def test_an_oom_begins_with_what_is_missing() -> None:
    builder = SnapshotBuilder()
    builder.alloc(512 * MIB, "forward")
    builder._event("oom", 0, 64 * MIB, [])
    builder.events[-1]["device_free"] = 16 * MIB
    report = analyze(snapshot_from_raw(builder.raw())).to_dict()
    assert report["headline"]["verdict"].startswith("Out by 48.0 MiB in ")
    assert headline_of({**report, "headline": None})["places"] == report["headline"]["places"]


def test_places_that_hold_little_together_are_said_to_be_many() -> None:
    builder = SnapshotBuilder()
    builder.alloc(320 * MIB, "forward")
    report = analyze(snapshot_from_raw(builder.raw())).to_dict()
    report["headline"]["places"] = [{"frame": f"a.py:{i} f", "bytes": 16 * MIB, "share": 0.05} for i in range(1, 5)]
    assert ", from many places, at most 16.0 MiB from one." in headline_of(report)["cause"]
    report["headline"]["places"][0] |= {"bytes": 128 * MIB, "share": 0.4}
    assert ", 128 MiB of it in f (a.py:1), 16.0 MiB in f (:2)" in headline_of(report)["cause"]


def test_places_follow_the_category_of_a_new_first_change(shared: Path) -> None:
    """Simulated advice may begin elsewhere: the places of the optimizer's state are none of the weights'."""
    report = analyze_with_advice(shared / "snapshots" / "flexgen-opt1.3b-a-t20.pickle").to_dict()
    report["headline"]["places"] = [{"frame": "adam.py:1 step", "bytes": MIB, "share": 0.5}]
    (place,) = with_headline(report)["headline"]["places"]
    assert place["frame"].endswith("pytorch_backend.py:195 allocate")


def test_categories_are_named_until_half_is(shared: Path) -> None:
    """A quarter of the peak is no cause: what holds as much beside it is named too."""
    found = analyze(shared / "snapshots" / "resnet50-pytorchblog-t22.pickle").to_dict()
    shares = [float(n) for n in re.findall(r"\((\d+(?:\.\d+)?)%", found["headline"]["cause"])]
    assert len(shares) > 1
    assert 50 <= sum(shares) <= 100


def _with_phases(*rows: tuple[str, int, int], **more: Any) -> Report:
    """A report with phases, their peaks and the optimizer state in them, GiB."""
    span = sample()[0]["phases"][0]
    phases = [
        {**span, "phase": p, "peak_bytes": n * GIB, "categories": {"optimizer_state": s * GIB}} for p, n, s in rows
    ]
    return _sample(None, {"active_bytes": max(n for _, n, _ in rows) * GIB}, phases=phases, **more)


def test_a_first_step_tells_of_the_next() -> None:
    first = [("load", 12, 0), ("forward", 41, 0), ("backward", 40, 0), ("optimizer_step", 51, 25)]
    following = next_step(_with_phases(*first))
    assert following is not None
    assert (following.phase, following.peak_bytes) == ("forward", 66 * GIB)
    assert next_step(_with_phases(*first, ("forward", 66, 25))) is None  # it was seen
    assert next_step(_with_phases(("forward", 41, 25), ("optimizer_step", 51, 25))) is None
    assert next_step(_with_phases(("forward", 20, 0), ("optimizer_step", 51, 25))) is None  # no higher
    failed = to_builtins(_oom(requested_bytes=GIB, device_free_bytes=None, phase="optimizer_step"))
    assert next_step(_with_phases(*first, oom=failed)) is None


def test_the_verdict_of_a_first_step(shared: Path) -> None:
    """ "Peak 51.23 GiB", of a run that needs 66 from its second step on."""
    found = analyze(shared / "snapshots" / "cs336-2.7b-fullstep-ctx512-t26.pickle").to_dict()["headline"]
    assert "; about 66.73 GiB in forward from the next step on, beside the optimizer's state" in found["verdict"]
