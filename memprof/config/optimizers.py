"""The optimizers of ``TrainingArguments(optim=...)``: what each keeps for a parameter, and how its step works.

Everything in memprof that depends on an optimizer asks its row: the simulator what to execute, advice what a change
saves, a prediction what was never compared with a real run. To add one (Muon, say), add a row: ``executed=True`` where
torch or transformers can run it on a CPU, else ``bits`` and ``block`` of its state, which the simulator then models;
or a name in ``_LIKE`` where it is to be simulated as another one, with a note; or in ``_NOT_SIMULATED``. No torch here.

Layouts are from the packages' sources: torch.optim (AdamW: two moments like the parameter; Adagrad ``sum``, RMSprop
``square_avg``: one; SGD without momentum: none); bitsandbytes ``optim/optimizer.py`` and ``functional.py`` (blocks of
256 values, an fp32 scale each; tensors below 4096 values in fp32; states of 100,000 values and more are paged; Lion and
RMSprop keep one moment, AdEMAMix three); transformers ``Trainer.get_optimizer_cls_and_kwargs``, which registers
embeddings for 32 bits with bitsandbytes' 8-bit optimizers; torchao ``optim/subclass_8bit.py`` and
``subclass_4bit.py`` (blocks of 256 and 128).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

#: bitsandbytes keeps the state of a tensor with fewer values in fp32.
EXACT_BELOW = 4096
#: bitsandbytes pages the state of a tensor with so many values.
PAGED_FROM = 100_000


@dataclass(frozen=True)
class Optimizer:
    """One optimizer as memory sees it.

    Args:
        name: as transformers spells it.
        moments: tensors of a parameter's size that it keeps for each parameter.
        bits: of a value of such a tensor; None: as wide as the parameter.
        block: values that share an fp32 scale, where ``bits`` is below 32.
        exact_embeddings: embeddings keep fp32 state beside the others' few bits.
        paged: state lives in managed memory, which moves to the host under pressure.
        foreach: a step keeps a set of parameters' worth of temporaries; others work in place or a tensor at a time.
        package: what ``pip install`` has to bring.
        executed: torch or transformers run it in a simulation; otherwise its state is modelled by this row.
        sharded: it can be simulated with parameters divided among GPUs.
        steps_in_backward: it updates the weights inside the backward.
        argument: what ``optim=`` is given, where that is another name.
        like: the name of the optimizer that is simulated in its place.
    """

    name: str
    moments: int = 2
    bits: int | None = None
    block: int = 256
    exact_embeddings: bool = False
    paged: bool = False
    foreach: bool = False
    package: str = ""
    executed: bool = True
    sharded: bool = False
    steps_in_backward: bool = False
    argument: str = ""
    like: str = ""

    @property
    def modelled(self) -> bool:
        """Tell whether it is only modelled: its kernels are not executed, and no real run was compared."""
        return not self.executed

    def state_bytes(self, parameters: int, itemsize: int, exact: int = 0) -> int:
        """Return the bytes of its state, paged or not, for so many trained ``parameters`` of ``itemsize`` bytes, of
        which ``exact`` keep fp32 state where others have few bits (norms, biases, embeddings)."""
        if self.bits is None:
            return self.moments * itemsize * parameters
        if self.bits == 32:
            return self.moments * 4 * parameters
        rest = parameters - exact
        return self.moments * (4 * exact + rest * self.bits // 8 + 4 * (rest // self.block))


def _bitsandbytes(name: str, bits: int, paged: bool = False, moments: int = 2) -> Optimizer:
    """Make the row of one of bitsandbytes' optimizers, whose kernels run on GPUs only."""
    coarse = bits < 32
    return Optimizer(name, moments, bits, exact_embeddings=coarse, paged=paged, package="bitsandbytes", executed=False)


