/* Flash and memory-efficient attention, forward and backward: the CPU has no kernels of their names. */
#pragma once
#include "aliases.hpp"
#include <torch/library.h>
#include <cmath>
#include <string>
#include <vector>

namespace memprof_values {

struct Attention {
  at::Tensor q, k, v, p; /* in float32; p: the probabilities */
  double scale;
  int64_t groups; /* query heads that share a key's head */
};

inline Attention attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const std::optional<at::Tensor>& bias,
                        bool causal, std::optional<double> scale) {
  Attention a;
  a.groups = q.size(1) / k.size(1);
  a.q = q.to(at::kFloat);
  a.k = k.to(at::kFloat).repeat_interleave(a.groups, 1);
  a.v = v.to(at::kFloat).repeat_interleave(a.groups, 1);
  a.scale = scale ? *scale : 1.0 / std::sqrt((double)q.size(-1));
  auto s = at::matmul(a.q, a.k.transpose(-1, -2)) * a.scale;
  if (bias && bias->defined()) s = bias->scalar_type() == at::kBool ? s.masked_fill(bias->logical_not(), -INFINITY) : s + bias->to(at::kFloat);
  if (causal) s = s.masked_fill(at::ones({s.size(-2), s.size(-1)}, at::kBool).tril().logical_not(), -INFINITY);
  a.p = at::nan_to_num(at::softmax(s, -1), 0.0); /* a row that may see nothing gives zeros, as the kernels do */
  return a;
}

/* Sums the gradients of the query heads that share a key's head. */
inline at::Tensor fold(const at::Tensor& t, int64_t groups) {
  return groups == 1 ? t : t.reshape({t.size(0), t.size(1) / groups, groups, t.size(2), t.size(3)}).sum(2);
}

inline std::optional<at::Tensor> optional_tensor(const IValue& v) {
  return v.isTensor() ? std::optional<at::Tensor>(v.toTensor()) : std::nullopt;
}
inline std::optional<double> optional_double(const IValue& v) {
  return v.isNone() ? std::nullopt : std::optional<double>(v.toDouble());
}

/* outs: the CUDA kernel's outputs; in: its inputs' aliases. False where the name is none of the four. */
inline bool attention(const std::string& name, const std::vector<IValue>& in, const std::vector<at::Tensor>& outs) {
  const bool flash = name == "aten::_scaled_dot_product_flash_attention";
  if (flash || name == "aten::_scaled_dot_product_efficient_attention") {
    auto a = attend(in[0].toTensor(), in[1].toTensor(), in[2].toTensor(), flash ? std::nullopt : optional_tensor(in[3]),
                    in[flash ? 4 : 6].toBool(), optional_double(in.back()));
    put(outs[0], at::matmul(a.p, a.v).to(in[0].toTensor().scalar_type()));
    clear(outs[1]); /* the log-sum-exp, which only the CUDA backward reads */
    return true;
  }
  const bool flash_backward = name == "aten::_scaled_dot_product_flash_attention_backward";
  if (!flash_backward && name != "aten::_scaled_dot_product_efficient_attention_backward") return false;
  auto grad = in[0].toTensor().to(at::kFloat);
  auto a = attend(in[1].toTensor(), in[2].toTensor(), in[3].toTensor(), flash_backward ? std::nullopt : optional_tensor(in[4]),
                  in[11].toBool(), optional_double(in.back()));
  auto dp = at::matmul(grad, a.v.transpose(-1, -2));
  auto ds = a.p * (dp - (dp * a.p).sum(-1, true)) * a.scale;
  auto type = in[1].toTensor().scalar_type();
  put(outs[0], at::matmul(ds, a.k).to(type));
  put(outs[1], fold(at::matmul(ds.transpose(-1, -2), a.q), a.groups).to(type));
  put(outs[2], fold(at::matmul(a.p.transpose(-1, -2), grad), a.groups).to(type));
  return true;
}

}  // namespace memprof_values
