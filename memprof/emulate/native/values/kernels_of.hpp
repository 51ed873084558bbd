/* The kernel an operator has on CUDA before it is overridden. Its type's name is torch's to change. */
#pragma once
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/version.h>

namespace memprof_values {

#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 9 /* no public way to it: an explicit instantiation may name a private member */
auto definition_of(const c10::OperatorHandle& op);

template <auto member>
struct Opened {
  friend auto definition_of(const c10::OperatorHandle& op) { return op.*member; }
};
template struct Opened<&c10::OperatorHandle::operatorDef_>;

inline c10::KernelFunction cuda_kernel_of(const c10::OperatorHandle& op) {
  return definition_of(op)->op.lookup(c10::DispatchKeySet(c10::DispatchKey::CUDA)); /* a copy: the table's entry is overridden */
}
#else
inline auto cuda_kernel_of(const c10::OperatorHandle& op) { return op.getComputedKernelForDispatchKey(c10::DispatchKey::CUDA); }
#endif

using CudaKernel = decltype(cuda_kernel_of(std::declval<const c10::OperatorHandle&>()));

}  // namespace memprof_values
