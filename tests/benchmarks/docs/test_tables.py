"""The documentation's tables of figures are those of the committed results, and the results agree with arithmetic."""

from __future__ import annotations

from pathlib import Path

import pytest
from click import Context, Option

from benchmarks.docs import cli_reference, json_reference
from benchmarks.docs import tables as doc_tables
from memprof.cli import main as memprof
from memprof.config.catalogue import find_config

PAGES = doc_tables.PAGES


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tables_are_those_of_the_results(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert doc_tables.filled(text) == text, "run python -m benchmarks.docs tables"


def test_every_table_stands_on_a_page() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert [name for name in doc_tables.TABLES if f"<!-- table: {name} -->" not in text] == []


def test_the_command_line_reference_is_that_of_the_commands() -> None:
    text = cli_reference.PAGE.read_text(encoding="utf-8")
    assert cli_reference.page() == text, "run python -m benchmarks.docs cli-reference"


def test_the_json_reference_is_that_of_the_schema() -> None:
    text = json_reference.PAGE.read_text(encoding="utf-8")
    assert json_reference.page() == text, "run python -m benchmarks.docs json-reference"


@pytest.mark.parametrize("name", list(memprof.list_commands(Context(memprof))))
def test_every_option_is_in_the_reference(name: str) -> None:
    """The page is made by click's own help formatter: an option it hides or loses is missed here."""
    section = cli_reference.page().split(f"\n## memprof {name}\n")[1].split("\n## ")[0]
    command = memprof.get_command(Context(memprof), name)
    assert command is not None
    options = [p for p in command.params if isinstance(p, Option) and not p.hidden]
    assert [o.opts[-1] for o in options if o.opts[-1] not in section] == []


@pytest.fixture(scope="module")
def parameters() -> tuple[int, int]:
    """Qwen2.5-1.5B: all of them, and those of linear layers but the head."""
    config = find_config("Qwen/Qwen2.5-1.5B-Instruct")
    hidden, wide, layers = config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]
    keys = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    linear = layers * (2 * hidden * hidden + hidden + 2 * (keys * hidden + keys) + 3 * hidden * wide)
    return config["vocab_size"] * hidden + linear + layers * 2 * hidden + hidden, linear


def test_what_stands_is_what_the_formulas_say(parameters: tuple[int, int]) -> None:
    count, linear = parameters
    runs = doc_tables.read("memory_pictures")["runs"]
    full, lora = runs["full"]["optimizer_step_requested"], runs["lora"]["optimizer_step_requested"]
    # Buffers of the rotary embedding are the only other tensors of the model: some hundred bytes.
    assert full["weights"] == pytest.approx(4 * count, abs=4096)
    assert full["reference_model"] == pytest.approx(4 * count, abs=4096)
    assert full["optimizer_state"] == pytest.approx(8 * count, abs=8192)
    assert full["gradients"] == 4 * count
    assert lora["weights"] == pytest.approx(2 * count, abs=4096)
    assert lora.get("reference_model", 0) == 0
    # Rank 16 on every linear layer: 16 x (in + out), in float32, as PEFT makes adapters.
    config = find_config("Qwen/Qwen2.5-1.5B-Instruct")
    hidden, wide = config["hidden_size"], config["intermediate_size"]
    keys = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    ends = 4 * hidden + 2 * (hidden + keys) + 3 * (hidden + wide)
    adapters = 16 * ends * config["num_hidden_layers"]
    assert lora["adapters"] == lora["gradients"] == 4 * adapters
    assert lora["optimizer_state"] == pytest.approx(2 * lora["adapters"], rel=0.01)
    casts = runs["full"]["own_peaks"]["weight_casts"]
    assert 2 * linear <= casts <= 2 * count * 1.01  # under autocast: the layers' and, while it is used, the head's


def test_the_cache_is_what_the_formula_says() -> None:
    config = find_config("Qwen/Qwen2.5-1.5B-Instruct")
    head = config["hidden_size"] // config["num_attention_heads"]
    for name, width in (("full", 4), ("lora", 2)):
        run = doc_tables.read("memory_pictures")["runs"][name]
        token = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * head
        closed = token * 8 * (256 + 768 - 1)
        # One layer's keys or values are there twice while a token is appended; blocks are rounded up.
        assert width <= run["own_peaks"]["kv_cache"] / closed <= width * 1.025
