// The border to torch of the layer: route, the forward and backward kernels, and tables of tensor
// maps.
//
// ops.cpp is the same border for the products. There are two files because there are two stages,
// each with its own arguments and rules, and one file for both would be too long to read; beside
// tensor_checks.h, which they share, no other file has torch headers.
//
// Every op writes into tensors of the caller and never waits for the device. Checks run before the
// device is asked.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <atomic>
#include <optional>
#include <string>
#include <vector>

#include "arguments.h"
#include "direction_arguments.h"
#include "layer_arguments.h"
#include "tensor_checks.h"

namespace {

using namespace mok::border;

void check_hidden(int64_t hidden) {
  STD_TORCH_CHECK(hidden > 0 && hidden % 64 == 0,
                  "mok: the hidden size must be a positive multiple of 64, got ",
                  hidden,
                  "; use --moe-token-dispatcher-type alltoall");
}

void check_device(const Tensor& first, const char* op, const std::vector<const Tensor*>& others) {
  STD_TORCH_CHECK(first.is_cuda(),
                  "mok: ",
                  op,
                  " needs CUDA tensors, got another device; use the reference backend");
  for (const Tensor* t : others) {
    STD_TORCH_CHECK(t->is_cuda() && t->get_device_index() == first.get_device_index(),
                    "mok: every argument of ",
                    op,
                    " must be on the device of the first, ",
                    first.get_device_index(),
                    ", got ",
                    t->is_cuda() ? t->get_device_index() : -1);
  }
}

// int32 [T, K] with as many tokens and choices as a launch can have.
void check_slots(const Tensor& t, const char* name) {
  check_tensor(t, name, ScalarType::Int, {-1, -1});
  STD_TORCH_CHECK(t.size(1) > 0 && t.size(1) <= mok::kMaxChoices,
                  "mok: a token may have 1 to ",
                  mok::kMaxChoices,
                  " choices, got ",
                  t.size(1),
                  " in ",
                  name,
                  "; use --mok-backend reference");
  STD_TORCH_CHECK(t.size(0) * t.size(1) <= INT32_MAX / 2,
                  "mok: tokens x choices must be at most ",
                  INT32_MAX / 2,
                  ", got ",
                  t.size(0),
                  " x ",
                  t.size(1),
                  " in ",
                  name,
                  "; lower --micro-batch-size");
}

void route(const Tensor& expert, const Tensor& prob, const Tensor& counts, const Tensor& row_start,
           const Tensor& row_count, const Tensor& shared_start, const Tensor& shared_count,
           const Tensor& faulty, const Tensor& row, const Tensor& slot, const Tensor& row_prob) {
  check_slots(expert, "expert");
  const int64_t tokens = expert.size(0), choices = expert.size(1), slots = tokens * choices;
  check_tensor(prob, "prob", ScalarType::Float, {tokens, choices});
  check_tensor(row_count, "row_count", ScalarType::Int, {-1});
  const int64_t experts = row_count.size(0);
  STD_TORCH_CHECK(experts > 0 && experts <= mok::kMaxExperts,
                  "mok: there may be 1 to ",
                  mok::kMaxExperts,
                  " experts, got ",
                  experts,
                  "; use --mok-backend reference");
  const int64_t chunks = (slots + mok::kChunk - 1) / mok::kChunk;
  check_tensor(counts, "counts", ScalarType::Int, {chunks + 1, experts + 1});
  check_tensor(row_start, "row_start", ScalarType::Int, {experts + 1});
  check_tensor(shared_start, "shared_start", ScalarType::Int, {2});
  check_tensor(shared_count, "shared_count", ScalarType::Int, {1});
  check_tensor(faulty, "faulty", ScalarType::Int, {1});
  check_tensor(row, "row", ScalarType::Int, {tokens, choices});
  check_tensor(slot, "slot", ScalarType::Int, {-1});
  const int64_t rows = slot.size(0);
  const int64_t bound = slots + 127 * (slots < experts ? slots : experts);
  STD_TORCH_CHECK(rows >= bound / 128 * 128 && rows <= INT32_MAX,
                  "mok: slot must have ",
                  bound / 128 * 128,
                  " to 2^31 - 1 rows for ",
                  slots,
                  " slots and ",
                  experts,
                  " experts, got ",
                  rows);
  check_tensor(row_prob, "row_prob", ScalarType::Float, {rows});
  check_device(expert,
               "route",
               {&prob,
                &counts,
                &row_start,
                &row_count,
                &shared_start,
                &shared_count,
                &faulty,
                &row,
                &slot,
                &row_prob});
  const torch::stable::accelerator::DeviceGuard guard(expert.get_device_index());
  mok::launch_route({.expert_TK = expert.const_data_ptr<int32_t>(),
                     .prob_TK = prob.const_data_ptr<float>(),
                     .tokens = static_cast<int32_t>(tokens),
                     .choices = static_cast<int32_t>(choices),
                     .experts = static_cast<int32_t>(experts),
                     .chunks = static_cast<int32_t>(chunks),
                     .counts = counts.mutable_data_ptr<int32_t>(),
                     .row_start = row_start.mutable_data_ptr<int32_t>(),
                     .row_count = row_count.mutable_data_ptr<int32_t>(),
                     .shared_start = shared_start.mutable_data_ptr<int32_t>(),
                     .shared_count = shared_count.mutable_data_ptr<int32_t>(),
                     .faulty = faulty.mutable_data_ptr<int32_t>(),
                     .row_TK = row.mutable_data_ptr<int32_t>(),
                     .slot_R = slot.mutable_data_ptr<int32_t>(),
                     .prob_R = row_prob.mutable_data_ptr<float>(),
                     .fault = mok::route_fault_record(),
                     .stream = stream_of(expert)});
}

// The six tensors that route writes.
mok::Routing routing_of(const std::vector<Tensor>& routing, const Tensor& x) {
  STD_TORCH_CHECK(routing.size() == 6,
                  "mok: routing must be row_start, row_count, faulty, row, slot, row_prob, got ",
                  routing.size(),
                  " tensors");
  const Tensor &row = routing[3], &slot = routing[4];
  check_slots(row, "row");
  check_tensor(routing[1], "row_count", ScalarType::Int, {-1});
  const int64_t experts = routing[1].size(0);
  check_tensor(routing[0], "row_start", ScalarType::Int, {experts + 1});
  check_tensor(routing[2], "faulty", ScalarType::Int, {1});
  check_tensor(slot, "slot", ScalarType::Int, {-1});
  STD_TORCH_CHECK(slot.size(0) > 0 && slot.size(0) % 128 == 0 && slot.size(0) <= INT32_MAX,
                  "mok: the rows of slot must be a positive multiple of 128, got ",
                  slot.size(0));
  check_tensor(routing[5], "row_prob", ScalarType::Float, {slot.size(0)});
  check_tensor(x, "x", ScalarType::BFloat16, {row.size(0), -1}, 16);
  STD_TORCH_CHECK(x.size(0) > 0, "mok: a layer's kernel needs tokens, got none");
  check_hidden(x.size(1));
  return {.row_start = routing[0].const_data_ptr<int32_t>(),
          .row_count = routing[1].const_data_ptr<int32_t>(),
          .row_TK = row.const_data_ptr<int32_t>(),
          .slot_R = slot.const_data_ptr<int32_t>(),
          .prob_R = routing[5].const_data_ptr<float>(),
          .faulty = routing[2].const_data_ptr<int32_t>(),
          .tokens = static_cast<int32_t>(row.size(0)),
          .choices = static_cast<int32_t>(row.size(1)),
          .experts = static_cast<int32_t>(experts),
          .rows = static_cast<int32_t>(slot.size(0))};
}

// A table of `count` maps, or, where it may be left out, one without records.
const void* table_of(const Tensor& table, const char* name, int64_t count, bool optional) {
  if (optional && table.numel() == 0) return nullptr;
  check_tensor(table, name, ScalarType::Byte, {count + 1, mok::kTensorMapBytes}, 128);
  return table.const_data_ptr();
}

mok::WeightTables weights_of(const std::vector<Tensor>& weights, int64_t experts) {
  STD_TORCH_CHECK(weights.size() == 2 || weights.size() == 4,
                  "mok: weights must be two tables, or four with a shared expert, got ",
                  weights.size());
  const bool shared = weights.size() == 4;
  return {.w1 = table_of(weights[0], "w1", experts, false),
          .w2 = table_of(weights[1], "w2", experts, false),
          .shared_w1 = shared ? table_of(weights[2], "shared w1", 1, false) : nullptr,
          .shared_w2 = shared ? table_of(weights[3], "shared w2", 1, false) : nullptr};
}

// A bf16 buffer, for its place among the arguments.
void* buffer_of(const Tensor& t, const char* name, int64_t rows, int64_t columns) {
  check_tensor(t, name, ScalarType::BFloat16, {rows, columns}, 16);
  return t.mutable_data_ptr();
}

int32_t width_of(const Tensor& activation, const char* name, int64_t rows) {
  check_tensor(activation, name, ScalarType::BFloat16, {rows, -1}, 16);
  const int64_t width = activation.size(1);
  STD_TORCH_CHECK(width > 0 && width % 64 == 0,
                  "mok: the columns of ",
                  name,
                  " must be a positive multiple of 64, got ",
                  width,
                  "; use --moe-token-dispatcher-type alltoall");
  return static_cast<int32_t>(width);
}

void check_count(const std::vector<Tensor>& list, const char* name, size_t routed, size_t shared,
                 bool has_shared) {
  const size_t wanted = routed + (has_shared ? shared : 0);
  STD_TORCH_CHECK(
      list.size() == wanted, "mok: ", name, " must be ", wanted, " tensors, got ", list.size());
}

mok::DirectionLaunch direction_launch(const Tensor& x, const mok::Routing& r, const Tensor& words,
                                      int64_t ctas, int64_t ahead) {
  check_tensor(words, "words", ScalarType::Int, {-1}, 16);
  const int64_t wanted = mok::direction_words(r.rows, r.tokens, r.experts);
  STD_TORCH_CHECK(
      words.numel() >= wanted, "mok: words must have ", wanted, " words, got ", words.numel());
  STD_TORCH_CHECK(ctas >= 0 && ctas <= 65535, "mok: ctas must be 0 (all SMs) to 65535, got ", ctas);
  STD_TORCH_CHECK(
      ahead >= 0 && ahead <= INT32_MAX, "mok: ahead must be 0 (chosen) or more, got ", ahead);
  return {.words = words.mutable_data_ptr<int32_t>(),
          .ctas = static_cast<int32_t>(ctas),
          .ahead = static_cast<int32_t>(ahead),
          .device = x.get_device_index(),
          .stream = stream_of(x)};
}

void check_all_on(const Tensor& x, const char* op,
                  const std::vector<const std::vector<Tensor>*>& lists) {
  std::vector<const Tensor*> all;
  for (const auto* list : lists) {
    for (const Tensor& t : *list) {
      if (t.numel() > 0) all.push_back(&t);
    }
  }
  check_device(x, op, all);
  check_fault();
}

// into: rows, gate_up, activation, y; with a shared expert its gate_up, activation, y.
void forward(const Tensor& x, const std::vector<Tensor>& routing,
             const std::vector<Tensor>& weights, const std::vector<Tensor>& into,
             const Tensor& words, int64_t ctas, int64_t ahead) {
  const mok::Routing r = routing_of(routing, x);
  const bool shared = weights.size() == 4;
  const int64_t hidden = x.size(1);
  mok::ForwardArguments arguments{.routing = r,
                                  .sizes = {.hidden = static_cast<int32_t>(hidden)},
                                  .weights = weights_of(weights, r.experts)};
  check_count(into, "into", 4, 3, shared);
  const int32_t width = arguments.sizes.width = width_of(into[2], "activation", r.rows);
  arguments.x = x.const_data_ptr();
  arguments.rows = buffer_of(into[0], "rows", r.rows, hidden);
  arguments.gate_up = buffer_of(into[1], "gate_up", r.rows, 2 * width);
  arguments.activation = into[2].mutable_data_ptr();
  arguments.y = buffer_of(into[3], "y", r.tokens, hidden);
  if (shared) {
    const int32_t columns = arguments.sizes.shared_width =
        width_of(into[5], "shared activation", r.tokens);
    arguments.shared_gate_up = buffer_of(into[4], "shared gate_up", r.tokens, 2 * columns);
    arguments.shared_activation = into[5].mutable_data_ptr();
    arguments.shared_y = buffer_of(into[6], "shared y", r.tokens, hidden);
  }
  const std::vector<Tensor> others{words};
  check_all_on(x, "forward", {&routing, &weights, &into, &others});
  arguments.launch = direction_launch(x, r, words, ctas, ahead);
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  mok::sm90::launch_forward(arguments);
}

// gate_up: what forward kept, and the shared expert's. gradients: tables in the order of weights,
// one without records where nothing is wanted. into: x rows, dy rows, dx rows, d_gate_up,
// activation, parts, dx, d_prob; with a shared expert its d_gate_up, activation, dx.
void backward(const Tensor& x, const Tensor& dy, const std::vector<Tensor>& routing,
              const std::vector<Tensor>& weights, const std::vector<Tensor>& gate_up,
              const std::vector<Tensor>& gradients, bool fp32, bool accumulate,
              const std::vector<Tensor>& into, const Tensor& words, int64_t ctas, int64_t ahead) {
  const mok::Routing r = routing_of(routing, x);
  const bool shared = weights.size() == 4;
  const int64_t hidden = x.size(1);
  check_tensor(dy, "dy", ScalarType::BFloat16, {r.tokens, hidden}, 16);
  check_count(gate_up, "gate_up", 1, 1, shared);
  check_count(gradients, "gradients", 2, 2, shared);
  check_count(into, "into", 8, 3, shared);
  mok::BackwardArguments arguments{.routing = r,
                                   .sizes = {.hidden = static_cast<int32_t>(hidden)},
                                   .weights = weights_of(weights, r.experts)};
  arguments.gradients = {
      .w1 = table_of(gradients[0], "the gradients of w1", r.experts, true),
      .w2 = table_of(gradients[1], "the gradients of w2", r.experts, true),
      .shared_w1 = shared ? table_of(gradients[2], "the shared gradient of w1", 1, true) : nullptr,
      .shared_w2 = shared ? table_of(gradients[3], "the shared gradient of w2", 1, true) : nullptr,
      .type = fp32 ? mok::Gradient::kFp32 : mok::Gradient::kBf16,
      .accumulate = accumulate};
  const int32_t width = arguments.sizes.width = width_of(into[4], "activation", r.rows);
  arguments.x = x.const_data_ptr();
  arguments.dy = dy.const_data_ptr();
  arguments.gate_up = buffer_of(gate_up[0], "gate_up", r.rows, 2 * width);
  arguments.x_rows = buffer_of(into[0], "x rows", r.rows, hidden);
  arguments.dy_rows = buffer_of(into[1], "dy rows", r.rows, hidden);
  arguments.dx_rows = buffer_of(into[2], "dx rows", r.rows, hidden);
  arguments.d_gate_up = buffer_of(into[3], "d_gate_up", r.rows, 2 * width);
  arguments.activation = into[4].mutable_data_ptr();
  check_tensor(into[5], "parts", ScalarType::Float, {r.rows, width / mok::kPartColumns}, 16);
  arguments.parts = into[5].mutable_data_ptr<float>();
  arguments.dx = buffer_of(into[6], "dx", r.tokens, hidden);
  check_tensor(into[7], "d_prob", ScalarType::Float, {r.tokens, r.choices});
  arguments.d_prob_TK = into[7].mutable_data_ptr<float>();
  if (shared) {
    const int32_t columns = arguments.sizes.shared_width =
        width_of(into[9], "shared activation", r.tokens);
    arguments.shared_gate_up = buffer_of(gate_up[1], "shared gate_up", r.tokens, 2 * columns);
    arguments.shared_d_gate_up = buffer_of(into[8], "shared d_gate_up", r.tokens, 2 * columns);
    arguments.shared_activation = into[9].mutable_data_ptr();
    arguments.shared_dx = buffer_of(into[10], "shared dx", r.tokens, hidden);
  }
  const std::vector<Tensor> others{dy, words};
  check_all_on(x, "backward", {&routing, &weights, &gate_up, &gradients, &into, &others});
  arguments.launch = direction_launch(x, r, words, ctas, ahead);
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  mok::sm90::launch_backward(arguments);
}

int64_t direction_words(int64_t rows, int64_t tokens, int64_t experts) {
  STD_TORCH_CHECK(rows > 0 && tokens > 0 && experts > 0,
                  "mok: direction_words needs rows, tokens and experts, got ",
                  rows,
                  ", ",
                  tokens,
                  ", ",
                  experts);
  return mok::direction_words(rows, tokens, experts);
}

mok::Role role_of(const std::string& name) {
  constexpr const char* kNames[] = {"product", "input_gradient", "up", "down_gradient", "gradient"};
  for (int i = 0; i < 5; ++i) {
    if (name == kNames[i]) return static_cast<mok::Role>(i);
  }
  STD_TORCH_CHECK(false,
                  "mok: role must be product, input_gradient, up, down_gradient or gradient, got ",
                  name);
}

// The table of encode_matrices, without its wait: the maps travel as kernel parameters.
Tensor stream_matrices(const std::vector<Tensor>& matrices, const std::string& role_name) {
  const mok::Role role = role_of(role_name);
  STD_TORCH_CHECK(!matrices.empty(), "mok: stream_matrices needs at least one matrix, got none");
  const Tensor& first = matrices[0];
  const ScalarType type = first.scalar_type();
  STD_TORCH_CHECK(
      type == ScalarType::BFloat16 || (type == ScalarType::Float && role == mok::Role::kGradient),
      "mok: matrices must be bfloat16, or float32 gradients, got ",
      name_of(type),
      " in role ",
      role_name,
      "; convert them");
  std::vector<mok::Matrix> list;
  std::vector<const Tensor*> all;
  for (const Tensor& matrix : matrices) {
    const bool flat = first.dim() == 2;
    check_tensor(
        matrix, "every matrix", type, {flat ? first.size(0) : -1, flat ? first.size(1) : -1}, 16);
    for (int axis = 0; axis < 2; ++axis) {
      STD_TORCH_CHECK(matrix.size(axis) > 0 && matrix.size(axis) % 64 == 0,
                      "mok: both extents of every matrix must be positive multiples of 64, got ",
                      shape_of(matrix),
                      "; use --moe-token-dispatcher-type alltoall");
    }
    list.push_back({.data = matrix.const_data_ptr(),
                    .rows = matrix.size(0),
                    .columns = matrix.size(1),
                    .fp32 = type == ScalarType::Float});
    all.push_back(&matrix);
  }
  check_device(first, "stream_matrices", all);
  const torch::stable::accelerator::DeviceGuard guard(first.get_device_index());
  const auto count = static_cast<int>(list.size());
  std::vector<uint8_t> records(static_cast<size_t>(count + 1) * mok::kTensorMapBytes);
  mok::sm90::encode_table(role, 0, list.data(), count, records.data());
  Tensor table =
      torch::stable::new_empty(first, {count + 1, mok::kTensorMapBytes}, ScalarType::Byte);
  mok::launch_write_table(records.data(), count + 1, table.mutable_data_ptr(), stream_of(first));
  return table;
}

// The first fault of the choices since the last call, into int32 [4] on the CPU: kind (0: none),
// expert, token, choice. Sees what the device has written so far, and does not wait for it.
void take_route_fault(const Tensor& into) {
  check_tensor(into, "into", ScalarType::Int, {4});
  STD_TORCH_CHECK(!into.is_cuda(), "mok: into must be on the CPU, got a CUDA tensor");
  auto* const words = into.mutable_data_ptr<int32_t>();
  words[0] = 0;
  mok::RouteFault* const record = mok::route_fault_record();
  mok::fault_record();  // both records exist before any launch, so that a captured one allocates
                        // nothing
  STD_TORCH_CHECK(record != nullptr,
                  "mok: the fault record needs pinned host memory, got none; ",
                  "raise the limit of locked memory (ulimit -l) or use --mok-backend reference");
  std::atomic_ref<int32_t> kind(record->kind);
  words[0] = kind.load(std::memory_order_acquire);
  if (words[0] == 0) return;
  words[1] = record->expert;
  words[2] = record->token;
  words[3] = record->choice;
  kind.store(0, std::memory_order_release);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(mok_megatron, m) {
  m.def(
      "route(Tensor expert, Tensor prob, Tensor(a!) counts, Tensor(b!) row_start, Tensor(c!) "
      "row_count, "
      "Tensor(d!) shared_start, Tensor(e!) shared_count, Tensor(f!) faulty, Tensor(g!) row, "
      "Tensor(h!) slot, "
      "Tensor(i!) row_prob) -> ()");
  m.def(
      "forward(Tensor x, Tensor[] routing, Tensor[] weights, Tensor(a!)[] into, Tensor(b!) words, "
      "int ctas=0, int ahead=0) -> ()");
  m.def(
      "backward(Tensor x, Tensor dy, Tensor[] routing, Tensor[] weights, Tensor[] gate_up, "
      "Tensor[] gradients, bool fp32, bool accumulate, Tensor(a!)[] into, Tensor(b!) words, "
      "int ctas=0, int ahead=0) -> ()");
  m.def("direction_words(int rows, int tokens, int experts) -> int");
  m.def("stream_matrices(Tensor[] matrices, str role) -> Tensor");
  m.def("take_route_fault(Tensor(a!) into) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(mok_megatron, CompositeExplicitAutograd, m) {
  m.impl("route", TORCH_BOX(&route));
  m.impl("forward", TORCH_BOX(&forward));
  m.impl("backward", TORCH_BOX(&backward));
  m.impl("direction_words", TORCH_BOX(&direction_words));
  m.impl("stream_matrices", TORCH_BOX(&stream_matrices));
  m.impl("take_route_fault", TORCH_BOX(&take_route_fault));
}
