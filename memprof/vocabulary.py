"""Define the ids memprof uses, each set in one enum; JSON, pages and the terminal use the same ids.

A ``str`` enum, not ``enum.StrEnum``, because Python 3.10 is supported.
"""

from __future__ import annotations

from enum import Enum
from functools import cache

#: How the name of a device ends that ``memprof emulate`` pretends.
EMULATED = "(emulated)"


# Every torch with expandable segments reads this name, and reads it first; 2.9 ignores PYTORCH_ALLOC_CONF.
EXPANDABLE_SEGMENTS = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"


class _Id(str, Enum):
    """Base of enums whose members are strings: each compares with and prints as its id."""

    def __str__(self) -> str:
        return str(self.value)

    def __repr__(self) -> str:
        return repr(self.value)

    @property
    def code(self) -> int:
        """Return the member's position in the enum, which the numpy columns store."""
        return _codes(type(self))[self]


@cache
def _codes(kind: type[_Id]) -> dict[_Id, int]:
    return {member: number for number, member in enumerate(kind)}


class Category(_Id):
    """Purposes of bytes. At any instant the categories add up to the active bytes exactly."""

    WEIGHTS = "weights"
    ADAPTERS = "adapters"
    WEIGHT_CASTS = "weight_casts"
    REFERENCE_MODEL = "reference_model"
    REWARD_MODEL = "reward_model"
    VALUE_MODEL = "value_model"
    GRADIENTS = "gradients"
    OPTIMIZER_STATE = "optimizer_state"
    ACTIVATIONS = "activations"
    ACTIVATION_GRADIENTS = "activation_gradients"
    LOSS_LOGITS = "loss_logits"
    KV_CACHE = "kv_cache"
    INFERENCE_ENGINE = "inference_engine"
    INPUTS = "inputs"
    TEMPORARIES = "temporaries"
    COMMUNICATION = "communication"
    WORKSPACE = "workspace"
    UNATTRIBUTED = "unattributed"


class Group(_Id):
    """Rows of the published comparison table, in its order."""

    TRAINING = "training"
    GRPO_LOSS = "grpo_loss"
    REFERENCE_AND_REWARD = "reference_and_reward"
    INFERENCE = "inference"
    KV_CACHE = "kv_cache"
    UNATTRIBUTED = "unattributed"
    TOTAL = "total"


class Phase(_Id):
    """Phases of a GRPO run."""

    LOAD = "load"
    GENERATE = "generate"
    REWARD = "reward"
    OLD_LOGPROBS = "old_logprobs"
    REFERENCE_LOGPROBS = "reference_logprobs"
    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER_STEP = "optimizer_step"
    WEIGHT_SYNC = "weight_sync"
    SLEEP = "sleep"
    WAKE = "wake"
    EVALUATE = "evaluate"
    SAVE = "save"
    OTHER = "other"


class Evidence(_Id):
    """Kinds of evidence for a byte's category, strongest first."""

    OWNER = "owner"
    METADATA = "metadata"
    STACK = "stack"
    LIFETIME = "lifetime"
    FINGERPRINT = "fingerprint"
    SHAPE = "shape"
    NONE = "none"


#: Evidence that leaves room for another answer: reports show these bytes as guessed.
GUESSES = (Evidence.LIFETIME, Evidence.FINGERPRINT, Evidence.SHAPE)


class History(_Id):
    """Extents of the allocation history that a snapshot can hold."""

    COMPLETE = "complete"
    STARTED_LATE = "started_late"
    TRUNCATED = "truncated"
    NONE = "none"


class Kind(_Id):
    """Sources of a snapshot."""

    CUDA = "cuda"
    TRACE = "trace"
    SIMULATED = "simulated"


_GROUPS = {
    Group.TRAINING: (
        "Training memory",
        "weights adapters weight_casts gradients optimizer_state activations activation_gradients temporaries "
        "communication inputs workspace",
    ),
    Group.GRPO_LOSS: ("GRPO memory", "loss_logits"),
    Group.REFERENCE_AND_REWARD: ("Reference and reward models", "reference_model reward_model value_model"),
    Group.INFERENCE: ("Inference cost", "inference_engine"),
    Group.KV_CACHE: ("KV cache", "kv_cache"),
    Group.UNATTRIBUTED: ("Unattributed", "unattributed"),
    Group.TOTAL: ("Total", ""),
}
GROUP_LABELS: dict[Group, str] = {group: label for group, (label, _) in _GROUPS.items()}
GROUP_OF: dict[Category, Group] = {Category(name): g for g, (_, names) in _GROUPS.items() for name in names.split()}

# A category's label is its id in words.
CATEGORY_LABELS: dict[Category, str] = {c: c.replace("_", " ").capitalize() for c in Category}
CATEGORY_LABELS[Category.KV_CACHE] = "KV cache"


_LOG_PROBS = {"old_logprobs": "old log-probs", "reference_logprobs": "reference log-probs"}


def phase_words(phase: str) -> str:
    """Write a phase's id as words inside a sentence."""
    return _LOG_PROBS.get(phase, phase.replace("_", " "))
