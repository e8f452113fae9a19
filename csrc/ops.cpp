// The border to torch for the grouped products: schemas, checks, stream, launch. Torch headers
// (stable ABI) are in the border's files only: the *_ops.cpp, tensor_checks.h and call.h.
//
// Every op writes into tensors of the caller, reads the split of the rows on the device, and never
// waits for it. Checks run before the device is asked, so that a wrong call says what is wrong on
// any machine.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <string>
#include <vector>

#include "arguments.h"
#include "tensor_checks.h"

namespace {

using namespace mok::border;

// 16-byte aligned, as the copy engine needs.
void check_operand(const Tensor& t, const char* name, ScalarType type,
                   const std::vector<int64_t>& shape) {
  check_tensor(t, name, type, shape, 16);
}

void check_columns(const Tensor& t, const char* name) {
  STD_TORCH_CHECK(t.size(1) > 0 && t.size(1) % 64 == 0,
                  "mok: the columns of ",
                  name,
                  " must be a positive multiple of 64, got ",
                  t.size(1),
                  "; use --moe-token-dispatcher-type alltoall");
}

void check_rows(const Tensor& t, const char* name) {
  STD_TORCH_CHECK(
      t.size(0) <= INT32_MAX, "mok: ", name, " must have fewer than 2^31 rows, got ", t.size(0));
}

void check_same_device(const Tensor& t, const char* name, const Tensor& first) {
  STD_TORCH_CHECK(
      t.is_cuda() == first.is_cuda() && t.get_device_index() == first.get_device_index(),
      "mok: ",
      name,
      " must be on the device of the first argument, ",
      first.get_device_index(),
      ", got ",
      t.get_device_index());
}

int32_t check_table(const Tensor& table, const char* name) {
  check_operand(table, name, ScalarType::Byte, {-1, mok::kTensorMapBytes});
  STD_TORCH_CHECK(table.size(0) >= 2,
                  "mok: ",
                  name,
                  " must be a table from encode_matrices, got ",
                  table.size(0),
                  " records");
  return static_cast<int32_t>(table.size(0)) - 1;  // the last record says what the others are
}

mok::Rows rows_of(const Tensor& first, const Tensor& row_start, const Tensor& row_count,
                  int32_t experts) {
  check_rows(first, "the first argument");
  check_operand(row_start, "row_start", ScalarType::Int, {experts + 1});
  check_operand(row_count, "row_count", ScalarType::Int, {experts});
  return {.start = row_start.const_data_ptr<int32_t>(),
          .count = row_count.const_data_ptr<int32_t>(),
          .experts = experts,
          .capacity = static_cast<int32_t>(first.size(0))};
}

void check_cuda(const Tensor& first, const char* op) {
  STD_TORCH_CHECK(first.is_cuda(),
                  "mok: ",
                  op,
                  " needs CUDA tensors, got another device; use the reference backend");
  const int capability = mok::sm90::compute_capability(first.get_device_index());
  STD_TORCH_CHECK(capability == 90,
                  "mok: ",
                  op,
                  " needs compute capability 9.0, got ",
                  capability / 10,
                  ".",
                  capability % 10,
                  "; use the reference backend");
  check_fault();
}

mok::Launch launch_of(const Tensor& first, const Tensor& tickets, int64_t tiling, int64_t ctas) {
  check_operand(tickets, "tickets", ScalarType::Int, {2});
  check_same_device(tickets, "tickets", first);
  STD_TORCH_CHECK(ctas >= 0 && ctas <= 65535, "mok: ctas must be 0 (all SMs) to 65535, got ", ctas);
  STD_TORCH_CHECK(
      tiling >= 0, "mok: tiling must be 0 (the table's choice) or a class, got ", tiling);
  return {.tickets = reinterpret_cast<uint32_t*>(tickets.mutable_data_ptr()),
          .ctas = static_cast<int32_t>(ctas),
          .tiling = static_cast<int32_t>(tiling),
          .device = first.get_device_index(),
          .stream = nullptr};
}

mok::Role role_of(const std::string& name) {
  if (name == "product") return mok::Role::kProduct;
  if (name == "input_gradient") return mok::Role::kInputGradient;
  if (name == "up") return mok::Role::kUp;
  if (name == "down_gradient") return mok::Role::kDownGradient;
  STD_TORCH_CHECK(name == "gradient",
                  "mok: role must be product, input_gradient, up, down_gradient or gradient, got ",
                  name);
  return mok::Role::kGradient;
}

Tensor encode_matrices(const std::vector<Tensor>& matrices, const std::string& role_name,
                       int64_t tiling) {
  const mok::Role role = role_of(role_name);
  STD_TORCH_CHECK(!matrices.empty(), "mok: encode_matrices needs at least one matrix, got none");
  const Tensor& first = matrices[0];
  const ScalarType type = first.scalar_type();
  STD_TORCH_CHECK(
      type == ScalarType::BFloat16 || (type == ScalarType::Float && role == mok::Role::kGradient),
      "mok: matrices must be bfloat16, or float32 gradients, got ",
      name_of(type),
      " in role ",
      role_name);
  std::vector<mok::Matrix> list;
  for (const Tensor& matrix : matrices) {
    check_operand(matrix,
                  "every matrix",
                  type,
                  {first.dim() == 2 ? first.size(0) : -1, first.dim() == 2 ? first.size(1) : -1});
    check_columns(matrix, "every matrix");
    STD_TORCH_CHECK(matrix.size(0) > 0 && matrix.size(0) % 64 == 0,
                    "mok: the rows of every matrix must be a positive multiple of 64, got ",
                    matrix.size(0));
    check_same_device(matrix, "every matrix", first);
    list.push_back({.data = matrix.const_data_ptr(),
                    .rows = matrix.size(0),
                    .columns = matrix.size(1),
                    .fp32 = type == ScalarType::Float});
  }
  check_cuda(first, "encode_matrices");
  const auto count = static_cast<int64_t>(list.size());
  Tensor host = torch::stable::new_empty(first,
                                         {count + 1, mok::kTensorMapBytes},
                                         ScalarType::Byte,
                                         std::nullopt,
                                         torch::stable::Device(torch::headeronly::DeviceType::CPU));
  mok::sm90::encode_table(role,
                          static_cast<int>(tiling),
                          list.data(),
                          static_cast<int>(count),
                          host.mutable_data_ptr());
  Tensor table =
      torch::stable::new_empty(first, {count + 1, mok::kTensorMapBytes}, ScalarType::Byte);
  torch::stable::copy_(table, host);
  return table;
}

mok::ProductArguments product_arguments(const Tensor& a, const Tensor& weights,
                                        const Tensor& row_start, const Tensor& row_count,
                                        const Tensor& tickets, const Tensor& out, int64_t tiling,
                                        int64_t ctas, const char* op) {
  check_operand(a, "a", ScalarType::BFloat16, {-1, -1});
  check_columns(a, "a");
  check_operand(out, "out", ScalarType::BFloat16, {a.size(0), -1});
  check_columns(out, "out");
  const int32_t experts = check_table(weights, "weights");
  const mok::Rows rows = rows_of(a, row_start, row_count, experts);
  mok::Launch launch = launch_of(a, tickets, tiling, ctas);
  for (const Tensor* t : {&weights, &row_start, &row_count, &out})
    check_same_device(*t, "every argument", a);
  check_cuda(a, op);
  launch.stream = stream_of(a);
  return {.rows = rows,
          .launch = launch,
          .a = a.const_data_ptr(),
          .weights = weights.const_data_ptr(),
          .out = out.mutable_data_ptr(),
          .columns = static_cast<int32_t>(out.size(1)),
          .depth = static_cast<int32_t>(a.size(1))};
}

void grouped_product(const Tensor& a, const Tensor& weights, const Tensor& row_start,
                     const Tensor& row_count, const Tensor& tickets, const Tensor& out,
                     int64_t tiling, int64_t ctas) {
  const auto arguments = product_arguments(
      a, weights, row_start, row_count, tickets, out, tiling, ctas, "grouped_product");
  const torch::stable::accelerator::DeviceGuard guard(a.get_device_index());
  mok::sm90::launch_product(arguments);
}

void grouped_input_gradient(const Tensor& a, const Tensor& weights, const Tensor& row_start,
                            const Tensor& row_count, const Tensor& tickets, const Tensor& out,
                            int64_t tiling, int64_t ctas) {
  const auto arguments = product_arguments(
      a, weights, row_start, row_count, tickets, out, tiling, ctas, "grouped_input_gradient");
  const torch::stable::accelerator::DeviceGuard guard(a.get_device_index());
  mok::sm90::launch_input_gradient(arguments);
}

void grouped_up(const Tensor& x, const Tensor& weights, const Tensor& prob, const Tensor& row_start,
                const Tensor& row_count, const Tensor& tickets, const Tensor& gate_up,
                const Tensor& activation, int64_t tiling, int64_t ctas) {
  check_operand(x, "x", ScalarType::BFloat16, {-1, -1});
  check_columns(x, "x");
  check_operand(activation, "activation", ScalarType::BFloat16, {x.size(0), -1});
  check_columns(activation, "activation");
  check_operand(gate_up, "gate_up", ScalarType::BFloat16, {x.size(0), 2 * activation.size(1)});
  check_operand(prob, "prob", ScalarType::Float, {x.size(0)});
  const int32_t experts = check_table(weights, "weights");
  const mok::Rows rows = rows_of(x, row_start, row_count, experts);
  mok::Launch launch = launch_of(x, tickets, tiling, ctas);
  for (const Tensor* t : {&weights, &prob, &row_start, &row_count, &gate_up, &activation}) {
    check_same_device(*t, "every argument", x);
  }
  check_cuda(x, "grouped_up");
  launch.stream = stream_of(x);
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  mok::sm90::launch_up({.rows = rows,
                        .launch = launch,
                        .x = x.const_data_ptr(),
                        .weights = weights.const_data_ptr(),
                        .prob = prob.const_data_ptr<float>(),
                        .gate_up = gate_up.mutable_data_ptr(),
                        .activation = activation.mutable_data_ptr(),
                        .hidden = static_cast<int32_t>(x.size(1)),
                        .width = static_cast<int32_t>(activation.size(1))});
}

void grouped_down_gradient(const Tensor& dy, const Tensor& weights, const Tensor& prob,
                           const Tensor& gate_up, const Tensor& row_start, const Tensor& row_count,
                           const Tensor& tickets, const Tensor& d_gate_up, const Tensor& activation,
                           const Tensor& prob_parts, const Tensor& d_prob, int64_t tiling,
                           int64_t ctas) {
  check_operand(dy, "dy", ScalarType::BFloat16, {-1, -1});
  check_columns(dy, "dy");
  const int64_t capacity = dy.size(0);
  check_operand(activation, "activation", ScalarType::BFloat16, {capacity, -1});
  check_columns(activation, "activation");
  const int64_t width = activation.size(1);
  check_operand(gate_up, "gate_up", ScalarType::BFloat16, {capacity, 2 * width});
  check_operand(d_gate_up, "d_gate_up", ScalarType::BFloat16, {capacity, 2 * width});
  check_operand(prob, "prob", ScalarType::Float, {capacity});
  check_operand(prob_parts, "prob_parts", ScalarType::Float, {capacity, width / mok::kPartColumns});
  check_operand(d_prob, "d_prob", ScalarType::Float, {capacity});
  const int32_t experts = check_table(weights, "weights");
  const mok::Rows rows = rows_of(dy, row_start, row_count, experts);
  mok::Launch launch = launch_of(dy, tickets, tiling, ctas);
  for (const Tensor* t : {&weights,
                          &prob,
                          &gate_up,
                          &row_start,
                          &row_count,
                          &d_gate_up,
                          &activation,
                          &prob_parts,
                          &d_prob}) {
    check_same_device(*t, "every argument", dy);
  }
  check_cuda(dy, "grouped_down_gradient");
  launch.stream = stream_of(dy);
  const torch::stable::accelerator::DeviceGuard guard(dy.get_device_index());
  mok::sm90::launch_down_gradient({.rows = rows,
                                   .launch = launch,
                                   .dy = dy.const_data_ptr(),
                                   .weights = weights.const_data_ptr(),
                                   .prob = prob.const_data_ptr<float>(),
                                   .gate_up = gate_up.const_data_ptr(),
                                   .d_gate_up = d_gate_up.mutable_data_ptr(),
                                   .activation = activation.mutable_data_ptr(),
                                   .prob_parts = prob_parts.mutable_data_ptr<float>(),
                                   .d_prob = d_prob.mutable_data_ptr<float>(),
                                   .hidden = static_cast<int32_t>(dy.size(1)),
                                   .width = static_cast<int32_t>(width)});
}

void grouped_weight_gradient(const Tensor& a, const Tensor& b, const Tensor& table,
                             const std::vector<Tensor>& gradients, const Tensor& row_start,
                             const Tensor& row_count, const Tensor& tickets, bool accumulate,
                             int64_t tiling, int64_t ctas) {
  check_operand(a, "a", ScalarType::BFloat16, {-1, -1});
  check_columns(a, "a");
  check_operand(b, "b", ScalarType::BFloat16, {a.size(0), -1});
  check_columns(b, "b");
  const int32_t experts = check_table(table, "table");
  STD_TORCH_CHECK(gradients.size() == static_cast<size_t>(experts) && experts > 0,
                  "mok: gradients must be one tensor for each of the table's ",
                  experts,
                  " experts, got ",
                  gradients.size());
  const ScalarType type = gradients[0].scalar_type();
  STD_TORCH_CHECK(type == ScalarType::BFloat16 || type == ScalarType::Float,
                  "mok: gradients must be bfloat16 or float32, got ",
                  name_of(type));
  for (const Tensor& gradient : gradients) {
    check_operand(gradient, "every gradient", type, {a.size(1), b.size(1)});
    check_same_device(gradient, "every gradient", a);
  }
  const mok::Rows rows = rows_of(a, row_start, row_count, experts);
  mok::Launch launch = launch_of(a, tickets, tiling, ctas);
  for (const Tensor* t : {&b, &table, &row_start, &row_count})
    check_same_device(*t, "every argument", a);
  check_cuda(a, "grouped_weight_gradient");
  launch.stream = stream_of(a);
  const torch::stable::accelerator::DeviceGuard guard(a.get_device_index());
  mok::sm90::launch_weight_gradient(
      {.rows = rows,
       .launch = launch,
       .a = a.const_data_ptr(),
       .b = b.const_data_ptr(),
       .gradients = table.const_data_ptr(),
       .m = static_cast<int32_t>(a.size(1)),
       .n = static_cast<int32_t>(b.size(1)),
       .type = type == ScalarType::Float ? mok::Gradient::kFp32 : mok::Gradient::kBf16,
       .accumulate = accumulate});
}

}  // namespace

