/* The values that CUDA kernels would have computed.
 *
 * Every aten operator with a CUDA kernel is overridden at the CUDA key by one boxed function. It runs the real CUDA
 * implementation, which allocates, launches nothing and frees: the memory history is torch's own, with no Python frame added.
 * Then it calls the operator's CPU kernel on aliases of the same memory and copies the results into the real outputs.
 *
 * An operator without a CPU kernel, or with a tensor above MEMPROF_EMULATE_VALUES_MAX elements, is left uncomputed; its new
 * outputs are zeros where they are small. Triton kernels are no aten operators (memprof/emulate/triton_values.py has them).
 * Operators of another library are taken when it has registered them (memprof/emulate/operator_values.py).
 */
#include "aliases.hpp"
#include "attention.hpp"
#include "kernels_of.hpp"
#include "libraries.hpp"
#include "products.hpp"
#include "randomness.hpp"
#include <map>
#include <set>
#include <unordered_map>

extern "C" void memprof_emulator_values_loaded(void);

namespace memprof_values {
namespace {

using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::OperatorHandle;
using torch::jit::Stack;

struct Original {
  CudaKernel kernel;
  bool sized_by_values; /* how large the result is depends on the input's values */
  bool random;
  bool empty;           /* makes a tensor and leaves it uninitialised */
  bool no_cpu = false;
  std::optional<OperatorHandle> functional = std::nullopt; /* what has a CPU kernel where a form with an output has none */
};
std::unordered_map<std::string, Original>* originals;
std::mutex uncomputed_lock;
std::map<std::string, size_t>* uncomputed; /* calls whose CPU kernel is missing or failed; too large ones are not among them */
thread_local int inside; /* an original is running: what it calls is computed with it */

struct Call {
  const OperatorHandle& op;
  const std::string name;
  Original& original;
  const size_t n_in, n_out;
  const std::vector<IValue> in;
  const uint64_t seed;
};

std::string full_name(const OperatorHandle& op) {
  const auto& name = op.operator_name();
  return name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
}

/* Runs the CPU kernel on aliases; its results are left on `host`. False where a tensor is too large. */
bool run_on_host(const Call& call, Stack& host) {
  static std::mutex one_at_a_time;
  std::unique_lock<std::mutex> lock(one_at_a_time, std::defer_lock);
  if (call.original.random) {
    lock.lock();
    random_source().set_current_seed(call.seed);
  }
  bool has_tensors = false;
  const size_t taken = call.n_in - (call.original.functional ? 1 : 0); /* the output is no argument of the other form */
  for (size_t i = 0; i < taken; i++) {
    IValue value;
    if (!to_host(call.in[i], value, random_source())) return false;
    const auto& argument = call.op.schema().arguments()[i].name();
    if (call.original.random && value.isNone() && argument == "generator") value = random_source();
    has_tensors = has_tensors || call.in[i].isTensor() || call.in[i].isTensorList();
    host.push_back(std::move(value));
  }
  if (!has_tensors) return false;
  at::AutoDispatchBelowAutograd guard;
  (call.original.functional ? *call.original.functional : call.op).callBoxed(&host);
  return true;
}

/* What the CPU has no kernel for, and is computed here. */
bool compute_here(const Call& call, const Stack& stack) {
  if (call.name.find("aten::_scaled_dot_product_") != 0 && call.name.find(".dtype") == std::string::npos) return false;
  std::vector<IValue> host(call.n_in);
  for (size_t i = 0; i < call.n_in; i++)
    if (!to_host(call.in[i], host[i], random_source())) return false;
  std::vector<at::Tensor> outs;
  for (size_t i = stack.size() - call.n_out; i < stack.size(); i++) outs.push_back(stack[i].isTensor() ? stack[i].toTensor() : at::Tensor());
  at::AutoDispatchBelowAutograd guard;
  return attention(call.name, host, outs) || product(call.name, host, outs);
}

void count_uncomputed(const Call& call) {
  const auto& returns = call.op.schema().returns();
  if (!returns.empty() && returns[0].type()->kind() == c10::TypeKind::BoolType) return; /* a question, which is answered */
  std::lock_guard<std::mutex> lock(uncomputed_lock);
  (*uncomputed)[call.name]++;
}

/* Puts values into the outputs on the stack; false where there are none to be had. */
bool compute(const Call& call, Stack& stack) {
  if (call.original.no_cpu) {
    count_uncomputed(call);
    return false;
  }
  try {
    if (compute_here(call, stack)) return true;
    Stack host;
    if (!run_on_host(call, host)) return false;
    if (call.original.functional) put(call.in.back().toTensor(), host.back().toTensor());
    for (size_t i = 0; i < call.n_out; i++) put(stack[stack.size() - call.n_out + i], host[host.size() - call.n_out + i]);
    return true;
  } catch (const c10::NotImplementedError&) {
    call.original.no_cpu = true;
    if (limits().trace) fprintf(stderr, "memprof values: %s has no CPU kernel\n", call.name.c_str());
  } catch (const std::exception& e) {
    if (limits().trace) fprintf(stderr, "memprof values: %s: %.300s\n", call.name.c_str(), e.what());
  }
  count_uncomputed(call);
  return false;
}

/* nonzero and its like: computed first, then put on the device, with one allocation of the result's size. */
bool compute_first(const Call& call, Stack& stack) {
  at::Device device(at::kCUDA);
  for (const auto& value : call.in)
    if (value.isTensor() && on_device(value.toTensor())) {
      device = value.toTensor().device();
      break;
    }
  Stack host;
  if (!run_on_host(call, host)) return false;
  torch::jit::drop(stack, call.n_in);
  for (auto& value : host) {
    if (value.isTensor() && value.toTensor().defined()) {
      auto result = value.toTensor();
      auto out = at::empty(result.sizes(), result.options().device(device));
      put(out, result);
      stack.push_back(out);
    } else stack.push_back(value);
  }
  return true;
}

/* What takes each operator's place at the CUDA key. */
void computed(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  const std::string name = full_name(op);
  Original& original = originals->at(name);
  if (original.empty) { /* zeros, so that what is never computed is at least always the same */
    original.kernel.callBoxed(op, keys, stack);
    clear(stack->back());
    return;
  }
  if (inside && !original.sized_by_values) return original.kernel.callBoxed(op, keys, stack);
  const size_t n_in = op.schema().arguments().size(), n_out = op.schema().returns().size();
  const Call call{op, name, original, n_in, n_out, std::vector<IValue>(stack->end() - (long)n_in, stack->end()),
                  original.random ? random_state(*stack, n_in) : 0};
  if (original.sized_by_values) {
    if (!compute_first(call, *stack)) original.kernel.callBoxed(op, keys, stack);
    return;
  }
  struct Inside {
    Inside() { inside++; }
    ~Inside() { inside--; }
  };
  {
    Inside mark;
    original.kernel.callBoxed(op, keys, stack);
  }
  if (compute(call, *stack)) return;
  for (size_t i = 0; i < n_out; i++) /* only what is new: an output that is an input keeps what it has */
    if (!op.schema().returns()[i].alias_info()) clear((*stack)[stack->size() - n_out + i]);
}

bool starts(const std::string& s, const char* prefix) { return s.rfind(prefix, 0) == 0; }

/* Views, what has no values, and what must reach CUDA as it is. */
bool is_left_alone(const OperatorHandle& op, const std::string& name) {
  static const char* prefixes[] = {
      "aten::set_", "aten::resize_", "aten::record_stream", "aten::_local_scalar_dense", "aten::_fused_sdp_choice", "aten::cudnn_",
      "aten::_cudnn", "aten::miopen", "aten::_pin", "aten::is_pinned", "aten::_cslt", "aten::_sparse", "aten::sparse", "aten::_nested",
      "aten::_use_cudnn", "aten::_has_", "aten::is_set_to", "aten::_resize", "aten::_cuda", "aten::_convert_indices"};
  for (const char* prefix : prefixes)
    if (starts(name, prefix)) return true;
  for (const auto& r : op.schema().returns())
    if (r.alias_info() && !r.alias_info()->isWrite()) return true;
  return false;
}

Original original_of(const OperatorHandle& op, const std::string& name) {
  static const std::set<std::string> sized = {
      "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive",
      "aten::repeat_interleave.Tensor", "aten::bincount"};
  bool random = false;
  for (auto tag : op.getTags()) random = random || tag == at::Tag::nondeterministic_seeded;
  return Original{cuda_kernel_of(op), sized.count(name) > 0, random, starts(name, "aten::empty")};
}

/* Takes the place of every operator of a namespace that has a kernel of CUDA's; how many there were. */
size_t take_operators(const std::string& space) {
  auto* library = new torch::Library(torch::Library::IMPL, space, DispatchKey::CUDA, __FILE__, __LINE__);
  std::vector<std::string> names;
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    auto op = dispatcher.findOp(name);
    if (!op || !op->hasSchema() || !starts(name.name, (space + "::").c_str())) continue;
    const std::string full = full_name(*op);
    bool launches = full == "aten::copy_" || op->hasKernelForDispatchKey(DispatchKey::CUDA); /* copy_ has none, and launches */
    if (!launches || is_left_alone(*op, full) || originals->count(full)) continue;
    Original original = original_of(*op, full);
    if (space != "aten" && !find_host_form(*op, original.functional)) continue; /* made of operators that are computed */
    originals->emplace(full, std::move(original));
    names.push_back(full.substr(space.size() + 2));
  }
  struct Silent : c10::WarningHandler {
    void process(const c10::Warning&) override {} /* "overriding a previously registered kernel": that is the aim */
  } silent;
  c10::WarningUtils::WarningHandlerGuard guard(&silent);
  for (const auto& name : names) library->impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&computed>());
  return names.size();
}

struct Install {
  Install() {
    originals = new std::unordered_map<std::string, Original>;
    uncomputed = new std::map<std::string, size_t>;
    take_operators("aten");
    memprof_emulator_values_loaded();
  }
} install;

}  // namespace
}  // namespace memprof_values

/* Computes the operators that a library has registered by now; how many those are. */
extern "C" size_t memprof_emulator_compute(const char* space) { return memprof_values::take_operators(space); }

/* The operators that were left uncomputed, a line each: a name and how many calls. Valid until this thread asks again. */
extern "C" const char* memprof_emulator_uncomputed() {
  thread_local std::string lines;
  std::lock_guard<std::mutex> lock(memprof_values::uncomputed_lock);
  lines.clear();
  for (const auto& [name, calls] : *memprof_values::uncomputed) lines += name + " " + std::to_string(calls) + "\n";
  return lines.c_str();
}
