/* Products into another type than their operands' (torch.addmm with out_dtype): on the CPU they do not exist. */
#pragma once
#include "aliases.hpp"
#include <string>
#include <vector>

namespace memprof_values {

/* outs: the CUDA kernel's outputs; in: its inputs' aliases. False where the name is none of the eight. */
inline bool product(const std::string& name, const std::vector<IValue>& in, const std::vector<at::Tensor>& outs) {
  auto is = [&](const char* base) { return name == std::string(base) + ".dtype" || name == std::string(base) + ".dtype_out"; };
  const bool sum = is("aten::addmm") || is("aten::baddbmm");
  if (!sum && !is("aten::mm") && !is("aten::bmm")) return false;
  const size_t first = sum ? 1 : 0;
  const auto type = in[first + 2].toScalarType();
  auto result = at::matmul(in[first].toTensor().to(type), in[first + 1].toTensor().to(type));
  if (sum) result = in[0].toTensor().to(type) * in[4].toScalar() + result * in[5].toScalar();
  put(outs[0], result);
  return true;
}

}  // namespace memprof_values