STABLE_TORCH_LIBRARY(mok_megatron, m) {
  m.def("encode_matrices(Tensor[] matrices, str role, int tiling=0) -> Tensor");
  m.def(
      "grouped_product(Tensor a, Tensor weights, Tensor row_start, Tensor row_count, Tensor(a!) "
      "tickets, "
      "Tensor(b!) out, int tiling=0, int ctas=0) -> ()");
  m.def(
      "grouped_input_gradient(Tensor a, Tensor weights, Tensor row_start, Tensor row_count, "
      "Tensor(a!) tickets, "
      "Tensor(b!) out, int tiling=0, int ctas=0) -> ()");
  m.def(
      "grouped_up(Tensor x, Tensor weights, Tensor prob, Tensor row_start, Tensor row_count, "
      "Tensor(a!) tickets, Tensor(b!) gate_up, Tensor(c!) activation, int tiling=0, int ctas=0) -> "
      "()");
  m.def(
      "grouped_down_gradient(Tensor dy, Tensor weights, Tensor prob, Tensor gate_up, Tensor "
      "row_start, "
      "Tensor row_count, Tensor(a!) tickets, Tensor(b!) d_gate_up, Tensor(c!) activation, "
      "Tensor(d!) prob_parts, Tensor(e!) d_prob, int tiling=0, int ctas=0) -> ()");
  m.def(
      "grouped_weight_gradient(Tensor a, Tensor b, Tensor table, Tensor(b!)[] gradients, Tensor "
      "row_start, "
      "Tensor row_count, Tensor(a!) tickets, bool accumulate, int tiling=0, int ctas=0) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(mok_megatron, CompositeExplicitAutograd, m) {
  m.impl("encode_matrices", TORCH_BOX(&encode_matrices));
  m.impl("grouped_product", TORCH_BOX(&grouped_product));
  m.impl("grouped_input_gradient", TORCH_BOX(&grouped_input_gradient));
  m.impl("grouped_up", TORCH_BOX(&grouped_up));
  m.impl("grouped_down_gradient", TORCH_BOX(&grouped_down_gradient));
  m.impl("grouped_weight_gradient", TORCH_BOX(&grouped_weight_gradient));
}
