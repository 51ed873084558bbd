"""What to try where a library or a driver found no device memory beside torch."""

from __future__ import annotations

from collections.abc import Callable

from memprof.oom.failure import Failure
from memprof.oom.frameworks import Names
from memprof.units import format_bytes

__all__ = ["LIBRARIES"]

Remedy = tuple[str, str]
Answer = tuple[str, list[Remedy]]

_LAUNCH_BLOCKING: Remedy = (
    "CUDA_LAUNCH_BLOCKING=1 for one run",
    "errors of kernels are reported late: an index out of range can surface here",
)


def _room(names: Names) -> Remedy:
    if names.share:
        return (
            f"leave about 1 GiB of the device free: lower {names.share} or the micro-batch",
            "torch and the engine take what they can; libraries come after them",
        )
    return (
        "leave about 1 GiB of the device free: torch.cuda.set_per_process_memory_fraction(0.95), a smaller batch",
        "torch's cache takes what it can; libraries come after it",
    )


def _nccl(failure: Failure, names: Names) -> Answer:
    size = f"{format_bytes(failure.requested)}" if failure.requested else "its buffers"
    return (
        f"NCCL could not get {size} of device memory: the device is full around torch, whose cache NCCL cannot use.",
        [
            _room(names),
            (
                "run one small collective at the start, before activations exist (or empty_cache() before the first)",
                "communicators are made lazily, at the first collective, which may be the memory's peak",
            ),
            (
                "NCCL_BUFFSIZE=1048576, NCCL_MAX_NCHANNELS=8, fewer process groups",
                "every communicator keeps buffers of its own",
            ),
        ],
    )


def _cublas(failure: Failure, names: Names) -> Answer:
    maybe = failure.form.id == "cublas.not_initialized"
    because = (
        "a CUDA library could not set itself up. Mostly the device was full before it was called"
        if maybe
        else "a CUDA library found no room for its handle or workspace: mostly the device was full before it was called"
    )
    because += "; the same words also come after an index out of range or another process's crash, so look there too."
    return because, [
        _LAUNCH_BLOCKING,
        ("check ids against the vocabulary, labels against the classes", "a label of −1 or 10 of 10 classes fails so"),
        _room(names),
        (
            "create the handle early (one small matmul at the start)",
            "cuBLAS asks the device for its workspace when first used",
        ),
        (names.micro_batch, "activations shrink with it"),
    ]


def _cudnn(failure: Failure, names: Names) -> Answer:
    return (
        "cuDNN found no algorithm that works: mostly each needs a workspace and the device is full; else versions do "
        "not fit.",
        [
            (names.micro_batch, "the workspace grows with the batch"),
            _room(names),
            (
                "torch.backends.cudnn.benchmark=False, and check torch against the driver's CUDA",
                "benchmarking tries the large ones",
            ),
        ],
    )


def _bitsandbytes(failure: Failure, names: Names) -> Answer:
    return (
        "bitsandbytes could not allocate: paged optimizers and quantisation ask the driver (cudaMallocManaged, "
        "cudaMalloc) themselves. Managed memory takes both the host's RAM and, when touched, the device's.",
        [
            (
                "free host RAM: paged state lives there (2 to 8 bytes a trainable parameter)",
                "managed memory is limited by the host",
            ),
            _room(names),
            (
                "optim='adamw_8bit' instead of a paged one, if the host is short",
                "its state is on the device, 2 bytes a parameter",
            ),
            ("train fewer parameters (LoRA)", "state exists for trainable ones only"),
        ],
    )


def _driver(failure: Failure, names: Names) -> Answer:
    size = f" of {format_bytes(failure.requested)}" if failure.requested else ""
    because = (
        f"the driver refused an allocation{size} that torch's allocator did not make (a context, a kernel, NCCL, "
        "pinned "
        "memory) or that came before it could say more; the message has no figures."
    )
    return because, [
        (
            "nvidia-smi: is the device full, and by whom?",
            "the driver counts every process; another's memory fails you here",
        ),
        _room(names),
        (
            "if the device is nearly empty: host RAM, ulimit -v, a compute mode of EXCLUSIVE_PROCESS, a stuck "
            "earlier run",
            "a context also needs host memory and the right to be made",
        ),
        _LAUNCH_BLOCKING,
    ]


