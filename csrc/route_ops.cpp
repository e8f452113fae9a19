// The border to torch of the phases around the products: route, dispatch, combine, and tables of
// tensor maps.
//
// ops.cpp is the same border for the products. There are two files because there are two stages,
// each with its own arguments and rules, and one file for both would be too long to read; no third
// file has torch headers.
//
// Every op writes into tensors of the caller and never waits for the device. Checks run before the
// device is asked.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <atomic>
#include <optional>
#include <string>
#include <vector>

#include "arguments.h"
#include "check.h"
#include "layer_arguments.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

const char* name_of(ScalarType type) {
  switch (type) {
    case ScalarType::BFloat16:
      return "bfloat16";
    case ScalarType::Float:
      return "float32";
    case ScalarType::Int:
      return "int32";
    default:
      return "another dtype";
  }
}

std::string shape_of(const std::vector<int64_t>& extents) {
  std::string text = "[";
  for (size_t i = 0; i < extents.size(); ++i) {
    text += (i ? ", " : "") + (extents[i] < 0 ? std::string("any") : std::to_string(extents[i]));
  }
  return text + "]";
}

std::string shape_of(const Tensor& t) {
  std::vector<int64_t> extents;
  for (int64_t i = 0; i < t.dim(); ++i) extents.push_back(t.size(i));
  return shape_of(extents);
}

// A contiguous tensor of that dtype and shape, -1 taking any extent, at a multiple of `alignment`
// bytes.
void check_tensor(const Tensor& t, const char* name, ScalarType type,
                  const std::vector<int64_t>& shape, uintptr_t alignment = 4) {
  STD_TORCH_CHECK(t.scalar_type() == type,
                  "mok: ",
                  name,
                  " must be ",
                  name_of(type),
                  ", got ",
                  name_of(t.scalar_type()),
                  "; convert it");
  bool fits = t.dim() == static_cast<int64_t>(shape.size());
  for (size_t i = 0; fits && i < shape.size(); ++i) {
    fits = shape[i] < 0 || t.size(static_cast<int64_t>(i)) == shape[i];
  }
  STD_TORCH_CHECK(fits, "mok: ", name, " must have shape ", shape_of(shape), ", got ", shape_of(t));
  STD_TORCH_CHECK(t.is_contiguous(),
                  "mok: ",
                  name,
                  " must be contiguous, got shape ",
                  shape_of(t),
                  " with other strides; call contiguous()");
  const auto address = reinterpret_cast<uintptr_t>(t.const_data_ptr());
  STD_TORCH_CHECK(address % alignment == 0,
                  "mok: ",
                  name,
                  " must start at a multiple of ",
                  alignment,
                  " bytes, got address ",
                  address,
                  "; do not slice inside a row");
}

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

void* stream_of(const Tensor& first) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(first.get_device_index(), &stream));
  return stream;
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

void dispatch(const std::vector<Tensor>& tokens, const Tensor& row,
              const std::vector<Tensor>& rows) {
  check_slots(row, "row");
  STD_TORCH_CHECK((tokens.size() == 1 || tokens.size() == 2) && tokens.size() == rows.size(),
                  "mok: dispatch takes one or two tensors and as many places, got ",
                  tokens.size(),
                  " and ",
                  rows.size());
  check_tensor(tokens[0], "tokens", ScalarType::BFloat16, {row.size(0), -1}, 16);
  const int64_t hidden = tokens[0].size(1);
  check_hidden(hidden);
  check_tensor(rows[0], "rows", ScalarType::BFloat16, {-1, hidden}, 16);
  mok::DispatchArguments arguments{.sources = static_cast<int32_t>(tokens.size()),
                                   .row_TK = row.const_data_ptr<int32_t>(),
                                   .token_count = static_cast<int32_t>(row.size(0)),
                                   .choices = static_cast<int32_t>(row.size(1)),
                                   .hidden = static_cast<int32_t>(hidden)};
  for (size_t i = 0; i < tokens.size(); ++i) {
    check_tensor(tokens[i], "tokens", ScalarType::BFloat16, {row.size(0), hidden}, 16);
    check_tensor(rows[i], "rows", ScalarType::BFloat16, {rows[0].size(0), hidden}, 16);
    arguments.tokens[i] = tokens[i].const_data_ptr();
    arguments.rows[i] = rows[i].mutable_data_ptr();
  }
  check_device(row, "dispatch", {&tokens.front(), &tokens.back(), &rows.front(), &rows.back()});
  const torch::stable::accelerator::DeviceGuard guard(row.get_device_index());
  arguments.stream = stream_of(row);
  mok::launch_dispatch(arguments);
}

