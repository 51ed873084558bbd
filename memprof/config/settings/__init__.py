"""Hold one run's settings: ``parts`` are five, ``run`` is all of them, ``file`` reads them from YAML and JSON,
``fields`` says what becomes of every field of the trainers' own configurations."""

from memprof.config.settings.fields import Arguments
from memprof.config.settings.file import ALIASES, read_settings
from memprof.config.settings.parts import (
    CHOICES,
    DeviceSettings,
    GenerationSettings,
    ModelSettings,
    Part,
    ShardingSettings,
    TrainerSettings,
)
from memprof.config.settings.run import TRAINERS_OWN, Settings

__all__ = [
    "ALIASES",
    "CHOICES",
    "TRAINERS_OWN",
    "Arguments",
    "DeviceSettings",
    "GenerationSettings",
    "ModelSettings",
    "Part",
    "Settings",
    "ShardingSettings",
    "TrainerSettings",
    "read_settings",
]
