"""Inference engines: vLLM, SGLang, their sleep modes, and other servers that reserve a share of the card.

Read from vLLM's ``v1/worker/gpu_worker.py``, ``worker/worker.py``, ``v1/core/kv_cache_utils.py``,
``v1/worker/gpu_model_runner.py``, ``device_allocator/cumem.py``, ``csrc/cumem_allocator.cpp`` (0.2 to 0.28), SGLang's
``model_runner.py``, ``pool_configurator.py``, ``mem_cache/common.py``, ``schedule_batch.py`` and
``cuda_graph_runner.py`` (0.1 to 0.5), and torch_memory_saver's ``csrc``.
"""

from __future__ import annotations

from memprof.oom.form import Form, form

__all__ = ["FORMS"]

_GB = r"(?:gib|gb)?"
_SGLANG_TOKENS = (
    r"\.try to lower your batch size\.?try to allocate {int:wanted_tokens} tokens"
    r"(?:\.available (?:full )?tokens:? ?{int:available_tokens})?"
)

FORMS: tuple[Form, ...] = (
    form(
        "vllm.free_below_share",
        "engine",
        "vLLM",
        r"free memory on device (?:[a-z]{2,5}:\d{1,3} )?\({num:free_gib} (?:gib)?/{num:total_gib} gi?b\) on startup is "
        r"less than desired gpu memory utilization \({num:share},{num:wanted_gib} gi?b\)",
    ),
    form(
        "vllm.free_below_share_short",
        "engine",
        "vLLM",
        r"is less than desired gpu memory utilization",
        event="vllm.free_below_share",
    ),
    form("vllm.no_cache_blocks", "engine", "vLLM", r"no available memory for the cache blocks"),
    form(
        "vllm.context_too_long",
        "engine",
        "vLLM",
        r"max seq len \({int:wanted_tokens}\),\(?{num:needed_gib} gi?b kv cache is needed,which is larger than the "
        r"available kv cache memory \({num:available_gib} gi?b\)"
        r"(?:\.based on the available memory,the estimated maximum model length is {int:fitting_tokens})?",
    ),
    form(
        "vllm.context_over_cache",
        "engine",
        "vLLM",
        r"max seq len \({int:wanted_tokens}\) is larger than the maximum number of tokens that can be stored in kv "
        r"cache \({int:fitting_tokens}\)",
    ),
    form(
        "vllm.context_too_long_short",
        "engine",
        "vLLM",
        r"larger than the (?:available kv cache memory|maximum number of tokens that can be stored in kv cache)",
        event="vllm.context_too_long",
    ),
    form(
        "vllm.profiling",
        "engine",
        "vLLM",
        r"error in memory profiling\.(?:initial(?:ly)? (?:free|used) memory {num:initial}"
        + _GB
        + r",?(?:current(?:ly)? (?:free|used) memory) {num:current})?",
    ),
    form(
        "vllm.sampler_warmup",
        "engine",
        "vLLM",
        r"out of memory occurred when warming up (?P<what>sampler|pooler)[^.]{0,60}?with {int:requests} dummy requests",
        absorbs=("device",),
    ),
    form("vllm.load_model", "engine", "vLLM", r"failed to load model - not enough gpu memory", absorbs=("device",)),
    form("vllm.expandable_segments", "engine", "vLLM", r"expandable segments are not compatible with memory pool"),
    form(
        "vllm.wake",
        "engine",
        "vLLM",
        r"cuda error: out of memory at.{0,200}?cumem_allocator\.cpp"
        r"|(?:call to )?wake_up (?:method )?failed: cuda error: out of memory",
        backend="CUDA",
        absorbs=("device",),
        phase="wake",
    ),
    form("vllm.sleep", "engine", "vLLM", r"memory usage increased after sleeping", phase="sleep"),
    form(
        "vllm.swap_space",
        "host",
        "vLLM",
        r"too large swap space\.{size:wanted} out of the {size:total} total cpu memory",
    ),
    form(
        "vllm.graph_capture",
        "engine",
        "vLLM",
        r"cuda graph captur(?:e|ing) (?:failed|ran out of memory|error)[^.]{0,60}?out of memory",
        absorbs=("device",),
    ),
    form(
        "torch_memory_saver.expandable_segments",
        "engine",
        "torch_memory_saver",
        r"torch_?memory_?saver[^.]{0,120}?(?:expandable_segments|expandable segments)",
    ),
    form(
        "torch_memory_saver.resume",
        "engine",
        "torch_memory_saver",
        r"cu_?mem_?create cuda_error_out_of_memory|torch_memory_saver.{0,80}?(?:out of memory|out_of_memory)"
        r"|cudaerror error: 2 \(out of memory\) (?:result=2 )?file=.{0,60}?func={word:function} line=",
        backend="CUDA",
        event="torch_memory_saver",
    ),
    form(
        "torch_memory_saver.check",
        "engine",
        "torch_memory_saver",
        r"(?:cudaerror|curesult) error: ?2? ?\(?out of memory\)?.{0,20}?file=csrc/(?:core|utils|cpu_backup)"
        r"|curesult error:? ?result=2 file=csrc/",
        backend="CUDA",
        event="torch_memory_saver",
    ),
    form(
        "sglang.no_pool",
        "engine",
        "SGLang",
        r"not enough memory\.please try (?:to increase|increasing) --mem-fraction-static"
        r"(?:\.?current value: ?(?:mem_fraction_static=)?{num:share})?",
    ),
    form(
        "sglang.retracted",
        "engine",
        "SGLang",
        r"decode out of memory happened|kv cache pool is full\. ?retract requests",
        weak=True,
    ),
    form("sglang.prefill", "engine", "SGLang", rf"prefill out of memory(?:{_SGLANG_TOKENS})?"),
    form("sglang.decode", "engine", "SGLang", rf"decode out of memory(?:{_SGLANG_TOKENS})?"),
    form(
        "sglang.tokens",
        "engine",
        "SGLang",
        rf"(?<![a-z])out of memory{_SGLANG_TOKENS}",
    ),
    form(
        "sglang.request_rows",
        "engine",
        "SGLang",
        r"(?:alloc_req_slots runs out of memory|out of memory\.please set a smaller number for "
        r"`--max-running-requests`)",
    ),
    form(
        "sglang.graph_capture",
        "engine",
        "SGLang",
        r"capture (?:cuda|cpu|hip|npu|xpu)? ?graph failed:(?:(?!possible solutions).){0,400}?"
        r"(?:out of memory|failed to allocate memory)",
        absorbs=("device",),
    ),
    form("sglang.unbalanced", "engine", "SGLang", r"the memory capacity is unbalanced\.some gpus may be occupied"),
    form(
        "tgi.warmup",
        "engine",
        "TGI",
        r"not enough memory to handle (?:{int:wanted_tokens} total tokens with )?{int:prefill_tokens} prefill tokens",
        absorbs=("device",),
    ),
    form("lmdeploy.no_memory", "engine", "LMDeploy", r"no enough gpu memory for runtime"),
    form(
        "flashinfer.workspace",
        "engine",
        "FlashInfer",
        r"failed to allocate memory for [a-z_]{3,60} with size {int:wanted_bytes} and alignment",
    ),
)
