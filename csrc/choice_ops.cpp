// The border to torch of choices: Megatron's dense routing to slots, and its gradient back.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>

#include <tuple>

#include "layer_arguments.h"
#include "tensor_checks.h"

namespace {

using namespace mok::border;

mok::Dense dense_type(ScalarType type) {
  switch (type) {
    case ScalarType::BFloat16:
      return mok::Dense::kBf16;
    case ScalarType::Float:
      return mok::Dense::kFp32;
    case ScalarType::Double:
      return mok::Dense::kFp64;
    default:
      STD_TORCH_CHECK(false,
                      "mok: dense probabilities must be bfloat16, float32 or float64, got ",
                      name_of(type),
                      "; convert them");
  }
}

// Dense probabilities and map [T, E] -> expert and prob [T, K].
std::tuple<Tensor, Tensor> choices(const Tensor& probs, const Tensor& map, int64_t top_k) {
  const mok::Dense type = dense_type(probs.scalar_type());
  check_tensor(probs, "probs", probs.scalar_type(), {-1, -1});
  const int64_t tokens = probs.size(0), experts = probs.size(1);
  check_tensor(map, "map", ScalarType::Bool, {tokens, experts}, 1);
  STD_TORCH_CHECK(top_k > 0 && top_k <= experts && experts <= INT32_MAX,
                  "mok: a token may have 1 to ",
                  experts,
                  " choices, got ",
                  top_k,
                  "; correct --moe-router-topk");
  check_device(probs, "choices", {&map});
  const torch::stable::accelerator::DeviceGuard guard(probs.get_device_index());
  const Tensor expert = new_tensor(probs, {tokens, top_k}, ScalarType::Int);
  const Tensor prob = new_tensor(probs, {tokens, top_k}, ScalarType::Float);
  mok::launch_choices({.dense_TE = probs.const_data_ptr(),
                       .map_TE = map.const_data_ptr<bool>(),
                       .tokens = tokens,
                       .choices = static_cast<int32_t>(top_k),
                       .experts = static_cast<int32_t>(experts),
                       .type = type,
                       .expert_TK = expert.mutable_data_ptr<int32_t>(),
                       .prob_TK = prob.mutable_data_ptr<float>(),
                       .stream = stream_of(probs)});
  return {expert, prob};
}

// The gradient of dense probabilities, in `type`, of that of prob.
Tensor spread(const Tensor& dprob, const Tensor& expert, int64_t experts, ScalarType type) {
  check_tensor(expert, "expert", ScalarType::Int, {-1, -1});
  const int64_t tokens = expert.size(0), top_k = expert.size(1);
  check_tensor(dprob, "dprob", ScalarType::Float, {tokens, top_k});
  const mok::Dense dense = dense_type(type);
  STD_TORCH_CHECK(experts >= top_k && experts <= INT32_MAX,
                  "mok: there must be at least as many experts as choices, got ",
                  experts,
                  " for ",
                  top_k);
  check_device(expert, "spread", {&dprob});
  const torch::stable::accelerator::DeviceGuard guard(expert.get_device_index());
  const Tensor out = new_tensor(expert, {tokens, experts}, type);
  mok::launch_spread({.d_prob_TK = dprob.const_data_ptr<float>(),
                      .expert_TK = expert.const_data_ptr<int32_t>(),
                      .tokens = tokens,
                      .choices = static_cast<int32_t>(top_k),
                      .experts = static_cast<int32_t>(experts),
                      .type = dense,
                      .d_dense_TE = out.mutable_data_ptr(),
                      .stream = stream_of(expert)});
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(mok_megatron, m) {
  m.def("choices(Tensor probs, Tensor map, int top_k) -> (Tensor, Tensor)");
  m.def("spread(Tensor dprob, Tensor expert, int experts, ScalarType dtype) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(mok_megatron, CompositeExplicitAutograd, m) {
  m.impl("choices", TORCH_BOX(&choices));
  m.impl("spread", TORCH_BOX(&spread));
}