def _early_torch(failure: Failure, names: Names) -> Answer:
    return "the device is full; torch of that age prints no figures with it.", [
        ("nvidia-smi: is the device full, and by whom?", "the driver counts every process"),
        (names.micro_batch, "activations shrink with it"),
        (
            "no gradients where none are needed (torch.no_grad(), before 0.4 volatile=True); total += float(loss)",
            "a graph that is kept keeps every activation in it",
        ),
    ]


def _hip(failure: Failure, names: Names) -> Answer:
    because, rows = _driver(failure, names)
    return because, [("rocm-smi --showmeminfo vram: is the device full, and by whom?", rows[0][1]), *rows[1:3]]


def _xpu(failure: Failure, names: Names) -> Answer:
    return (
        "Level Zero refused: the card is full, or one allocation was above 4 GiB, or host memory that backs it is "
        "short.",
        [
            (
                "UR_L0_USE_RELAXED_ALLOCATION_LIMITS=1 (in other versions UR_L0_ENABLE_RELAXED_ALLOCATION_LIMITS=1)",
                "lifts the 4 GiB limit for a single allocation",
            ),
            (
                "torch.xpu.empty_cache() between generation and training; xpu-smi: who holds the card",
                "as on every device",
            ),
            (names.micro_batch, "activations shrink with it"),
        ],
    )


def _metal(failure: Failure, names: Names) -> Answer:
    return "Metal's command buffer ran out of memory: the machine's memory is shared with the GPU and full.", [
        ("close other programs, torch.mps.empty_cache()", "the GPU has what the system leaves"),
        (names.micro_batch, "activations shrink with it"),
    ]


def _npu(failure: Failure, names: Names) -> Answer:
    return "CANN's runtime could not get device memory beside torch_npu's own.", [
        ("npu-smi info: who holds the device", "an earlier run, or HCCL's buffers (HCCL_BUFFSIZE)"),
        (
            "HCCL_BUFFSIZE=100 (MB), PYTORCH_NPU_ALLOC_CONF=expandable_segments:True",
            "communication keeps buffers of its own",
        ),
        (names.micro_batch, "activations shrink with it"),
    ]


def _jax(failure: Failure, names: Names) -> Answer:
    return "XLA could not place a buffer; by default it has taken three quarters of the device for itself already.", [
        (
            "XLA_PYTHON_CLIENT_PREALLOCATE=false or XLA_PYTHON_CLIENT_MEM_FRACTION=0.5 (TensorFlow: set_memory_growth)",
            "beside torch on one device the two reserve against each other",
        ),
        ("a smaller batch, jax.checkpoint", "live buffers shrink"),
    ]


def _other(failure: Failure, names: Names) -> Answer:
    size = f" of {format_bytes(failure.requested)}" if failure.requested else ""
    return f"{failure.form.program} could not allocate{size} on the device.", [
        ("nvidia-smi: who holds the device", "two frameworks on one device reserve against each other"),
        ("a smaller batch or model, or fewer layers on the GPU", "what is placed there shrinks"),
    ]


LIBRARIES: dict[str, Callable[[Failure, Names], Answer]] = {
    "nccl": _nccl,
    "cublas": _cublas,
    "cufft.alloc": _cublas,
    "rocblas.alloc": _cublas,
    "cudnn.no_algorithm": _cudnn,
    "bitsandbytes.check": _bitsandbytes,
    "driver": _driver,
    "cuda.thc": _early_torch,
    "hip.driver": _hip,
    "xpu.runtime": _xpu,
    "mps.command_buffer": _metal,
    "npu.driver": _npu,
    "hpu.alloc": _other,
    "jax": _jax,
    "tensorflow": _jax,
    "tensorflow.driver": _jax,
    "cupy": _other,
    "ggml": _other,
    "onnxruntime": _other,
    "paddle": _other,
}
