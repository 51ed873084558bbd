"""What a user's own dicts say: ``torch.cuda.memory._set_memory_metadata({...})``, JSON in torch 2.14 and later."""

from __future__ import annotations

import json

import pytest

from memprof.analysis.analysis import analyze
from memprof.attribution.tags import parse_tag
from memprof.snapshot import snapshot_from_raw
from tests.synthetic import SnapshotBuilder

MIB = 1 << 20


def test_a_dict_of_torchs_is_evidence() -> None:
    run = SnapshotBuilder()
    tag = json.dumps({"category": "kv_cache", "phase": "generate", "pool": "mine"}, separators=(",", ":"))
    run.alloc(8 * MIB, "somewhere", metadata=tag)
    run.alloc(4 * MIB, "somewhere")
    report = analyze(snapshot_from_raw(run.raw())).to_dict()
    peak = report["peak"]
    assert (peak["categories"]["kv_cache"], peak["evidence"]["metadata"]) == (8 * MIB, 8 * MIB)
    (tagged,) = [a for a in peak["allocations"] if a["bytes"] == 8 * MIB]
    assert (tagged["phase"], tagged["rule"]) == ("generate", "tag.category")


def test_an_annotation_names_what_lives_at_its_address() -> None:
    """torch 2.14 and later: ``_annotate_tensor`` adds an event; the last that names a category counts."""
    run = SnapshotBuilder()
    run.alloc(8 * MIB, "somewhere", metadata=json.dumps({"category": "inputs"}))
    run.alloc(4 * MIB, "somewhere", metadata="")
    raw = run.raw()
    trace = raw["device_traces"][0]
    born = next(i for i, event in enumerate(trace) if event["action"] == "alloc")
    note = {**trace[born], "action": "annotate", "size": 0, "user_metadata": json.dumps({"category": "kv_cache"})}
    other = {**note, "user_metadata": "packed into the graph"}
    nowhere = {**note, "addr": 1 << 50}
    raw["device_traces"][0] = [note, *trace[: born + 1], note, other, *trace[born + 1 :], nowhere]
    analysis = analyze(snapshot_from_raw(raw))
    (noted,) = [a for a in analysis.to_dict()["peak"]["allocations"] if a["bytes"] == 8 * MIB]
    assert (noted["category"], noted["evidence"], noted["rule"]) == ("kv_cache", "metadata", "tag.category")
    assert not any("annotate" in note for note in analysis.to_dict()["notes"])


@pytest.mark.parametrize(
    "text",
    ["{", "{}", "[1]", '{"phase": 3, "category": ["kv_cache"]}', '{"phase": "nap"}', '{"step": -1}', "{" * 9999, ""],
)
def test_other_metadata_says_nothing(text: str) -> None:
    assert parse_tag(text) == {}
