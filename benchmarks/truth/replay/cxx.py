"""Put C++ frames around Python ones, as a history recorded with ``stacks="all"`` holds them.

The names are the symbols torch and CPython export; which operator and which autograd node they speak of is what
ran. Python frames stand where the interpreter's frames are, innermost first.
"""

from __future__ import annotations

from benchmarks.truth.trace.stacks import Frame

_HEAP = "c10::cuda::CUDACachingAllocator::Native::"
_UNWIND = ("torch::unwind::unwind()", "torch::CapturedTraceback::gather(bool, bool, bool)")
_MALLOC = (f"{_HEAP}DeviceCachingAllocator::malloc(unsigned long, CUstream_st*)",
           f"{_HEAP}NativeCachingAllocator::malloc(void**, signed char, unsigned long, CUstream_st*)",
           f"{_HEAP}NativeCachingAllocator::allocate(unsigned long)")
_FREE = (f"{_HEAP}DeviceCachingAllocator::free({_HEAP}Block*)", "c10::TensorImpl::~TensorImpl() [clone .localalias]",
         "THPVariable_clear(THPVariable*)", "THPVariable_dealloc(_object*)")
_ENGINE = ("torch::autograd::Node::operator()(std::vector<at::Tensor, std::allocator<at::Tensor> >&&)",
           "torch::autograd::Engine::evaluate_function(std::shared_ptr<torch::autograd::GraphTask>&, "
           "torch::autograd::Node*, torch::autograd::InputBuffer&, "
           "std::shared_ptr<torch::autograd::ReadyQueue> const&)",
           "torch::autograd::Engine::thread_main(std::shared_ptr<torch::autograd::GraphTask> const&)",
           "torch::autograd::python::PythonEngine::thread_init(int, "
           "std::shared_ptr<torch::autograd::ReadyQueue> const&, bool)", "__clone")
# What the harness names after what happened, by the operator that does it.
_OPERATOR = {"Module.to": "_to_copy", "materialize": "_to_copy", "buffer": "_to_copy", "load": "_to_copy",
             "warmup": "empty"}
_CALLS = (("_PyEval_EvalFrameDefault", "PyMethod_New"),
          ("_PyEval_EvalFrameDefault", "_PyObject_Call_Prepend", "PyType_GetModule", "_PyObject_MakeTpCall"))
_START = ("_PyEval_EvalFrameDefault", "PyEval_EvalCode", "PyRun_StringFlags", "_PyRun_SimpleFileObject", "Py_RunMain",
          "Py_BytesMain", "__libc_start_main", "_start")


def _frames(names: tuple[str, ...] | list[str]) -> list[Frame]:
    return [{"name": name, "filename": "CUDACachingAllocator.cpp" if _HEAP in name else "??", "line": 0}
            for name in names]


def mixed(frames: list[Frame], op: str, node: str) -> list[Frame]:
    """Return ``frames`` with the C++ frames of ``op`` (empty for a free) and, inside backward, of ``node``."""
    out = _frames([*_UNWIND, *(_MALLOC if op else _FREE)])
    if op:
        short = _OPERATOR.get(op, op.split(".", 1)[-1])
        out += _frames([f"at::native::{short}_cuda(at::Tensor const&)",
                        f"at::_ops::{short}::redispatch(c10::DispatchKeySet, at::Tensor const&)",
                        f"torch::autograd::VariableType::(anonymous namespace)::{short}(c10::DispatchKeySet, "
                        "at::Tensor const&)", f"at::_ops::{short}::call(at::Tensor const&)"])
    if frames and op:
        out += _frames([f"torch::autograd::THPVariable_{short}(_object*, _object*, _object*)", "PyCMethod_New"])
    for i, frame in enumerate(frames):
        out += [frame, *_frames(_CALLS[i % 2] if i + 1 < len(frames) else _START[:1])]
    if node:
        apply = "torch::autograd::PyNode::apply" if frames else f"torch::autograd::generated::{node}::apply"
        if node.endswith("AccumulateGrad"):
            apply = "torch::autograd::AccumulateGrad::apply"
        out += _frames([apply + "(std::vector<at::Tensor, std::allocator<at::Tensor> >&&)", *_ENGINE])
    elif frames:
        out += _frames(_START[1:])
    return out
