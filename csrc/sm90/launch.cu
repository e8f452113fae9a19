// Tensor maps, the fault record, and what the host asks the device once.
#include <cstring>

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

CUtensorMap encode(const Matrix& x, int dimensions, const cuuint64_t* extents,
                   const cuuint64_t* strides, const cuuint32_t* box, CUtensorMapSwizzle swizzle) {
  static_assert(sizeof(CUtensorMap) == kTensorMapBytes);
  const cuuint32_t ones[3] = {1, 1, 1};
  CUtensorMap map;
  const CUresult status =
      encode_function()(&map,
                        x.fp32 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                        dimensions,
                        const_cast<void*>(x.data),
                        extents,
                        strides,
                        box,
                        ones,
                        CU_TENSOR_MAP_INTERLEAVE_NONE,
                        swizzle,
                        CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                        CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS) {
    throw std::runtime_error("mok: cuTensorMapEncodeTiled refused a " + std::to_string(x.rows) +
                             " x " + std::to_string(x.columns) + " matrix, CUresult " +
                             std::to_string(status));
  }
  return map;
}

}  // namespace

CUtensorMap encode_operand(const Matrix& x, OperandBox box) {
  const cuuint64_t extents[3] = {
      64, static_cast<cuuint64_t>(x.rows), static_cast<cuuint64_t>(x.columns / 64)};
  const cuuint64_t strides[2] = {static_cast<cuuint64_t>(x.columns) * 2, 128};
  const cuuint32_t shape[3] = {
      64, static_cast<cuuint32_t>(box.rows), static_cast<cuuint32_t>(box.blocks)};
  return encode(x, 3, extents, strides, shape, CU_TENSOR_MAP_SWIZZLE_128B);
}

CUtensorMap encode_boxes(const Matrix& x, int bytes) {
  const int size = x.fp32 ? 4 : 2;
  const cuuint64_t extents[2] = {static_cast<cuuint64_t>(x.columns),
                                 static_cast<cuuint64_t>(x.rows)};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(x.columns) * size};
  const cuuint32_t shape[2] = {static_cast<cuuint32_t>(bytes / size), kBoxRows};
  return encode(x,
                2,
                extents,
                strides,
                shape,
                bytes == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B);
}

CUtensorMap encode_gate_up(const Matrix& x, int bytes) {
  const auto columns = static_cast<cuuint64_t>(x.columns), width = columns / 2;
  const cuuint64_t extents[3] = {width, static_cast<cuuint64_t>(x.rows), 2},
                   strides[2] = {columns * 2, width * 2};
  const cuuint32_t shape[3] = {static_cast<cuuint32_t>(bytes / 2), kBoxRows, 2};
  return encode(x,
                3,
                extents,
                strides,
                shape,
                bytes == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B);
}

CUtensorMap encode_gradient(const Matrix& x) {
  const cuuint32_t size = x.fp32 ? 4 : 2, inner = 128 / size;
  const cuuint64_t extents[3] = {
      inner, static_cast<cuuint64_t>(x.rows), static_cast<cuuint64_t>(x.columns) / inner};
  const cuuint64_t strides[2] = {static_cast<cuuint64_t>(x.columns) * size, 128};
  const cuuint32_t shape[3] = {inner, kBoxRows, 64 / inner};
  return encode(x, 3, extents, strides, shape, CU_TENSOR_MAP_SWIZZLE_128B);
}

template <Role ROLE>
void encode_role(int tiling, const Matrix* matrices, int count, void* host_table) {
  with_tiling<ROLE>(tiling, [&](auto t) {
    constexpr OperandBox kBox = operand_box<ROLE, decltype(t)>();
    auto* const records = static_cast<uint8_t*>(host_table);
    for (int i = 0; i < count; ++i) {
      const CUtensorMap map = ROLE == Role::kGradient ? encode_gradient(matrices[i])
                                                      : encode_operand(matrices[i], kBox);
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
