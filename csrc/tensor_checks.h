// What the files of the border to torch, *ops.cpp, ask of every tensor. An error says rule, value
// and remedy.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>
#include <torch/headeronly/util/HeaderOnlyArrayRef.h>

#include <cstdint>
#include <string>
#include <vector>

#include "check.h"

namespace mok::border {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Extents = torch::headeronly::IntHeaderOnlyArrayRef;

inline const char* name_of(ScalarType type) {
  switch (type) {
    case ScalarType::BFloat16:
      return "bfloat16";
    case ScalarType::Half:
      return "float16";
    case ScalarType::Float:
      return "float32";
    case ScalarType::Int:
      return "int32";
    case ScalarType::Long:
      return "int64";
    case ScalarType::Byte:
      return "uint8";
    case ScalarType::Bool:
      return "bool";
    case ScalarType::Double:
      return "float64";
    default:
      return "another dtype";
  }
}

inline std::string shape_of(Extents extents) {
  std::string text = "[";
  for (size_t i = 0; i < extents.size(); ++i) {
    text += (i ? ", " : "") + (extents[i] < 0 ? std::string("any") : std::to_string(extents[i]));
  }
  return text + "]";
}

inline std::string shape_of(const Tensor& t) { return shape_of(t.sizes()); }

// A contiguous tensor of that dtype and shape, -1 taking any extent, at a multiple of `alignment`
// bytes.
inline void check_tensor(const Tensor& t, const char* name, ScalarType type, Extents shape,
                         uintptr_t alignment = 4) {
  STD_TORCH_CHECK(t.scalar_type() == type,
                  "mok: ",
                  name,
                  " must be ",
                  name_of(type),
                  ", got ",
                  name_of(t.scalar_type()),
                  "; convert it");
  const Extents extents = t.sizes();
  bool fits = extents.size() == shape.size();
  for (size_t i = 0; fits && i < shape.size(); ++i) fits = shape[i] < 0 || extents[i] == shape[i];
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

inline void check_device(const Tensor& first, const char* op,
                         const std::vector<const Tensor*>& others) {
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

inline int32_t code_of(ScalarType type) {
  switch (type) {
    case ScalarType::BFloat16:
      return aoti_torch_dtype_bfloat16();
    case ScalarType::Float:
      return aoti_torch_dtype_float32();
    case ScalarType::Double:
      return aoti_torch_dtype_float64();
    case ScalarType::Int:
      return aoti_torch_dtype_int32();
    default:
      return aoti_torch_dtype_uint8();
  }
}

// Uninitialised and contiguous, of one or two extents, on the device of `like`. Not through the
// dispatcher by name, which costs more than all else that an op does on the host; and torch does
// not say why there is none.
inline Tensor new_tensor(const Tensor& like, Extents extents, ScalarType type) {
  const auto dimensions = static_cast<int64_t>(extents.size());
  const int64_t strides[2] = {dimensions == 2 ? extents[1] : 1, 1};
  AtenTensorHandle handle = nullptr;
  if (aoti_torch_empty_strided(
          dimensions,
          extents.data(),
          strides,
          code_of(type),
          like.is_cuda() ? aoti_torch_device_type_cuda() : aoti_torch_device_type_cpu(),
          like.get_device_index(),
          &handle) == AOTI_TORCH_SUCCESS) {
    return Tensor(handle);
  }
  int64_t bytes = type == ScalarType::Byte       ? 1
                  : type == ScalarType::BFloat16 ? 2
                  : type == ScalarType::Double   ? 8
                                                 : 4;
  for (int64_t i = 0; i < dimensions; ++i) bytes *= extents[i];
  STD_TORCH_CHECK(false,
                  "mok: a call's buffers must fit in memory, got no room for ",
                  bytes,
                  " bytes; lower --micro-batch-size");
}

inline void check_fault() {
  const mok::Fault* fault = mok::fault_record();
  if (fault == nullptr || fault->tag == 0) return;
  std::string what = mok::describe(static_cast<mok::Tag>(fault->tag));
  if (static_cast<mok::Tag>(fault->tag) == mok::Tag::kAborted) {
    const auto abort = mok::Abort::of(fault->value);
    what += ": expert parallel rank " + std::to_string(abort.rank) + ", where " +
            mok::describe(abort.tag) + ", thread " + std::to_string(abort.thread);
  }
  STD_TORCH_CHECK(false,
                  "mok: an earlier launch failed: ",
                  what,
                  " (CTA ",
                  fault->cta,
                  ", thread ",
                  fault->thread,
                  ", saw ",
                  fault->value,
                  ", for ",
                  fault->expected,
                  "); this process cannot go on");
}

inline void* stream_of(const Tensor& first) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(first.get_device_index(), &stream));
  return stream;
}

}  // namespace mok::border
