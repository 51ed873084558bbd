/* CPU tensors over the memory of "device" tensors, which is host memory: what CPU kernels read and write. */
#pragma once
#include <ATen/ATen.h>
#include <ATen/core/ivalue.h>
#include <cstdlib>

namespace memprof_values {

using c10::IValue;

struct Limits {
  int64_t elements = 1 << 24; /* an operator with a larger tensor is left uncomputed */
  bool trace = false;
};

inline const Limits& limits() {
  static const Limits read = [] {
    Limits l;
    if (const char* text = getenv("MEMPROF_EMULATE_VALUES_MAX")) l.elements = atoll(text);
    const char* text = getenv("MEMPROF_EMULATE_TRACE");
    l.trace = text && *text && *text != '0';
    return l;
  }();
  return read;
}

inline bool on_device(const at::Tensor& t) { return t.defined() && t.is_cuda(); }

inline bool can_alias(const at::Tensor& t) {
  return !on_device(t) || (t.layout() == at::kStrided && t.numel() <= limits().elements);
}

inline at::Tensor host_alias(const at::Tensor& t) {
  if (!on_device(t)) return t;
  at::AutoDispatchBelowAutograd guard;
  auto options = t.options().device(at::kCPU).requires_grad(false);
  return at::from_blob(t.data_ptr(), t.sizes(), t.strides(), [](void*) {}, options);
}

/* The value with every device tensor replaced by its alias, and a generator by `generator`; false where one is too large. */
inline bool to_host(const IValue& value, IValue& out, const at::Generator& generator) {
  if (value.isTensor()) {
    if (!can_alias(value.toTensor())) return false;
    out = host_alias(value.toTensor());
  } else if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& t : value.toTensorVector()) {
      if (!can_alias(t)) return false;
      list.push_back(host_alias(t));
    }
    out = list;
  } else if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (std::optional<at::Tensor> t : value.toOptionalTensorVector()) {
      if (t && !can_alias(*t)) return false;
      list.push_back(t && t->defined() ? std::optional<at::Tensor>(host_alias(*t)) : t);
    }
    out = list;
  } else {
    out = value.isGenerator() ? IValue(generator) : value;
  }
  return true;
}

/* Copies a result into the memory of the output that the CUDA kernel would have written. */
inline void put(const at::Tensor& out, const at::Tensor& result) {
  if (!on_device(out) || !result.defined() || result.data_ptr() == out.data_ptr()) return;
  if (out.numel() == result.numel()) host_alias(out).copy_(result.reshape(out.sizes()));
  else if (limits().trace)
    fprintf(stderr, "memprof values: an output of %ld elements for %ld\n", (long)result.numel(), (long)out.numel());
}

inline void put(IValue& out, const IValue& result) {
  if (out.isTensor() && result.isTensor()) put(out.toTensor(), result.toTensor());
  else if (out.isTensorList() && result.isTensorList()) {
    auto outs = out.toTensorVector(), results = result.toTensorVector();
    for (size_t i = 0; i < outs.size() && i < results.size(); i++) put(outs[i], results[i]);
  } else if (!out.isTensor() && !out.isTensorList()) out = result;
}

inline void clear(const IValue& value) {
  if (value.isTensor() && on_device(value.toTensor()) && can_alias(value.toTensor())) host_alias(value.toTensor()).zero_();
}

}  // namespace memprof_values
