"""Hold one run's settings: ``parts`` are five, ``run`` is all of them, ``file`` reads them from YAML and JSON."""

from memprof.config.settings.file import ALIASES, read_settings
from memprof.config.settings.parts import (
    CHOICES,
    DeviceSettings,
    GenerationSettings,
    ModelSettings,
    SettingsPart,
    ShardingSettings,
    TrainerSettings,
    Value,
)
from memprof.config.settings.run import TRAINERS_OWN, Settings
from memprof.config.trainer_fields import Arguments

__all__ = [
    "ALIASES",
    "CHOICES",
    "TRAINERS_OWN",
    "Arguments",
    "DeviceSettings",
    "GenerationSettings",
    "ModelSettings",
    "Settings",
    "SettingsPart",
    "ShardingSettings",
    "TrainerSettings",
    "Value",
    "read_settings",
]
