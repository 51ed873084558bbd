"""What a user's own dicts say: ``torch.cuda.memory._set_memory_metadata({...})``, JSON in torch 2.14 and later."""

from __future__ import annotations

import json

import pytest

from memprof.analysis.analysis import analyze
from memprof.attribution.tags import parse_tag
from memprof.snapshot import snapshot_from_raw
from memprof.vocabulary import Category
from tests.attribution.runs import CALL, LAYER, MAIN, PARAMETERS, Run
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


VLLM = ["vllm/v1/worker/gpu_model_runner.py:4000 _allocate_kv_cache_tensors", "vllm/entrypoints/llm.py:300 __init__"]


def owner(address: int, category: str, name: str, time_us: int) -> list[object]:
    return [address, time_us, category, None, name]


def test_an_engines_cache_of_whole_numbers_is_a_cache() -> None:
    run = Run()
    tag = "memprof:phase=load;region=outside;shape=1048576;dtype=int8;op=aten.zeros.default"
    pool = run.alloc(1 << 20, [*VLLM, *MAIN], metadata=tag)
    ids = run.alloc(1 << 12, MAIN, metadata="memprof:phase=other;region=outside;shape=8x64;dtype=int64")
    result = run.attribute()
    assert (result.category(pool), result.category(ids)) == (Category.KV_CACHE, Category.INPUTS)


def test_a_second_model_that_gets_no_gradient_is_a_reference() -> None:
    for names in ("same", "other"):
        run = Run()
        policy = [run.ghost(size, Category.WEIGHTS) for size in PARAMETERS]
        other = [run.ghost(size, Category.REFERENCE_MODEL) for size in PARAMETERS]
        seen = [owner(a, "weights", f"model.{i}.weight", 1_000_001) for i, a in enumerate(policy)]
        prefix = "model." if names == "same" else ""
        seen += [owner(a, "weights", f"{prefix}{i}.weight", 1_000_002) for i, a in enumerate(other)]
        saved = run.alloc(4096, [*LAYER, *MAIN])
        run.free(run.alloc(8, ["torch/autograd/__init__.py:233 _make_grads", *MAIN]))
        grads = [run.alloc(size, [], Category.GRADIENTS) for size in PARAMETERS]
        run.free(saved)
        last = run.builder.time_us
        seen += [owner(a, "gradients", f"model.{i}.weight", last) for i, a in enumerate(grads)]
        result = run.attribute({"owners": seen})
        assert {a: result.category(a) for a in run.truth} == run.truth


def test_keys_and_values_in_buffers_are_a_cache() -> None:
    run = Run()
    weight = run.ghost(1 << 20, Category.WEIGHTS)
    buffers = [run.ghost(1 << 18, Category.KV_CACHE) for _ in range(3)]
    run.free(run.alloc(4096, [CALL, *MAIN]))
    names = ("layers.0.k_cache", "layers.0.attn.kv_cache", "layers.0.values")
    seen = [owner(a, "weights", name, 1_000_001) for a, name in zip(buffers, names, strict=True)]
    result = run.attribute({"owners": [*seen, owner(weight, "weights", "layers.0.key.weight", 1_000_001)]})
    assert {a: result.category(a) for a in run.truth} == run.truth
    assert {result.rule(a) for a in buffers} == {"owner.cache-in-buffer"}
