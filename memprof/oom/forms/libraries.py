"""Libraries that ask the driver for memory themselves: NCCL, cuBLAS and its kin, bitsandbytes, other frameworks.

Read from NCCL's ``include/alloc.h`` (2.4 to 2.27) and torch's ``NCCLUtils.hpp``, bitsandbytes' ``csrc/ops.cuh`` and
``compat.cuh``, DeepSpeed's ``swap_tensor``, and torch's ``CUDAException.h`` and ``Exceptions.h``.
"""

from __future__ import annotations

from memprof.oom.form import Form, form

__all__ = ["FORMS"]

FORMS: tuple[Form, ...] = (
    form(
        "nccl.shared_memory",
        "host",
        "NCCL",
        r"(?:error while (?:creating|attaching to) shared memory segment|error: failed to extend|call to "
        r"posix_fallocate failed)"
        r"[^\n]{0,80}?/dev/shm/nccl[a-z0-9-]{0,30}(?:\(size {int:wanted_bytes}\))?",
    ),
    form(
        "nccl.alloc",
        "library",
        "NCCL",
        r"failed to (?:cuda|hip) (?:(?:host )?(?:calloc|malloc|alloc)(?: async)?) {int:requested} bytes",
        backend="NCCL",
        event="nccl",
    ),
    form(
        "nccl.failure",
        "library",
        "NCCL",
        r"(?:cuda|hip) failure (?:\d )?['\"(]?out of memory",
        backend="NCCL",
        event="nccl",
    ),
    form(
        "nccl.host", "host", "NCCL", r"nccl warn failed to (?:malloc|mmap|calloc) {int:requested} bytes", event="nccl"
    ),
    form(
        "bitsandbytes.check",
        "library",
        "bitsandbytes",
        r"error out of memory at line \d{1,6} in file .{0,200}?(?:ops\.cu|pythoninterface\.c|bitsandbytes)",
        backend="bitsandbytes",
    ),
    form(
        "bitsandbytes.check_plain",
        "library",
        "bitsandbytes",
        r"error out of memory at line \d{1,6} in file",
        backend="bitsandbytes",
        event="bitsandbytes.check",
    ),
    form(
        "deepspeed.swap_buffers",
        "host",
        "DeepSpeed",
        r"not enough (?:swap in )?buffers {int:available} for (?:swapping|tensors)",
    ),
    form(
        "cublas.alloc",
        "library",
        "cuBLAS",
        r"(?P<backend>(?:cublas|cublaslt|cudnn|cusolver|cusparse|hipblas|hipsolver|hipsparse|curand|nvrtc)_status_alloc_failed)",
        event="cublas",
    ),
    form("cufft.alloc", "library", "cuFFT", r"(?P<backend>cufft_alloc_failed|hipfft_alloc_failed)"),
    form("rocblas.alloc", "library", "rocBLAS", r"(?P<backend>rocblas_status_memory_error|miopenstatusallocfailed)"),
    form(
        "cublas.not_initialized",
        "library",
        "cuBLAS",
        r"(?P<backend>(?:cublas|cudnn|cusolver|cusparse)_status_not_initialized)",
        event="cublas",
    ),
    form(
        "cudnn.no_algorithm",
        "library",
        "cuDNN",
        r"unable to find a valid cudnn algorithm to run convolution|get was unable to find an engine to execute this "
        r"computation",
        backend="CUDNN",
    ),
    form("cupy", "driver", "CuPy", r"out of memory allocating {size:requested} \(allocated so far: {size:allocated}"),
    form(
        "jax",
        "driver",
        "JAX",
        r"resource_?exhausted: out of memory (?:while trying to allocate|allocating) "
        r"{num:wanted}(?P<unit>bytes|[kmgt]i?b)",
    ),
    form("tensorflow", "driver", "TensorFlow", r"oom when allocating tensor with shape ?\[(?P<shape>[\d,]{1,60})\]"),
    form(
        "ggml",
        "driver",
        "llama.cpp",
        r"allocating {size:requested} (?:\([^)]{1,40}\) )?on device {int:device}: cudamalloc failed: out of memory",
        event="driver",
    ),
    form(
        "onnxruntime",
        "driver",
        "ONNX Runtime",
        r"failed to allocate memory for requested buffer of size {int:requested}",
    ),
    form(
        "paddle",
        "driver",
        "Paddle",
        r"out of memory error on gpu {int:device}\.cannot allocate {size:requested} memory",
    ),
)
