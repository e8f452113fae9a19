// The border to torch of lists of matrices: their tables of tensor maps, and the watch over those
// that a layer sees in every call.
//
// A model has hundreds of weights, and passing them through the dispatcher, or looking at each in
// Python, costs more than the launches. A watch holds them, and one op says whether all are still
// what they were.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>

#include <exception>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "arguments.h"
#include "layer_arguments.h"
#include "tensor_checks.h"

namespace {

using namespace mok::border;

// Lists of matrices that the caller expects to see again, and what they were when it checked them.
// They are held: an address cannot pass to another tensor meanwhile.
struct Watched {
  Tensor matrix;
  const void* data;
  int64_t rows, columns;
  int32_t type;  // torch's code

  static Watched of(const Tensor& t) {
    const bool flat = t.dim() == 2 && t.is_contiguous();
    int32_t type = -1;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(t.get(), &type));
    return {t, t.const_data_ptr(), flat ? t.size(0) : -1, flat ? t.size(1) : -1, type};
  }
  // The address says the device. Few calls, past torch's class: a model has hundreds of these.
  bool holds() const {
    const AtenTensorHandle t = matrix.get();
    const void* address = nullptr;
    int64_t dimensions = 0, *extents = nullptr, *strides = nullptr;
    int32_t code = 0;
    return torch_get_const_data_ptr(t, &address) == AOTI_TORCH_SUCCESS && address == data &&
           aoti_torch_get_dim(t, &dimensions) == AOTI_TORCH_SUCCESS && dimensions == 2 &&
           aoti_torch_get_sizes(t, &extents) == AOTI_TORCH_SUCCESS && extents[0] == rows &&
           extents[1] == columns && aoti_torch_get_strides(t, &strides) == AOTI_TORCH_SUCCESS &&
           strides[0] == columns && strides[1] == 1 &&
           aoti_torch_get_dtype(t, &code) == AOTI_TORCH_SUCCESS && code == type;
  }
};

std::mutex watch_mutex;
auto& watches = *new std::unordered_map<int64_t, std::vector<Watched>>;  // outlives CUDA's exit

// A number for `holds` and `unwatch`.
int64_t watch(const std::vector<Tensor>& matrices) {
  static int64_t next = 0;
  std::vector<Watched> list;
  for (const Tensor& matrix : matrices) list.push_back(Watched::of(matrix));
  const std::lock_guard lock(watch_mutex);
  watches.emplace(++next, std::move(list));
  return next;
}

// Whether all of them still have the address, form and dtype that they had; false of no watch.
bool holds(int64_t watch) {
  const std::lock_guard lock(watch_mutex);
  const auto found = watches.find(watch);
  if (found == watches.end()) return false;
  for (const Watched& each : found->second) {
    if (!each.holds()) return false;
  }
  return true;
}

void unwatch(int64_t watch) {
  std::vector<Watched> dropped;  // freed without the lock
  const std::lock_guard lock(watch_mutex);
  if (const auto found = watches.find(watch); found != watches.end()) {
    dropped.swap(found->second);
    watches.erase(found);
  }
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

// Writes the table of encode_matrices, without its wait: the maps travel as kernel parameters.
void stream_matrices(const std::vector<Tensor>& matrices, const std::string& role_name,
                     const Tensor& table) {
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
  const auto count = static_cast<int>(list.size());
  check_tensor(table, "table", ScalarType::Byte, {count + 1, mok::kTensorMapBytes}, 128);
  all.push_back(&table);
  check_device(first, "stream_matrices", all);
  const torch::stable::accelerator::DeviceGuard guard(first.get_device_index());
  std::vector<uint8_t> records(static_cast<size_t>(count + 1) * mok::kTensorMapBytes);
  mok::sm90::encode_table(role, 0, list.data(), count, records.data());
  mok::launch_write_table(records.data(), count + 1, table.mutable_data_ptr(), stream_of(first));
}

}  // namespace

// `holds` past the dispatcher, which takes as long as the look at sixty matrices; it is asked
// three times in a forward and a backward.
extern "C" int32_t mok_holds(int64_t watch) {
  try {
    return holds(watch);
  } catch (const std::exception&) {  // a tensor that has no address
    return 0;
  }
}

STABLE_TORCH_LIBRARY_FRAGMENT(mok_megatron, m) {
  m.def("watch(Tensor[] matrices) -> int");
  m.def("unwatch(int watch) -> ()");
  m.def("stream_matrices(Tensor[] matrices, str role, Tensor(a!) table) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(mok_megatron, CompositeExplicitAutograd, m) {
  m.impl("watch", TORCH_BOX(&watch));
  m.impl("unwatch", TORCH_BOX(&unwatch));
  m.impl("stream_matrices", TORCH_BOX(&stream_matrices));
}
