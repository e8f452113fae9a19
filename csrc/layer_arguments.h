// What crosses the border between layer_ops.cpp and the kernels around the products: plain data, no
// torch, no CUDA.
//
// Letters: T tokens, K choices a token, E experts, R rows, H hidden, C chunks of slots. A slot is t
// · K + k. Pointers are device pointers unless a comment says otherwise.
#pragma once

#include <cstdint>

namespace mok {

constexpr int kMaxExperts = 2048;  // a warp counts them in 8 KiB of shared memory
constexpr int kMaxChoices = 64;    // route compares each with those before it
constexpr int kChunk = 256;        // slots that one warp counts and places

// What the device found wrong with the choices. Lives in pinned host memory; `kind` is written
// last, and only while it is 0, so that who sees it sees the rest, and the first fault stays until
// the host has taken it.
enum class RouteFaultKind : int32_t { kNone, kIdOutOfRange, kDuplicate, kNotFinite };
struct RouteFault {
  int32_t kind;
  int32_t expert;
  int32_t token;
  int32_t choice;
  int32_t experts;  // E and K of the call
  int32_t choices;
  float prob;
  int32_t rank_tokens;  // of several ranks: token counts rank · rank_tokens + its token
};

RouteFault* route_fault_record();  // process-wide; null when pinned memory is refused

// How many rows a call must move and combine, as route places them, for device/census.cuh. Sums of
// slots are of slot + 1, modulo 2^32.
struct Census {
  uint32_t sent;            // slots of this rank that have a row
  uint32_t sent_slots;      // their sum, numbered on this rank
  uint32_t received_slots;  // the sum of the slots that have their row on this rank
  uint32_t kept;            // slots of which both holds
};

struct RouteArguments {
  const int32_t* expert_TK;  // -1: empty slot
  const float* prob_TK;
  int32_t tokens;
  int32_t choices;
  int32_t experts;
  int32_t chunks;
  int32_t* counts;  // [C + 1, E + 1]; the last column counts slots that broke a rule, the last row
                    // is the sum
  int32_t* row_start;     // [E + 1], multiples of 128
  int32_t* row_count;     // [E]
  int32_t* shared_start;  // [2]: 0, T rounded up to 128
  int32_t* shared_count;  // [1]: T
  int32_t* faulty;        // [1]: slots that broke a rule; none of them has a row
  int32_t* row_TK;        // -1: no row
  int32_t* slot_R;        // -1 in padding; nothing past the last start
  float* prob_R;          // 0 in padding
  Census* census;         // [1]
  RouteFault* fault;      // host memory
  void* stream;
  int32_t rank_tokens = 0;  // of several ranks: Tmax; tokens are P of them
};

// Of dense probabilities.
enum class Dense : int32_t { kBf16, kFp32, kFp64 };

struct ChoiceArguments {
  const void* dense_TE;  // probabilities
  const bool* map_TE;    // what is chosen
  int64_t tokens;
  int32_t choices;
  int32_t experts;
  Dense type;
  int32_t* expert_TK;
  float* prob_TK;
  void* stream;
};

struct SpreadArguments {
  const float* d_prob_TK;
  const int32_t* expert_TK;  // of choices
  int64_t tokens;
  int32_t choices;
  int32_t experts;
  Dense type;
  void* d_dense_TE;
  void* stream;
};

// out[t] = bf16(sum over k in slot order of rows[row_TK[t, k]], then shared[t]).
struct CombineArguments {
  const void* rows;    // bf16 [R, H]
  const void* shared;  // bf16 [at least T, H], or null
  const int32_t* row_TK;
  const int32_t* faulty;
  void* out;         // bf16 [T, H]
  float* d_prob_TK;  // or null
  int32_t tokens;
  int32_t choices;
  int32_t hidden;
};

// Each throws std::runtime_error when CUDA refuses, and does nothing when there are no tokens.
void launch_route(const RouteArguments& arguments);
void launch_counts(const RouteArguments& arguments);  // its first two kernels
void launch_choices(const ChoiceArguments& arguments);
void launch_spread(const SpreadArguments& arguments);

void load_layer();  // these kernels, as load_plan

// `count` records of 128 bytes from host memory to a table on the device, through kernel
// parameters: the host does not wait, needs no pinned memory, and a graph that captures it keeps
// the records.
void launch_write_table(const void* host_records, int count, void* table, void* stream);

}  // namespace mok
