"""What drivers and backends say beside torch's allocator: CUDA, HIP, Level Zero and SYCL, Metal, Ascend."""

from __future__ import annotations

from memprof.oom.form import Form, form

__all__ = ["FORMS"]

FORMS: tuple[Form, ...] = (
    form(
        "xpu.runtime",
        "driver",
        "the SYCL runtime",
        r"(?:ur_result_error|pi_error|ze_result_error|urresulterror)_(?:out_of_(?:device_)?(?:memory|resources)|mem_object_allocation_failure|out_of_host_memory)",
        backend="XPU",
    ),
    form("mps.buffer", "device", "Metal", r"(?<![a-z])invalid buffer size: {size:requested}", backend="MPS"),
    form(
        "mps.command_buffer",
        "driver",
        "Metal",
        r"insufficient memory \([0-9a-f]{1,8}:kiogpucommandbuffer|kiogpucommandbuffercallbackerroroutofmemory",
        backend="MPS",
    ),
    form(
        "mlx.malloc",
        "device",
        "MLX",
        r"attempting to allocate {int:requested} bytes which is greater than the maximum allowed buffer size of "
        r"{int:allowed} bytes",
        backend="MPS",
    ),
    form("hpu.alloc", "driver", "the Habana bridge", r"allocation failed for size::{int:requested}", backend="HPU"),
    form(
        "npu.driver",
        "driver",
        "CANN",
        r"el0004\)?:? ?failed to allocate memory(?:.{0,400}?call rtmalloc fail,purpose:[^,]{1,40},type = \d{1,3},"
        r"size:{int:requested})?|error code is 207001|aclrtmalloc[^\n]{0,80}?(?:failed|207001)"
        r"|malloc device memory failed",
        backend="NPU",
    ),
    form(
        "hip.driver",
        "driver",
        "the HIP runtime",
        r"hip (?:driver |runtime )?error: ?out of memory|hiperroroutofmemory|hsa_status_error_out_of_resources",
        backend="HIP",
        event="driver",
    ),
    form(
        "cuda.thc",
        "driver",
        "torch 0.x",
        r"cuda runtime error \(2\) ?: ?out of memory|error=2 : out of memory",
        backend="CUDA",
        event="driver",
    ),
    form("cuda.triton", "driver", "Triton", r"triton error \[cuda\]: out of memory", backend="CUDA", event="driver"),
    form(
        "cuda.driver",
        "driver",
        "the CUDA driver",
        r"cuda (?:driver |runtime )?error(?: \d| \(\d\))?: ?'?out of memory|cudaerrormemoryallocation"
        r"|cuda_error_out_of_memory|cudamalloc failed: out of memory|cudamalloc[^\n]{0,40}?out of memory"
        r"|cuda error \(2\)|cuda[a-z]{0,20} failed with error out of memory",
        backend="CUDA",
        event="driver",
    ),
)
