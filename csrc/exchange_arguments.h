// What crosses the border between layer_ops.cpp and the kernels that open a call of several ranks
// (device/exchange.cu): plain data, no torch, no CUDA. workspace.h has letters and protocol.
#pragma once

#include <cstdint>

#include "check.h"
#include "layer_arguments.h"
#include "workspace.h"

namespace mok {

// The group as a kernel sees it. One rank: all zero.
struct Peers {
  uint8_t* const* base = nullptr;  // device table [P] of the workspaces' addresses
  int32_t ranks = 0;               // P
  int32_t rank = 0;                // the own one
  int32_t slots = 0;               // Tmax · K: of a rank, in the numbers of all ranks' slots
  Workspace at = {};
};

// What gather and route found wrong with a call of several ranks, on every rank the same; or what
// the end of a grid found on this one, of several or not. Written like RouteFault.
enum class ExchangeFaultKind : int32_t {
  kAbsent = -1,  // a rank has not come: in check.h's record, not in this one
  kNone = 0,
  kLayer = 1,  // 1 to 5: rank's `value` is not most ranks', `wanted`
  kDirection = 2,
  kForward = 3,
  kRows = 4,
  kSettings = 5,
  kTokens = 6,   // rank has `value` tokens, `wanted` is the limit; below 0: it refuses the call
  kBudget = 7,   // an expert of rank would get `value` rows, buffers hold `wanted`
  kCounted = 8,  // and on: a Count of device/census.cuh is `value`, `wanted` is planned
};
struct ExchangeFault {
  int32_t kind;
  int32_t rank;
  int64_t value;
  int64_t wanted;
  int64_t balanced;  // Tmax · K: rows of a rank when all have as many
};

ExchangeFault* exchange_fault_record();  // process-wide; null when pinned memory is refused

struct PublishArguments {
  Peers peers;
  Start start;               // all but epoch and forward
  const uint32_t* forward;   // backward: its schedule's epoch; null: forward
  const void* x;             // bf16 [T, H]
  const void* dy;            // backward
  const int32_t* expert_TK;  // forward
  const float* prob_TK;
  int32_t choices;
  int32_t hidden;
  int32_t limit;  // Tmax
  int32_t ctas;
  void* stream;
};

// Forward: expert and prob. Backward: what the grid takes of its schedule; without rows, and
// faulty, when the call is refused.
struct GatherArguments {
  Peers peers;
  int32_t choices;
  int32_t limit;
  int32_t* expert;  // [P, Tmax, K], -1 above a rank's T, and everywhere when refused; or null
  float* prob;
  uint32_t* epoch;                        // [1]: the call's; or null
  int32_t* refused;                       // [1]: ExchangeFaultKind; or null
  int32_t experts;                        // L
  const int32_t *start, *count, *faulty;  // [L + 1], [L], [1]; or null
  int32_t *admitted_start, *admitted_count, *admitted_faulty;
  int64_t patience_ns;  // that a rank may come later than this one
  ExchangeFault* record;
  Fault* fault;
  int32_t ctas;
  void* stream;
};

// The part of all ranks' schedule that one keeps. route.tokens is P · Tmax and route.experts E;
// what route names of a schedule (row_start and on) is the own rank's, counted from its first row:
// row_start [L + 1], row_count [L], row_TK [T, K], slot_R and prob_R [rows of any routing].
struct ViewArguments {
  RouteArguments route;
  Peers peers;
  int32_t tokens;          // T
  int32_t rows;            // R
  int32_t capacity;        // rows that an expert may have
  const int32_t* refused;  // [1], gather's: not 0: nothing has a row
  ExchangeFault* record;
};

// row_TK of a row that another rank computes, or that comes home as if.
constexpr int32_t kElsewhere = -2;

// Each throws std::runtime_error when CUDA refuses.
void launch_publish(const PublishArguments& arguments);
void launch_gather(const GatherArguments& arguments);
// route, of which the own rank's view is kept.
void launch_view(const ViewArguments& arguments);
// These kernels, as load_plan; deadline: seconds that a wait of theirs may take.
void load_exchange(int32_t deadline);

}  // namespace mok
