"""Settings refuse what makes no sense, in a sentence, and are read from files other tools use."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from memprof.cli.commands.plan import _most_gpus
from memprof.cli.simulation_options import settings_of
from memprof.config.from_recording import settings_like
from memprof.config.gpus import find_gpu, known_gpus, note_of, workspace_bytes, workspaces_of
from memprof.config.settings import (
    CHOICES,
    DeviceSettings,
    GenerationSettings,
    ModelSettings,
    Settings,
    SettingsPart,
    ShardingSettings,
    TrainerSettings,
    read_settings,
)
from memprof.errors import InputError, UsageError


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"dtype": "int3"}, "choose from float32, bfloat16"),
        ({"dtype": "nf4"}, "'nf4': 4-bit weights are given by --load-in-4bit --lora-r 16; else choose from float32"),
        ({"dtype": "fp8"}, "'fp8': 8-bit weights are not simulated; else choose from float32"),
        ({"optim": "adam_of_mine"}, "cannot be simulated; choose from adamw_torch_fused"),
        ({"load_in_4bit": True}, "needs an adapter"),
        ({"num_generations": 1, "per_device_train_batch_size": 1}, "compares completions"),
        ({"num_generations": 3}, "not a multiple of --num-generations 3"),
        ({"prompt_length": 0}, "must be at least 1"),
        ({"lora_r": 0}, "must be at least 1"),
        ({"per_device_train_batch_size": "eight"}, "--per-device-train-batch-size 'eight': give a whole number"),
        ({"prompt_length": 64.5}, "--prompt-length 64.5: give a whole number"),
        ({"generation": "vllm", "vllm_gpu_memory_utilization": 1.5}, "above 0, at most 1"),
        *(({"sharding": name}, f"--sharding {name} divides .*: add --gpus 2") for name in CHOICES["sharding"][1:]),
    ],
)
def test_contradictions_are_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Settings(model="m", **values)


@pytest.mark.parametrize(
    ("part", "values", "words"),
    [
        (ModelSettings, {"model": "m", "load_in_4bit": True}, "needs an adapter"),
        (TrainerSettings, {"trainer": "rloo", "recipe": "liger"}, "a loss of GRPO's"),
        (GenerationSettings, {"cache_dtype": "int4"}, "cache-implementation quantized"),
        (ShardingSettings, {"sharding": "zero2"}, "add --gpus 2"),
        (DeviceSettings, {"device": "tpu"}, "choose from cuda, cpu"),
    ],
)
def test_a_part_refuses_what_it_cannot_be(part: type[SettingsPart], values: dict[str, Any], words: str) -> None:
    whole = Settings(model="m")
    assert isinstance(whole, part)
    for kind in (part, Settings):
        with pytest.raises(UsageError, match=words):
            kind(**{"model": "m", **values} if kind is Settings else values)


def test_a_yaml_of_grpo_settings_is_read(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    file = tmp_path / "grpo.yaml"
    file.write_text(
        "model_name_or_path: a/b\nmax_completion_length: 99\nlora_r: 4\nlora_target_modules: q_proj,v_proj\nx: 1\n"
    )
    assert read_settings(file) == {
        "model": "a/b", "completion_length": 99, "lora_r": 4, "lora_target_modules": ("q_proj", "v_proj"),
        "unknown": ("x",),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ({"use_peft": False, "lora_r": 16, "lora_target_modules": "q_proj"}, {}),  # the defaults of TRL's command line
        ({"use_peft": True}, {"lora_r": 16, "lora_dropout": 0.05}),
        ({"use_peft": True, "lora_r": 8, "lora_dropout": 0}, {"lora_r": 8, "lora_dropout": 0.0}),
        ({"model_init_kwargs": {"dtype": "bfloat16"}, "dtype": "float32"}, {"dtype": "bfloat16"}),
        ({"model_init_kwargs": {"torch_dtype": "torch.float16"}}, {"dtype": "float16"}),
        ({"use_vllm": True}, {"generation": "vllm"}),  # TRL 1.16 runs it in the trainer's process
        ({"use_vllm": True, "vllm_mode": "server"}, {"generation": "none"}),
        ({"use_vllm": False, "vllm_mode": "colocate"}, {"generation": "hf"}),
        ({"use_vllm": True, "generation": "none"}, {"generation": "none"}),
        ({"attn_implementation": "eager"}, {"attn": "math"}),
        ({"model_init_kwargs": {"attn_implementation": "flash_attention_2"}}, {"attn": "flash"}),
        ({"bf16": False}, {"mixed_precision": "no"}),
        ({"bf16": False, "fp16": True}, {"mixed_precision": "fp16"}),
        ({"model_init_kwargs": None, "bf16": True}, {"mixed_precision": "bf16"}),
    ],
)
def test_a_config_in_trls_words_means_what_trl_makes_of_it(
    tmp_path: Path, given: dict[str, Any], read: dict[str, Any]
) -> None:
    (tmp_path / "grpo.json").write_text(json.dumps(given))
    assert read_settings(tmp_path / "grpo.json") == read


def test_numbers_are_read_as_trl_reads_them(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    (tmp_path / "a.yaml").write_text('beta: 1e-3\nlora_r: "8"\nreduce_bucket_size: 5.0e+8\nnum_generations: 4.0\n')
    read = read_settings(tmp_path / "a.yaml")
    assert read == {"beta": 0.001, "lora_r": 8, "reduce_bucket_size": 500_000_000, "num_generations": 4}
    assert all(type(read[name]) is int for name in ("lora_r", "reduce_bucket_size", "num_generations"))


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("beta", "x", "--beta 'x': give a number"),
        ("lora_r", 2.5, "--lora-r 2.5: give a whole number"),
        ("num_iterations", True, "--num-iterations True: give a whole number"),
        ("load_in_4bit", "yes", "--load-in-4bit 'yes': give true or false"),
        ("optim", 8, "--optim 8: give a word"),
        ("gradient_checkpointing", 3, "--gradient-checkpointing 3: give true or false"),
    ],
)
def test_a_value_of_the_wrong_kind_is_one_sentence(name: str, value: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Settings(model="m", **{name: value})


def test_both_halves_at_once_are_refused(tmp_path: Path) -> None:
    (tmp_path / "grpo.json").write_text(json.dumps({"fp16": True, "bf16": True}))
    with pytest.raises(UsageError, match="can't be used together"):
        read_settings(tmp_path / "grpo.json")


@pytest.mark.parametrize(("name", "text"), [("a.json", "[1]"), ("a.json", "{"), ("a.yaml", "- 1"), ("a.yaml", "a: [")])
def test_files_that_are_none_are_refused(tmp_path: Path, name: str, text: str) -> None:
    pytest.importorskip("yaml")
    (tmp_path / name).write_text(text)
    with pytest.raises(InputError):
        read_settings(tmp_path / name)
    with pytest.raises(InputError, match="cannot be read"):
        read_settings(tmp_path / "absent.yaml")


def test_settings_are_plain_data() -> None:
    plain = Settings(model="m").to_dict()
    assert Settings.from_dict(plain) == Settings(model="m")
    assert json.loads(json.dumps(plain)) == plain


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("h100", "H100"), ("RTX 4090", "RTX 4090"), ("4090", "RTX 4090"), ("a100", "A100-80GB"),
        # As drivers name them.
        ("NVIDIA H100 80GB HBM3", "H100"), ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("Tesla V100-SXM2-32GB", "V100-32GB"), ("NVIDIA GeForce RTX 3060", "RTX 3060"),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", "RTX 4070 Ti SUPER"), ("NVIDIA GH200 480GB", "GH200"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"), ("NVIDIA B300 SXM6 AC", "B300"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX PRO 6000 Blackwell"), ("NVIDIA H100 NVL", "H100 NVL"),
        ("AMD Instinct MI325X", "MI325X"), ("Intel(R) Data Center GPU Max 1550", "Max 1550"),
        ("Intel(R) Arc(TM) B580 Graphics", "Arc B580"),
    ],
)  # fmt: skip
def test_gpus_are_known_by_name(text: str, name: str) -> None:
    assert find_gpu(text).name == name


def test_gpus_are_given_by_size() -> None:
    assert find_gpu("24GB").total_bytes == 24 * 10**9
    assert find_gpu("24GiB").total_bytes == 24 * 2**30
    for stranger in ("a big one", "NVIDIA GeForce RTX 4050 Laptop GPU"):
        with pytest.raises(UsageError, match="give its memory, such as 24GB"):
            find_gpu(stranger)


def test_a_card_holds_less_than_its_name_says() -> None:
    h100 = next(g for g in known_gpus() if g.name == "H100")
    assert 79 * 2**30 < h100.total_bytes < 80 * 2**30
    assert workspace_bytes(h100) == 32 * 2**20
    assert workspace_bytes(find_gpu("A100")) == 8_519_680


def test_no_card_has_more_than_its_name_says() -> None:
    named = {
        "T4": 16, "V100-16GB": 16, "V100-32GB": 32, "RTX 3060": 12, "RTX 3080": 10, "RTX 3090": 24, "RTX 4070": 12,
        "RTX 4070 Ti": 12, "RTX 4070 Ti SUPER": 16, "RTX 4080": 16, "RTX 4080 SUPER": 16, "RTX 4090": 24,
        "RTX 5070 Ti": 16, "RTX 5080": 16, "RTX 5090": 32, "RTX 6000 Ada": 48, "RTX PRO 6000 Blackwell": 96, "A10": 24,
        "A10G": 24, "A40": 48, "A6000": 48, "L4": 24, "L40S": 48, "A100-40GB": 40, "A100-80GB": 80, "H100": 80,
        "H100 NVL": 94, "GH200": 96, "H200": 141, "B200": 180, "GB200": 186, "B300": 288, "MI300X": 192, "MI325X": 256,
        "GTX 1080 Ti": 11, "P100": 16, "RTX 2080 Ti": 11, "RTX 3060 Ti": 8, "RTX 3070": 8, "RTX 3070 Laptop": 8,
        "RTX 3070 Ti": 8, "RTX 3080 Laptop": 16, "RTX 3080 Ti": 12, "RTX 3080 Ti Laptop": 16, "RTX 3090 Ti": 24,
        "RTX 4060": 8, "RTX 4060 Laptop": 8, "RTX 4060 Ti 8GB": 8, "RTX 4060 Ti 16GB": 16, "RTX 4070 Laptop": 8,
        "RTX 4070 SUPER": 12, "RTX 4080 Laptop": 12, "RTX 4090 Laptop": 16, "RTX 5060": 8, "RTX 5060 Ti 8GB": 8,
        "RTX 5060 Ti 16GB": 16, "RTX 5070": 12, "RTX 5070 Ti Laptop": 12, "RTX 5080 Laptop": 16, "RTX 5090 Laptop": 24,
        "A4000": 16, "A5000": 24, "A30": 24, "L40": 48,
        "MI350X": 288, "MI355X": 288, "Max 1550": 64, "Arc A770": 16, "Arc B580": 12,
    }  # fmt: skip
    assert {gpu.name for gpu in known_gpus()} == named.keys()
    for gpu in known_gpus():
        assert 0.91 < gpu.total_bytes / (named[gpu.name] * 2**30) <= 1, gpu.name


def test_where_kernels_are_not_known_every_workspace_is_tried() -> None:
    every = workspaces_of(find_gpu("24GB"))
    assert len(every) == 2
    for name in ("MI300X", "MI355X", "Max 1550", "Arc B580"):
        gpu = find_gpu(name)
        assert workspaces_of(gpu) == every
        assert "never compared" in str(note_of(gpu))
    assert workspaces_of(find_gpu("H100")) == (max(every),)
    assert note_of(find_gpu("H100")) is note_of(find_gpu("24GB")) is None


def test_a_size_that_cards_without_flash_attention_have_is_told_of() -> None:
    for size, names in (("16GB", "T4 and V100-16GB are"), ("15GB", "T4 is"), ("32GB", "V100-32GB is")):
        assert f"{names} of this size too" in str(note_of(find_gpu(size))), size
    for card in ("T4", "V100-32GB", "RTX 4080", "12GB", "40GB"):
        assert note_of(find_gpu(card)) is None, card


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"gpus": 8, "sharding": "zero2", "optim": "adamw_8bit"}, "torch's own AdamW"),
        ({"gpus": 8, "sharding": "fsdp2", "lora_r": 4, "load_in_4bit": True}, "leaves such weights whole"),
        ({"gpus": 8, "sharding": "fsdp2", "optim": "adamw_8bit"}, "torch's own AdamW"),
        ({"gpus": 8, "sharding": "fsdp2", "recipe": "liger"}, "--recipe liger with --sharding fsdp2 .* use ddp"),
    ],
)
def test_what_is_not_simulated_is_refused_by_name(values: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Settings(model="m", **values)


def test_sharding_on_one_gpu_is_refused_wherever_it_is_written(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    file.write_text(json.dumps({"model": "m", "sharding": "zero2"}))
    with pytest.raises(UsageError, match="add --gpus 2"):
        settings_of(file, {})
    assert settings_of(file, {"gpus": 4}).sharding == "zero2"
    with pytest.raises(UsageError, match="add --gpus 2"):
        Settings(model="m", gpus=4, sharding="zero2").with_(gpus=1)
    # What one GPU does anyway, and the way back from a run of several.
    assert settings_of(None, {"model": "m", "sharding": "ddp"}) == Settings(model="m")
    assert settings_of(file, {"gpus": 1, "sharding": "ddp"}) == Settings(model="m")
    file.write_text(json.dumps(Settings(model="m").to_dict()))  # as it was kept, default and all
    assert settings_of(file, {}) == Settings(model="m")


def test_older_simulations_that_name_a_sharding_of_one_gpu_are_still_read() -> None:
    config = {**Settings(model="Qwen/Qwen2.5-0.5B-Instruct").to_dict(), "sharding": "fsdp2"}
    assert settings_like({"kind": "simulated", "config": config}).settings.sharding == "ddp"


def test_a_plan_that_varies_the_gpus_may_shard() -> None:
    assert _most_gpus(("gpus", [2, 8, 4])) == {"gpus": 8}
    assert _most_gpus(("gpus", ["many"])) == {"gpus": 1}
    assert _most_gpus(("beta", [0.1])) == _most_gpus(None) == {}


def test_a_misspelt_setting_is_refused_and_trls_own_names_are_not(tmp_path: Path) -> None:
    file = tmp_path / "grpo.json"
    file.write_text('{"model": "m", "num_generation": 16}')
    with pytest.raises(InputError, match="num_generation is no setting; num_generations is"):
        read_settings(file)
    file.write_text('{"model": "m", "per_device_eval_batch_size": 2, "banana": 3, "load_in_8bit": true}')
    assert read_settings(file) == {"model": "m", "left_out": ("load_in_8bit",), "unknown": ("banana",)}


def test_no_part_hides_what_another_has() -> None:
    """Settings are all parts at once: a name that two of them define would lose one."""
    own = [name for cls in Settings.__mro__[:-2] for name in vars(cls) if not name.startswith("__")]
    assert {name for name in own if own.count(name) > 1} <= {"_check", "_settle"}
