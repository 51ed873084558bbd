/* Operators that another library registered with torch beside its CUDA kernels: what of them runs on the CPU. */
#pragma once
#include <ATen/core/dispatch/Dispatcher.h>
#include <optional>

namespace memprof_values {

inline bool runs_on_host(const c10::OperatorHandle& op) {
  return op.hasKernelForDispatchKey(c10::DispatchKey::CPU) || op.hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd);
}

/* False where no form of the operator has a CPU kernel. `functional` is set where only the form without `out` has one. */
inline bool find_host_form(const c10::OperatorHandle& op, std::optional<c10::OperatorHandle>& functional) {
  if (runs_on_host(op)) return true;
  const auto& name = op.operator_name();
  if (name.overload_name != "out" || op.schema().arguments().empty() || op.schema().arguments().back().name() != "out") return false;
  auto other = c10::Dispatcher::singleton().findSchema({name.name, ""});
  if (!other || other->schema().returns().size() != 1 || !runs_on_host(*other)) return false;
  functional = other;
  return true;
}

}  // namespace memprof_values