_OWN = (
    Optimizer("adamw_torch_fused", sharded=True),
    Optimizer("adamw_torch", foreach=True, sharded=True),
    Optimizer("adafactor", moments=0),  # a row and a column of each matrix, which are nothing beside it
    Optimizer("sgd", moments=0, foreach=True),
    Optimizer("adagrad", moments=1, foreach=True),
    Optimizer("rmsprop", moments=1, foreach=True),
    _bitsandbytes("adamw_8bit", 8),
    _bitsandbytes("adamw_bnb_8bit", 8),
    _bitsandbytes("paged_adamw_8bit", 8, paged=True),
    _bitsandbytes("paged_adamw_32bit", 32, paged=True),
    replace(_bitsandbytes("paged_adamw", 32, paged=True), argument="paged_adamw_32bit"),
    *(_bitsandbytes(name, 8, moments=1) for name in ("lion_8bit", "rmsprop_bnb_8bit")),
    *(_bitsandbytes(name, 32, moments=1) for name in ("lion_32bit", "rmsprop_bnb", "rmsprop_bnb_32bit")),
    _bitsandbytes("paged_lion_8bit", 8, paged=True, moments=1),
    _bitsandbytes("paged_lion_32bit", 32, paged=True, moments=1),
    _bitsandbytes("ademamix_8bit", 8, moments=3),
    _bitsandbytes("ademamix", 32, moments=3),
    Optimizer("adamw_torch_8bit", bits=8, package="torchao", executed=False),
    Optimizer("adamw_torch_4bit", bits=4, block=128, package="torchao", executed=False),
    Optimizer("none", moments=0, sharded=True),
)
#: Names that can be simulated.
OPTIMIZERS = tuple(row.name for row in _OWN)

# Simulated as another one if a script or a recorded run has it: as which, whether it steps inside the backward, the
# names.
_LIKE = (
    ("adamw_8bit", False, ("galore_adamw_8bit",)),
    ("paged_adamw_8bit", False, ("paged_ademamix_8bit",)),
    ("paged_adamw_32bit", False, ("paged_ademamix_32bit",)),
    ("adamw_8bit", True, ("galore_adamw_8bit_layerwise",)),
    ("adamw_torch", True, ("lomo", "adalomo", "galore_adamw_layerwise", "galore_adafactor_layerwise")),
    ("adamw_torch", True, ("apollo_adamw_layerwise",)),
)
# Why an optimizer is not simulated, by how its name begins.
_NOT_SIMULATED = {
    "galore": "it stores its moments in a low-rank projection of the gradients",
    "apollo": "it stores its moments in a low-rank projection of the gradients",
    "lomo": "it updates the weights in the backward pass and stores no gradients",
    "adalomo": "it updates the weights in the backward pass and stores no gradients",
    "muon": "its matrix iterations need memory that memprof does not know; transformers has no such --optim",
    "paged_ademamix": "it pages one of its three moments earlier than the others",
    "adamw_torch_xla": "it runs on TPUs",
    "adamw_torch_npu": "it runs on NPUs",
    **dict.fromkeys(
        ("adamw_anyprecision", "grokadamw", "schedule_free", "stable_adamw"),
        "it is of a package that memprof neither executes nor models",
    ),
}


def _table() -> dict[str, Optimizer]:
    rows = {row.name: row for row in _OWN}
    for other, inside, names in _LIKE:
        for name in names:
            rows[name] = replace(rows[other], name=name, executed=False, steps_in_backward=inside, like=other)
    return rows


#: Every optimizer by its name.
TABLE = _table()


def optimizer(name: str) -> Optimizer:
    """Return the row of an optimizer; for a name that has none, the row of the one it is simulated as."""
    return TABLE.get(name) or TABLE[nearest(name)]


def why_not_simulated(name: str) -> str | None:
    """Say why ``--optim`` takes no such name; None for a name that no release has."""
    return next((why for begin, why in _NOT_SIMULATED.items() if name.lower().startswith(begin)), None)


def nearest(name: str) -> str:
    """Return the name that an optimizer is simulated under: its own, or that of one whose state is most like it."""
    row = TABLE.get(name)
    return "adamw_torch" if row is None else row.like or row.name
