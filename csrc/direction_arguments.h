// What crosses the border between layer_ops.cpp and the forward and backward kernels: plain
// data, no torch, no CUDA.
//
// Letters: T tokens, K choices, E experts, R rows that buffers hold, H hidden, F expert width, S
// shared width (0: no shared expert). bf16 unless a type says otherwise. The shared expert's
// pointers are null when S is 0.
#pragma once

#include <cstdint>

#include "arguments.h"
#include "exchange_arguments.h"
#include "layer_arguments.h"

namespace mok {

// The schedule, as route writes it.
struct Routing {
  const int32_t* row_start = {};  // [E + 1]
  const int32_t* row_count = {};  // [E]
  const int32_t* row_TK = {};
  const int32_t* slot_R = {};
  const float* prob_R = {};
  const int32_t* faulty = {};
  const Census* census = {};
  int32_t tokens = {};
  int32_t choices = {};
  int32_t experts = {};
  int32_t rows = {};  // R
  int32_t most = {};  // rows of any routing; of one rank R
};

struct Sizes {
  int32_t hidden = {};
  int32_t width = {};
  int32_t shared_width = {};
};

// Tables of tensor maps.
struct WeightTables {
  const void *w1 = nullptr, *w2 = nullptr, *shared_w1 = nullptr, *shared_w2 = nullptr;
};

struct DirectionLaunch {
  int32_t* words = {};  // direction_words() of them, whatever they hold
  int32_t ctas = {};    // 0: one for each SM
  int32_t ahead = {};   // experts of the first pass before the first expert's next; 0: chosen
  int32_t movers = {};  // of several ranks: CTAs that move rows beside their tiles; 0: all
  int32_t device = {};
  void* stream = {};
};

// Of a group of several ranks T is this rank's, E its own experts, and R the budget, which rows
// beyond it pass through in laps (device/plan.cuh); x and dy of the routed rows come from the
// ranks' workspaces.
struct ForwardArguments {
  Routing routing = {};
  Peers peers = {};
  Sizes sizes = {};
  WeightTables weights = {};
  DirectionLaunch launch = {};
  const void* x = {};     // [T, H]
  void* rows = {};        // [R, H]: x, then y, by rows
  void* gate_up = {};     // [R, 2F]
  void* activation = {};  // [R, F]
  void *shared_gate_up = nullptr, *shared_activation = nullptr, *shared_y = nullptr;
  void* y = {};  // [T, H]
};

// Where the weight gradients of one kind go; null: not here.
struct GradientTables {
  const void *w1 = nullptr, *w2 = nullptr, *shared_w1 = nullptr, *shared_w2 = nullptr;
  Gradient type = {};
  bool accumulate = {};
};

struct BackwardArguments {
  Routing routing = {};
  Peers peers = {};
  Sizes sizes = {};
  WeightTables weights = {};       // w1 for the gradient of up, w2 for that of down
  const void* again_w1 = nullptr;  // of several ranks: forward's w1, for later laps
  GradientTables gradients = {};
  DirectionLaunch launch = {};
  const void *x = nullptr, *dy = nullptr;  // [T, H]
  const void *gate_up = nullptr, *shared_gate_up = nullptr;
  void *x_rows = nullptr, *dy_rows = nullptr, *dx_rows = nullptr;  // [R, H]
  void *d_gate_up = nullptr, *activation = nullptr;                // [R, 2F], [R, F]
  float* parts = {};                                               // [R, F / kPartColumns]
  void *shared_d_gate_up = nullptr, *shared_activation = nullptr, *shared_dx = nullptr;
  void* dx = {};          // [T, H]
  float* d_prob_TK = {};  // [T, K]
};

// Words of int32 that either direction needs. rows: R; most: rows of any routing.
int64_t direction_words(int64_t rows, int64_t most, int64_t tokens, int64_t experts);

// Loads what calls of several ranks launch: a kernel that loads at its first launch may wait for
// one that runs, and that one for another rank.
void load_plan();

namespace sm90 {
// Each throws std::runtime_error when CUDA refuses. T > 0, or several ranks.
void launch_forward(const ForwardArguments& arguments);
void launch_backward(const BackwardArguments& arguments);
// deadline: seconds that a wait of these kernels may take.
void load_forward_of_ranks(int32_t deadline);
void load_backward_of_ranks(int32_t deadline);
}  // namespace sm90
}  // namespace mok
