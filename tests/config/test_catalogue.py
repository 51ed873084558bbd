"""The packaged configs describe the models they are named after, to the parameter."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from memprof.config.catalogue import catalogue, find_config
from memprof.errors import InputError

# Parameters as the models' own weight files hold them.
PARAMETERS = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": 134_515_008,
    "HuggingFaceTB/SmolLM2-360M-Instruct": 361_821_120,
    "HuggingFaceTB/SmolLM2-1.7B-Instruct": 1_711_376_384,
    "meta-llama/Llama-3.1-8B-Instruct": 8_030_261_248,
    "meta-llama/Llama-3.1-70B-Instruct": 70_553_706_496,
    "meta-llama/Llama-3.2-1B-Instruct": 1_235_814_400,
    "meta-llama/Llama-3.2-3B-Instruct": 3_212_749_824,
    "Qwen/Qwen2.5-0.5B-Instruct": 494_032_768,
    "Qwen/Qwen2.5-1.5B-Instruct": 1_543_714_304,
    "Qwen/Qwen2.5-3B-Instruct": 3_085_938_688,
    "Qwen/Qwen2.5-7B-Instruct": 7_615_616_512,
    "Qwen/Qwen2.5-14B-Instruct": 14_770_033_664,
    "Qwen/Qwen2.5-32B-Instruct": 32_763_876_352,
    "Qwen/Qwen2.5-72B-Instruct": 72_706_203_648,
    "Qwen/Qwen3-0.6B": 596_049_920,
    "Qwen/Qwen3-1.7B": 1_720_574_976,
    "Qwen/Qwen3-4B": 4_022_468_096,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-14B": 14_768_307_200,
    "Qwen/Qwen3-32B": 32_762_123_264,
    "Qwen/Qwen3-30B-A3B": 30_532_122_624,
    "google/gemma-3-270m-it": 268_098_176,
    "google/gemma-3-1b-it": 999_885_952,
    "mistralai/Mistral-7B-Instruct-v0.3": 7_248_023_552,
    "mistralai/Mistral-Nemo-Instruct-2407": 12_247_782_400,
    "mistralai/Mixtral-8x7B-Instruct-v0.1": 46_702_792_704,
    "microsoft/phi-4": 14_659_507_200,
    "microsoft/Phi-4-mini-instruct": 3_836_021_760,
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_models_have_as_many_parameters_as_they_should(name: str) -> None:
    pytest.importorskip("transformers")
    import torch
    from transformers import AutoModelForCausalLM

    from memprof.simulate.trainer.models import load_config

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(load_config(name))
    assert sum(p.numel() for p in model.parameters()) == PARAMETERS[name]


def test_every_entry_is_checked_or_shares_one_that_is() -> None:
    known = catalogue()
    checked = [known[name] for name in PARAMETERS]
    assert all(values in checked for values in known.values())


def test_letter_case_and_organisation_may_be_left_out() -> None:
    assert find_config("qwen/qwen3-8b") == find_config("Qwen/Qwen3-8B") == find_config("Qwen3-8B")


def test_a_folder_and_a_file_are_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 64}))
    assert find_config(str(tmp_path))["hidden_size"] == find_config(str(tmp_path / "config.json"))["hidden_size"] == 64


def test_unknown_names_say_how_to_give_a_config() -> None:
    with pytest.raises(InputError, match=r"no-such/model: not in the catalogue.*hf download no-such/model config"):
        find_config("no-such/model")
    with pytest.raises(InputError, match=r"Similar names in the catalogue: Qwen/Qwen2\.5"):
        find_config("Qwen/Qwen2.5-9B")


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"hidden_size": 3}'])
def test_a_file_that_is_no_config_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(text)
    with pytest.raises(InputError, match=r"not a model's config\.json"):
        find_config(str(file))


@pytest.mark.parametrize("exists", [False, True])
def test_a_script_given_as_a_model_is_named_with_its_option(
    exists: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if exists:
        (tmp_path / "train.py").write_text("import trl\n")
    with pytest.raises(InputError, match=r"train\.py: a script is no model\. .* --script train\.py\.$"):
        find_config("train.py")
