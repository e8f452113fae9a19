// Tensor maps, the fault record, and what the host asks the device once.
#include <cstring>
#include <type_traits>
#include <vector>

#include "launch.cuh"

namespace mok {

Fault* fault_record() {
  static Fault* const record = [] {
    void* memory = nullptr;
    if (cudaHostAlloc(&memory, sizeof(Fault), cudaHostAllocMapped | cudaHostAllocPortable) !=
        cudaSuccess) {
      return static_cast<Fault*>(nullptr);
    }
    std::memset(memory, 0, sizeof(Fault));
    return static_cast<Fault*>(memory);
  }();
  return record;
}

namespace sm90 {
namespace {

using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                            const cuuint64_t*, const cuuint32_t*, const cuuint32_t*,
                            CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion,
                            CUtensorMapFloatOOBfill);

Encode encode_function() {  // through the entry point, so that nothing links libcuda
  static const Encode function = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result;
    check(cudaGetDriverEntryPointByVersion(
              "cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result),
          "cudaGetDriverEntryPointByVersion(cuTensorMapEncodeTiled)");
    if (found == nullptr) throw std::runtime_error("mok: the driver has no cuTensorMapEncodeTiled");
    return reinterpret_cast<Encode>(found);
  }();
  return function;
}

// All that a tensor map is made of.
struct Form {
  uintptr_t data;
  cuuint64_t extents[3], strides[2];
  cuuint32_t box[3];
  int32_t dimensions;
  CUtensorMapDataType type;
  CUtensorMapSwizzle swizzle;
};
static_assert(std::has_unique_object_representations_v<Form>, "compared and hashed by its bytes");

Form form(const Matrix& x) {
  Form f{};
  f.data = reinterpret_cast<uintptr_t>(x.data);
  f.type = x.fp32 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  return f;
}

CUtensorMap encode(const Form& f) {
  static_assert(sizeof(CUtensorMap) == kTensorMapBytes);
  const cuuint32_t ones[3] = {1, 1, 1};
  CUtensorMap map;
  const CUresult status = encode_function()(&map,
                                            f.type,
                                            f.dimensions,
                                            reinterpret_cast<void*>(f.data),
                                            f.extents,
                                            f.strides,
                                            f.box,
                                            ones,
                                            CU_TENSOR_MAP_INTERLEAVE_NONE,
                                            f.swizzle,
                                            CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                                            CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS) {
    throw std::runtime_error("mok: cuTensorMapEncodeTiled refused " + std::to_string(f.dimensions) +
                             " dimensions, the first two " + std::to_string(f.extents[0]) + " x " +
                             std::to_string(f.extents[1]) + ", CUresult " + std::to_string(status));
  }
  return map;
}

// A map is a function of its form alone, and torch's allocator hands a call the addresses that the
// calls before had: those are looked up here, in one probe, in less time than the driver takes.
CUtensorMap known(const Form& f) {
  struct Entry {
    Form form;
    CUtensorMap map;
  };
  constexpr int kBits = 10;
  static thread_local std::vector<Entry> entries(size_t{1} << kBits);  // no form is all zeros
  uint64_t words[sizeof(Form) / 8], hash = 0;
  static_assert(sizeof(words) == sizeof(Form));
  std::memcpy(words, &f, sizeof(f));
  for (const uint64_t word : words) hash = ((hash >> 29 ^ hash) + word) * 0x9e3779b97f4a7c15;
  Entry& entry = entries[hash >> (64 - kBits)];
  if (std::memcmp(&entry.form, &f, sizeof(f)) != 0) {
    entry.map = encode(f);
    entry.form = f;
  }
  return entry.map;
}

Form operand_form(const Matrix& x, OperandBox box) {
  Form f = form(x);
  f.dimensions = 3;
  f.extents[0] = 64;
  f.extents[1] = static_cast<cuuint64_t>(x.rows);
  f.extents[2] = static_cast<cuuint64_t>(x.columns / 64);
  f.strides[0] = static_cast<cuuint64_t>(x.columns) * 2;
  f.strides[1] = 128;
  f.box[0] = 64;
  f.box[1] = static_cast<cuuint32_t>(box.rows);
  f.box[2] = static_cast<cuuint32_t>(box.blocks);
  f.swizzle = CU_TENSOR_MAP_SWIZZLE_128B;
  return f;
}

// A gradient as {128 bytes, rows, blocks of 128 bytes}: one transfer moves 64 columns.
Form gradient_form(const Matrix& x) {
  const cuuint32_t size = x.fp32 ? 4 : 2, inner = 128 / size;
  Form f = form(x);
  f.dimensions = 3;
  f.extents[0] = inner;
  f.extents[1] = static_cast<cuuint64_t>(x.rows);
  f.extents[2] = static_cast<cuuint64_t>(x.columns) / inner;
  f.strides[0] = static_cast<cuuint64_t>(x.columns) * size;
  f.strides[1] = 128;
  f.box[0] = inner;
  f.box[1] = kBoxRows;
  f.box[2] = 64 / inner;
  f.swizzle = CU_TENSOR_MAP_SWIZZLE_128B;
  return f;
}

CUtensorMapSwizzle swizzle_of(int bytes) {
  return bytes == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B;
}

}  // namespace

CUtensorMap encode_operand(const Matrix& x, OperandBox box) { return known(operand_form(x, box)); }

CUtensorMap encode_boxes(const Matrix& x, int bytes) {
  const int size = x.fp32 ? 4 : 2;
  Form f = form(x);
  f.dimensions = 2;
  f.extents[0] = static_cast<cuuint64_t>(x.columns);
  f.extents[1] = static_cast<cuuint64_t>(x.rows);
  f.strides[0] = static_cast<cuuint64_t>(x.columns) * size;
  f.box[0] = static_cast<cuuint32_t>(bytes / size);
  f.box[1] = kBoxRows;
  f.swizzle = swizzle_of(bytes);
  return known(f);
}

CUtensorMap encode_gate_up(const Matrix& x, int bytes) {
  const auto columns = static_cast<cuuint64_t>(x.columns), width = columns / 2;
  Form f = form(x);
  f.dimensions = 3;
  f.extents[0] = width;
  f.extents[1] = static_cast<cuuint64_t>(x.rows);
  f.extents[2] = 2;
  f.strides[0] = columns * 2;
  f.strides[1] = width * 2;
  f.box[0] = static_cast<cuuint32_t>(bytes / 2);
  f.box[1] = kBoxRows;
  f.box[2] = 2;
  f.swizzle = swizzle_of(bytes);
  return known(f);
}

template <Role ROLE>
void encode_role(int tiling, const Matrix* matrices, int count, void* host_table) {
  with_tiling<ROLE>(tiling, [&](auto t) {
    constexpr OperandBox kBox = operand_box<ROLE, decltype(t)>();
    auto* const records = static_cast<uint8_t*>(host_table);
    for (int i = 0; i < count; ++i) {
      const Form form =
          ROLE == Role::kGradient ? gradient_form(matrices[i]) : operand_form(matrices[i], kBox);
      const CUtensorMap map = encode(form);  // a table is made once: it would only push others out
      std::memcpy(records + i * kTensorMapBytes, &map, kTensorMapBytes);
    }
    const TableHeader header = table_header(matrices[0], kBox);
    std::memset(records + count * kTensorMapBytes, 0, kTensorMapBytes);
    std::memcpy(records + count * kTensorMapBytes, &header, sizeof(header));
  });
}

void encode_table(Role role, int tiling, const Matrix* matrices, int count, void* host_table) {
  switch (role) {
    case Role::kProduct:
      return encode_role<Role::kProduct>(tiling, matrices, count, host_table);
    case Role::kInputGradient:
      return encode_role<Role::kInputGradient>(tiling, matrices, count, host_table);
    case Role::kUp:
      return encode_role<Role::kUp>(tiling, matrices, count, host_table);
    case Role::kDownGradient:
      return encode_role<Role::kDownGradient>(tiling, matrices, count, host_table);
    case Role::kGradient:
      return encode_role<Role::kGradient>(tiling, matrices, count, host_table);
  }
}

int compute_capability(int device) {
  int major = 0, minor = 0;
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device),
        "cudaDeviceGetAttribute");
  check(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device),
        "cudaDeviceGetAttribute");
  return 10 * major + minor;
}

int sm_count(int device) {
  static int counts[64] = {};
  if (device < 0 || device >= 64)
    throw std::runtime_error("mok: device index " + std::to_string(device));
  if (counts[device] == 0) {
    check(cudaDeviceGetAttribute(&counts[device], cudaDevAttrMultiProcessorCount, device),
          "cudaDeviceGetAttribute");
  }
  return counts[device];
}

}  // namespace sm90
}  // namespace mok