void combine(const Tensor& rows, const std::optional<Tensor>& shared, const Tensor& row,
             const Tensor& faulty, const std::optional<Tensor>& row_d_prob, const Tensor& out,
             const std::optional<Tensor>& d_prob) {
  check_slots(row, "row");
  check_tensor(rows, "rows", ScalarType::BFloat16, {-1, -1}, 16);
  const int64_t hidden = rows.size(1);
  check_hidden(hidden);
  check_tensor(out, "out", ScalarType::BFloat16, {row.size(0), hidden}, 16);
  check_tensor(faulty, "faulty", ScalarType::Int, {1});
  std::vector<const Tensor*> all{&rows, &faulty, &out};
  if (shared) {
    check_tensor(*shared, "shared", ScalarType::BFloat16, {-1, hidden}, 16);
    STD_TORCH_CHECK(shared->size(0) >= row.size(0),
                    "mok: shared must have a row for each of ",
                    row.size(0),
                    " tokens, got ",
                    shared->size(0));
    all.push_back(&*shared);
  }
  STD_TORCH_CHECK(row_d_prob.has_value() == d_prob.has_value(),
                  "mok: combine needs both gradients of the probabilities or none, got one");
  if (d_prob) {
    check_tensor(*row_d_prob, "row_d_prob", ScalarType::Float, {rows.size(0)});
    check_tensor(*d_prob, "d_prob", ScalarType::Float, {row.size(0), row.size(1)});
    all.push_back(&*row_d_prob);
    all.push_back(&*d_prob);
  }
  check_device(row, "combine", all);
  const torch::stable::accelerator::DeviceGuard guard(row.get_device_index());
  mok::launch_combine({.rows = rows.const_data_ptr(),
                       .shared = shared ? shared->const_data_ptr() : nullptr,
                       .d_prob_R = d_prob ? row_d_prob->const_data_ptr<float>() : nullptr,
                       .row_TK = row.const_data_ptr<int32_t>(),
                       .faulty = faulty.const_data_ptr<int32_t>(),
                       .out = out.mutable_data_ptr(),
                       .d_prob_TK = d_prob ? d_prob->mutable_data_ptr<float>() : nullptr,
                       .tokens = static_cast<int32_t>(row.size(0)),
                       .choices = static_cast<int32_t>(row.size(1)),
                       .hidden = static_cast<int32_t>(hidden),
                       .stream = stream_of(row)});
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
  m.def("dispatch(Tensor[] tokens, Tensor row, Tensor(a!)[] rows) -> ()");
  m.def(
      "combine(Tensor rows, Tensor? shared, Tensor row, Tensor faulty, Tensor? row_d_prob, "
      "Tensor(a!) out, "
      "Tensor(b!)? d_prob) -> ()");
  m.def("stream_matrices(Tensor[] matrices, str role) -> Tensor");
  m.def("take_route_fault(Tensor(a!) into) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(mok_megatron, CompositeExplicitAutograd, m) {
  m.impl("route", TORCH_BOX(&route));
  m.impl("dispatch", TORCH_BOX(&dispatch));
  m.impl("combine", TORCH_BOX(&combine));
  m.impl("stream_matrices", TORCH_BOX(&stream_matrices));
  m.impl("take_route_fault", TORCH_BOX(&take_route_fault));
}
