/* Random numbers of the emulated device. One CPU generator is put where an operator's CUDA generator stands, seeded with that
 * one's seed and offset: torch.manual_seed and saved states work as on a GPU, and the user's CPU generator is not touched. */
#pragma once
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <torch/library.h>
#include <mutex>

namespace memprof_values {

inline at::Generator& random_source() {
  static at::Generator g = at::detail::createCPUGenerator(0);
  return g;
}

/* The state of the CUDA generator among the last n values of the stack, or of the device's own. */
inline uint64_t random_state(const torch::jit::Stack& stack, size_t n) {
  at::Generator g;
  for (size_t i = stack.size() - n; i < stack.size(); i++)
    if (stack[i].isGenerator() && stack[i].toGenerator().device().is_cuda()) g = stack[i].toGenerator();
  if (!g.defined()) g = at::globalContext().defaultGenerator(at::Device(at::kCUDA, -1));
  std::lock_guard<std::mutex> lock(g.mutex());
  return g.current_seed() * 0x9E3779B97F4A7C15ull + g.get_offset();
}

}  // namespace memprof_values
