"""What the comparison of names calls stale, on small sources; the newest wheels only where they can be downloaded."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from benchmarks.frameworks import names
from benchmarks.frameworks.sources import Source, newest

WORKER = "class Base:\n    def {method}(self): ...\nclass ActorRolloutRefWorker(Base):\n{body}"
VERL = ("compute_log_prob", "compute_ref_log_prob", "update_actor", "init_model", "save_checkpoint")


def verl(folder: Path, *, update: str = "update_weights") -> Source:
    """A wheel of verl with a worker, one of whose methods is inherited."""
    body = "".join(f"    async def {name}(self): ...\n" for name in VERL)
    with zipfile.ZipFile(folder / "verl-0.9.1-py3-none-any.whl", "w") as wheel:
        path = "verl-0.9.1.data/purelib/verl/workers/engine_workers.py"
        wheel.writestr(path, WORKER.format(method=update, body=body))
    return Source("verl", folder / "verl-0.9.1-py3-none-any.whl")


def test_a_methods_new_name_is_found(tmp_path: Path) -> None:
    source = verl(tmp_path)
    assert source.version == "0.9.1"
    assert list(names._stale_recipe(source)) == []
    (tmp_path / "other").mkdir()
    (stale,) = names._stale_recipe(verl(tmp_path / "other", update="sync_weights"))
    assert str(stale) == "verl: ActorRolloutRefWorker.update_weights (frameworks.md)"


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("lower --train.micro_batch_size (--micro_train_batch_size before 0.11)", ["--train.micro_batch_size"]),
        ("halve a_b and double c_d", ["a_b", "c_d"]),
        ("x.y.z_w=True, or deepspeed: examples/ds_z3.json", ["x.y.z_w"]),
        ("--tp 2", ["--tp"]),
    ],
)
def test_which_words_of_a_setting_are_names(words: str, found: list[str]) -> None:
    assert [n for n in names.setting_names(words) if n != "examples/ds_z3.json"] == found


def test_a_setting_that_is_gone_is_found(tmp_path: Path) -> None:
    (tmp_path / "openrlhf").mkdir()
    known = "--train.micro_batch_size --actor.gradient_checkpointing_enable --rollout.micro_batch_size "
    known += "--rollout.max_new_tokens --vllm.gpu_memory_utilization --vllm.enable_sleep --ds.enable_sleep "
    known += "--ds.adam_offload --ref.offload --reward.offload --ds.zero_stage --ds.lora.rank"
    (tmp_path / "openrlhf" / "arguments.py").write_text(f"names = {known!r}")
    source = Source("OpenRLHF", tmp_path)
    assert list(names._stale_settings(source, [])) == []
    (tmp_path / "openrlhf" / "arguments.py").write_text(f"names = {known.replace('adam_offload', 'offload_adam')!r}")
    assert {s.name for s in names._stale_settings(Source("OpenRLHF", tmp_path), [])} == {"--ds.adam_offload"}


def test_a_package_that_allocates_and_is_not_known_is_found(tmp_path: Path) -> None:
    for folder in ("v1", "brand_new"):
        (tmp_path / "vllm" / folder).mkdir(parents=True)
        for name in ("a", "b"):
            (tmp_path / "vllm" / folder / f"{name}.py").write_text("x = torch.empty(2)")
    (stale,) = names._stale_packages(Source("vLLM", tmp_path))
    assert stale.name == "vllm/brand_new/ (2 files are not known)"


@pytest.mark.heavy
@pytest.mark.parametrize("name", ["verl", "OpenRLHF", "AReaL", "LLaMA-Factory"])
def test_the_newest_release_has_all_names(name: str, tmp_path: Path) -> None:
    """Those whose wheels are small; `python -m benchmarks.frameworks` looks at all."""
    source = newest(name, names.DISTRIBUTIONS[name], tmp_path)
    if source is None:
        pytest.skip("no wheel could be downloaded")
    also = [newest(other, names.DISTRIBUTIONS[other], tmp_path) for other in names.ALSO.get(name, ())]
    if None in also:
        pytest.skip("a wheel of what it passes arguments on to could not be downloaded")
    assert [str(stale) for stale in names.stale_names(source, [one for one in also if one])] == []
