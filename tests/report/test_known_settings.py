"""Settings that a report has, whoever wrote it: what is of another type is not known."""

from __future__ import annotations

from memprof.config.settings import Settings
from memprof.report.run import KnownSettings


def test_values_of_another_type_are_not_known() -> None:
    found = KnownSettings.of({"lora_r": "eight", "gpus": 2, "beta": 0.0, "assumed": ["dtype", 3], "names": 7, "x": []})
    assert (found.lora_r, found.gpus, found.beta, found.assumed) == (None, 2, 0.0, ())
    assert found.names == {"gpus", "beta"}
    assert KnownSettings.of(None) == KnownSettings()


def test_a_setting_that_is_none_is_known() -> None:
    assert "lora_r" in KnownSettings.of({"lora_r": None}).names


def test_each_is_a_setting() -> None:
    settings = Settings(model="m")
    known = settings.known
    names = set(KnownSettings.__struct_fields__) - {"names"}
    assert names <= {*vars(settings)}
    assert known.names >= names - {"adapter_options", "trainer_options"}
    for name in ("beta", "completion_length", "gradient_checkpointing", "optim", "trainer", "sharding"):
        assert known.value(name) == getattr(settings, name)
