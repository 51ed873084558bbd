"""What an engine took of the card, from its own log lines."""

from __future__ import annotations

import pytest

from memprof.oom.explain import explain_log
from memprof.oom.knowledge_files import table
from memprof.oom.reading.engine_share import engine_shares

OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 MiB. GPU 6 has a total capacity of 44.53 GiB"
SHARES = table("engines")["share"]


@pytest.mark.parametrize("entry", SHARES, ids=lambda entry: str(entry["find"]))
def test_each_line_is_read_as_its_example_says(entry: dict[str, object]) -> None:
    (share,) = engine_shares(f"one\ntwo\n{entry['example']}\n")
    said = {part: size / 2**30 for part, size in share.parts.items()}
    assert said == pytest.approx(entry["expect"])
    assert (share.engine, share.line) == (entry["engine"], 3)


def test_the_parts_of_one_engine_are_added_up_beside_the_failure() -> None:
    log = "\n".join(str(entry["example"]) for entry in SHARES if entry["engine"] == "SGLang")
    answer = explain_log(f"{log}\n{OOM}\n")
    assert len(answer["failures"]) == 1
    assert answer["engines"][0]["kv_cache_bytes"] == pytest.approx(52.46 * 2**30)
    # 15.27 + 52.46 + 1.23
    assert any("68.96 GiB together (weights 15.27 GiB, KV cache 52.46 GiB" in note for note in answer["notes"])


def test_many_ranks_that_say_the_same_count_once() -> None:
    line = str(SHARES[0]["example"])
    (share,) = engine_shares("\n".join([line] * 64))
    assert share.parts["weights"] == round(20.64 * 2**30)


def test_a_log_without_an_engine_has_no_share() -> None:
    assert explain_log(OOM)["engines"] == []
