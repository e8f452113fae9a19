// The border to torch of the layer: route, and the forward and backward kernels.
//
// ops.cpp is the same border for the products, table_ops.cpp that of weights and their tables of
// tensor maps; beside tensor_checks.h and call.h, which they share, no other file has torch
// headers.
//
// No op waits for the device, and checks run before it is asked. A call of a layer is one op a
// direction: it allocates what it returns and what it needs meanwhile, the latter in one piece, and
// gives that back when it returns: the stream's order keeps it whole until the kernels are done.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>

#include <atomic>
#include <bit>
#include <string>
#include <tuple>
#include <vector>

#include "call.h"
#include "layer_arguments.h"

namespace {

using namespace mok::border;

// The schedule alone.
Tensor route(const Tensor& expert, const Tensor& prob, int64_t experts) {
  const Schedule s = check_choices(expert, prob, experts);
  check_device(expert, "route", {&prob});
  const torch::stable::accelerator::DeviceGuard guard(expert.get_device_index());
  const int64_t slots = s.tokens * s.choices;
  const Tensor counts = new_tensor(expert, {Schedule::counts(slots, experts)}, ScalarType::Int);
  const Tensor schedule = new_schedule(s, expert);
  mok::launch_route(route_arguments(s,
                                    schedule,
                                    expert.const_data_ptr<int32_t>(),
                                    prob.const_data_ptr<float>(),
                                    slots,
                                    experts,
                                    counts.mutable_data_ptr<int32_t>(),
                                    stream_of(expert)));
  return schedule;
}

// Where its parts are, in words: row_start, row_count, shared_start, shared_count, faulty, row,
// slot, prob; then R, the rows of any routing, and the words of all. rows: R of a group of several
// ranks, whose tokens are at most `all_tokens`, or 0.
std::vector<int64_t> schedule_words(int64_t tokens, int64_t choices, int64_t experts, int64_t rows,
                                    int64_t all_tokens) {
  const Schedule s = Schedule::of(tokens, choices, experts, rows, all_tokens);
  return {s.row_start / 4,
          s.row_count / 4,
          s.shared_start / 4,
          s.shared_count / 4,
          s.faulty / 4,
          s.row / 4,
          s.slot / 4,
          s.prob / 4,
          s.rows,
          s.most,
          s.bytes / 4};
}

// Tables of tensor maps, one behind the other in one tensor: of w1, w2, and with a shared expert of
// its two; last, where `again` asks for it, of w1 as forward has it. `there`: bit i says whether
// the i-th has records. Few arguments, since torch takes as long for each tensor of a list as a
// launch does for a parameter.
mok::WeightTables tables_of(const Tensor& tables, const char* name, int64_t experts, bool shared,
                            int64_t there = 15, const void** again = nullptr) {
  const int64_t count[5] = {experts + 1, experts + 1, shared ? 2 : 0, shared ? 2 : 0, experts + 1};
  there = (there & 15) | (again != nullptr ? 16 : 0);
  int64_t start[6] = {};
  for (int i = 0; i < 5; ++i) start[i + 1] = start[i] + (there >> i & 1 ? count[i] : 0);
  check_tensor(tables, name, ScalarType::Byte, {start[5], mok::kTensorMapBytes}, 128);
  const auto* const records = static_cast<const uint8_t*>(tables.const_data_ptr());
  const void* table[5];
  for (int i = 0; i < 5; ++i) {
    table[i] = start[i] < start[i + 1] ? records + start[i] * mok::kTensorMapBytes : nullptr;
  }
  if (again != nullptr) *again = table[4];
  return {.w1 = table[0], .w2 = table[1], .shared_w1 = table[2], .shared_w2 = table[3]};
}

// A table's last record says what the others are. routed: how many tables there are of the routed.
int64_t experts_of(const Tensor& tables, bool shared, int64_t routed = 2) {
  STD_TORCH_CHECK(tables.dim() == 2, "mok: weights must be tables, got ", shape_of(tables));
  return (tables.size(0) - (shared ? 4 : 0)) / routed - 1;
}

int32_t check_width(int64_t width, const char* name) {
  STD_TORCH_CHECK(width > 0 && width % 64 == 0 && width <= INT32_MAX / 4,
                  "mok: ",
                  name,
                  " must be a positive multiple of 64, got ",
                  width,
                  "; use --moe-token-dispatcher-type alltoall");
  return static_cast<int32_t>(width);
}

mok::Sizes check_sizes(const Tensor& x, int64_t width, int64_t shared_width) {
  return {.hidden = check_width(x.size(1), "the hidden size"),
          .width = check_width(width, "the expert width"),
          .shared_width =
              shared_width == 0 ? 0 : check_width(shared_width, "the shared expert's width")};
}

mok::DirectionLaunch direction_launch(const Tensor& x, int32_t* words, int64_t ctas, int64_t ahead,
                                      int64_t movers) {
  STD_TORCH_CHECK(ctas >= 0 && ctas <= 65535, "mok: ctas must be 0 (all SMs) to 65535, got ", ctas);
  STD_TORCH_CHECK(
      ahead >= 0 && ahead <= INT32_MAX, "mok: ahead must be 0 (chosen) or more, got ", ahead);
  return {.words = words,
          .ctas = static_cast<int32_t>(ctas),
          .ahead = static_cast<int32_t>(ahead),
          .movers = static_cast<int32_t>(movers),
          .device = x.get_device_index(),
          .stream = stream_of(x)};
}

Tensor new_bf16(const Tensor& like, int64_t rows, int64_t columns) {
  return new_tensor(like, {rows, columns}, ScalarType::BFloat16);
}

// What forward keeps for backward, in one tensor.
struct Kept {
  int64_t schedule, gate_up, shared_gate_up, bytes;

  static Kept of(const Schedule& s, int64_t width, int64_t shared_width) {
    Room room;
    Kept k{};
    k.schedule = room.take(s.bytes);  // first, as schedule_words has it
    k.gate_up = room.take_bf16(s.rows, 2 * width);
    k.shared_gate_up = room.take_bf16(s.tokens, 2 * shared_width);
    k.bytes = room.bytes();
    return k;
  }
};

// y, and what backward needs: the schedule, gate_up [R, 2F], the shared expert's [T, 2S].
// weights: tables.
std::tuple<Tensor, Tensor> forward(const Tensor& x, const Tensor& expert, const Tensor& prob,
                                   const Tensor& weights, int64_t width, int64_t shared_width,
                                   int64_t ctas, int64_t ahead, const std::optional<Tensor>& bases,
                                   const std::vector<int64_t>& numbers) {
  const bool shared = shared_width != 0;
  const Group g = Group::of(bases, numbers);
  const Schedule s = check_choices(expert, prob, experts_of(weights, shared), g);
  check_tensor(x, "x", ScalarType::BFloat16, {s.tokens, -1}, 16);
  mok::ForwardArguments arguments{.sizes = check_sizes(x, width, shared_width),
                                  .weights = tables_of(weights, "weights", s.experts, shared)};
  const int64_t hidden = arguments.sizes.hidden;
  check_device(x, "forward", {&expert, &prob, &weights, bases ? &*bases : &x});
  check_fault();
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());

  Room room;
  const int64_t words = room.take_words(s.words()), rows = room.take_bf16(s.capacity, hidden),
                activation = room.take_bf16(s.capacity, width),
                shared_activation = room.take_bf16(s.tokens, shared_width),
                shared_y = room.take_bf16(shared ? s.tokens : 0, hidden);
  const int64_t slots = s.tokens * s.choices;
  const Opening opening =
      g.several() ? Opening::forward(room, g, s)
                  : Opening{.counts = room.take_words(Schedule::counts(slots, s.experts))};
  const Tensor scratch = room.allocate(x);
  const Tensor y = new_bf16(x, s.tokens, hidden);
  arguments.launch = direction_launch(x, inside<int32_t>(scratch, words), ctas, ahead, g.movers);
  const Kept at = Kept::of(s, width, shared_width);
  const Tensor kept = new_tensor(x, {at.bytes}, ScalarType::Byte);
  arguments.peers = g.peers(s.choices, hidden);
  if (g.several()) {
    open_forward(g, s, opening, arguments.launch, arguments.peers, x, expert, prob, scratch, kept);
  } else {
    mok::launch_route(route_arguments(s,
                                      kept,
                                      expert.const_data_ptr<int32_t>(),
                                      prob.const_data_ptr<float>(),
                                      slots,
                                      s.experts,
                                      inside<int32_t>(scratch, opening.counts),
                                      arguments.launch.stream));
  }
  arguments.routing = s.routing(kept);
  arguments.x = x.const_data_ptr();
  arguments.rows = inside(scratch, rows);
  arguments.gate_up = inside(kept, at.gate_up);
  arguments.activation = inside(scratch, activation);
  arguments.y = y.mutable_data_ptr();
  if (shared) {
    arguments.shared_gate_up = inside(kept, at.shared_gate_up);
    arguments.shared_activation = inside(scratch, shared_activation);
    arguments.shared_y = inside(scratch, shared_y);
  }
  mok::sm90::launch_forward(arguments);
  return {y, kept};
}

// dx, dprob, and, if asked for, what weight gradients outside read: x rows, dy rows, d_gate_up,
// activation; with a shared expert its d_gate_up and activation. kept: forward's. gradients: tables
// in the order of weights, of those groups that `wanted` has a bit for. weights of several ranks
// end with w1 as forward has it.
std::tuple<Tensor, Tensor, std::vector<Tensor>> backward(
    const Tensor& x, const Tensor& dy, const Tensor& kept, const Tensor& weights,
    const Tensor& gradients, int64_t wanted, int64_t choices, int64_t width, int64_t shared_width,
    bool fp32, bool accumulate, bool outside, int64_t ctas, int64_t ahead,
    const std::optional<Tensor>& bases, const std::vector<int64_t>& numbers) {
  const bool shared = shared_width != 0;
  const Group g = Group::of(bases, numbers);
  check_tensor(x, "x", ScalarType::BFloat16, {-1, -1}, 16);
  const int64_t experts = experts_of(weights, shared, g.several() ? 3 : 2);
  const Schedule s = Schedule::of(x.size(0), choices, experts, g.rows, g.ranks * g.tokens);
  check_tensor(dy, "dy", ScalarType::BFloat16, {s.tokens, x.size(1)}, 16);
  const mok::Sizes sizes = check_sizes(x, width, shared_width);
  const Kept at = Kept::of(s, width, shared_width);
  check_tensor(kept, "kept", ScalarType::Byte, {at.bytes}, 16);
  const mok::WeightTables into = tables_of(gradients, "gradients", s.experts, shared, wanted);
  STD_TORCH_CHECK(!(outside && g.several()),
                  "mok: with several ranks the kernel itself must write all weight gradients, got "
                  "some to be written outside; give them one dtype");
  const void* again = nullptr;
  mok::BackwardArguments arguments{
      .routing = s.routing(kept),
      .sizes = sizes,
      .weights = tables_of(weights, "weights", experts, shared, 15, g.several() ? &again : nullptr),
      .gradients = {.w1 = into.w1,
                    .w2 = into.w2,
                    .shared_w1 = into.shared_w1,
                    .shared_w2 = into.shared_w2,
                    .type = fp32 ? mok::Gradient::kFp32 : mok::Gradient::kBf16,
                    .accumulate = accumulate}};
  const int64_t hidden = sizes.hidden;
  check_device(
      x, "backward", {&dy, &kept, &weights, bases ? &*bases : &x, wanted ? &gradients : &x});
  check_fault();
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());

  Room room;
  const int64_t words = room.take_words(s.words()),
                parts = room.take_words(s.capacity * (width / mok::kPartColumns)),
                dx_rows = room.take_bf16(s.capacity, hidden),
                shared_dx = room.take_bf16(shared ? s.tokens : 0, hidden);
  // What is read outside, if it is, is a tensor of its own; otherwise it is scratch too.
  struct Buffer {
    void** place;
    int64_t rows, columns, at;
  };
  std::vector<Buffer> buffers{{&arguments.x_rows, s.capacity, hidden, 0},
                              {&arguments.dy_rows, s.capacity, hidden, 0},
                              {&arguments.d_gate_up, s.capacity, 2 * width, 0},
                              {&arguments.activation, s.capacity, width, 0}};
  if (shared) {
    buffers.push_back({&arguments.shared_d_gate_up, s.tokens, 2 * shared_width, 0});
    buffers.push_back({&arguments.shared_activation, s.tokens, shared_width, 0});
  }
  std::vector<Tensor> rows;
  for (Buffer& b : buffers) {
    if (!outside) {
      b.at = room.take_bf16(b.rows, b.columns);
      continue;
    }
    rows.push_back(new_bf16(x, b.rows, b.columns));
    *b.place = rows.back().mutable_data_ptr();
  }
  const Opening opening = g.several() ? Opening::backward(room, s) : Opening{};
  const Tensor scratch = room.allocate(x);
  if (!outside) {
    for (const Buffer& b : buffers) *b.place = inside(scratch, b.at);
  }
  const Tensor dx = new_bf16(x, s.tokens, hidden);
  const Tensor dprob = new_tensor(x, {s.tokens, choices}, ScalarType::Float);
  arguments.launch = direction_launch(x, inside<int32_t>(scratch, words), ctas, ahead, g.movers);
  arguments.peers = g.peers(choices, hidden);
  if (g.several()) {
    arguments.routing =
        open_backward(g, s, opening, arguments.launch, arguments.peers, x, dy, scratch, kept);
  }
  arguments.x = x.const_data_ptr();
  arguments.dy = dy.const_data_ptr();
  arguments.gate_up = inside(kept, at.gate_up);
  arguments.again_w1 = again;
  arguments.parts = inside<float>(scratch, parts);
  arguments.dx_rows = inside(scratch, dx_rows);
  arguments.dx = dx.mutable_data_ptr();
  arguments.d_prob_TK = dprob.mutable_data_ptr<float>();
  if (shared) {
    arguments.shared_gate_up = inside(kept, at.shared_gate_up);
    arguments.shared_dx = inside(scratch, shared_dx);
  }
  mok::sm90::launch_backward(arguments);
  return {dx, dprob, rows};
}

mok::RouteFault& fault_of_choices() {
  mok::RouteFault* const record = mok::route_fault_record();
  mok::fault_record();  // both records exist before any launch, so that a captured one allocates
                        // nothing
  STD_TORCH_CHECK(record != nullptr,
                  "mok: the fault record needs pinned host memory, got none; ",
                  "raise the limit of locked memory (ulimit -l) or use --mok-backend reference");
  return *record;
}

// Where the host may look whether there is a fault: int32, not 0.
int64_t route_fault_address() { return reinterpret_cast<int64_t>(&fault_of_choices().kind); }

// The first fault of the choices since the last call: kind (0: none), expert, token, choice, E, K,
// the bits of the probability, and Tmax where there are several ranks. Sees what the device has
// written so far, and does not wait.
std::vector<int64_t> take_route_fault() {
  mok::RouteFault& record = fault_of_choices();
  std::atomic_ref<int32_t> kind(record.kind);
  const int32_t found = kind.load(std::memory_order_acquire);
  if (found == 0) return {0, 0, 0, 0, 0, 0, 0, 0};
  std::vector<int64_t> words{found,
                             record.expert,
                             record.token,
                             record.choice,
                             record.experts,
                             record.choices,
                             std::bit_cast<uint32_t>(record.prob),
                             record.rank_tokens};
  kind.store(0, std::memory_order_release);
  return words;
}

// Of a rank's workspace: its bytes, then where its parts start; see workspace.h.
std::vector<int64_t> workspace_parts(int64_t ranks, int64_t tokens, int64_t choices,
                                     int64_t hidden) {
  const std::vector<int64_t> sizes{ranks, tokens, choices, hidden};
  for (const int64_t size : sizes) {
    STD_TORCH_CHECK(size > 0 && size <= INT32_MAX,
                    "mok: a workspace needs ranks, tokens, choices and a hidden size, got ",
                    size);
  }
  const auto w = mok::Workspace::of({.ranks = static_cast<int32_t>(ranks),
                                     .tokens = static_cast<int32_t>(tokens),
                                     .choices = static_cast<int32_t>(choices),
                                     .hidden = static_cast<int32_t>(hidden)});
  return {w.bytes,
          w.control,
          w.start[0],
          w.start[1],
          w.expert[0],
          w.expert[1],
          w.prob[0],
          w.prob[1],
          w.x[0],
          w.x[1],
          w.dy[0],
          w.dy[1],
          w.arrived,
          w.home};
}

// A call that this rank cannot make: a fault on all ranks instead of a wait.
void refuse(const Tensor& bases, const std::vector<int64_t>& numbers, int64_t direction,
            int64_t choices, int64_t hidden) {
  const Group g = Group::of(bases, numbers);
  check_device(bases, "refuse", {});
  const torch::stable::accelerator::DeviceGuard guard(bases.get_device_index());
  open_refused(g, direction, choices, hidden, stream_of(bases));
}

// All that calls of several ranks launch, on the current device, and the fault records.
void load_kernels(int64_t deadline) {
  STD_TORCH_CHECK(deadline >= 1 && deadline <= 86400,
                  "mok: --mok-deadline must be 1 to 86400 seconds, got ",
                  deadline,
                  "; give the longest that a healthy rank may let others wait");
  const auto seconds = static_cast<int32_t>(deadline);
  mok::fault_record();
  mok::route_fault_record();
  mok::exchange_fault_record();
  mok::load_layer();
  mok::load_plan();
  mok::load_exchange(seconds);
  mok::sm90::load_forward_of_ranks(seconds);
  mok::sm90::load_backward_of_ranks(seconds);
}

mok::ExchangeFault& fault_of_exchange() {
  mok::ExchangeFault* const record = mok::exchange_fault_record();
  STD_TORCH_CHECK(record != nullptr,
                  "mok: the fault record needs pinned host memory, got none; ",
                  "raise the limit of locked memory (ulimit -l) or use --mok-backend reference");
  return *record;
}

// As route_fault_address.
int64_t exchange_fault_address() { return reinterpret_cast<int64_t>(&fault_of_exchange().kind); }

// As take_route_fault, of a call of several ranks: kind (0: none), rank, value, wanted, balanced.
std::vector<int64_t> take_exchange_fault() {
  mok::ExchangeFault& record = fault_of_exchange();
  std::atomic_ref<int32_t> kind(record.kind);
  const int32_t found = kind.load(std::memory_order_acquire);
  if (found == 0) return {0, 0, 0, 0, 0};
  std::vector<int64_t> words{found, record.rank, record.value, record.wanted, record.balanced};
  kind.store(0, std::memory_order_release);
  return words;
}

// What stopped a launch, at any time and from any thread: tag (0: nothing), CTA, thread, value,
// expected, as in check.h.
// Where the host may look whether a wait was in vain: int32, not 0.
int64_t stopped_address() {
  fault_of_choices();  // both records, or an error
  return reinterpret_cast<int64_t>(&mok::fault_record()->tag);
}

std::vector<int64_t> stopped() {
  mok::Fault* const fault = mok::fault_record();
  if (fault == nullptr) return {0, 0, 0, 0, 0};
  const uint32_t tag = std::atomic_ref<uint32_t>(fault->tag).load(std::memory_order_acquire);
  return {tag, fault->cta, fault->thread, fault->value, fault->expected};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(mok_megatron, m) {
  m.def("route(Tensor expert, Tensor prob, int experts) -> Tensor");
  m.def(
      "schedule_words(int tokens, int choices, int experts, int rows=0, int all_tokens=0) -> "
      "int[]");
  m.def(
      "forward(Tensor x, Tensor expert, Tensor prob, Tensor weights, int width, "
      "int shared_width, int ctas=0, int ahead=0, Tensor? bases=None, int[] group=[]) -> (Tensor, "
      "Tensor)");
  m.def(
      "backward(Tensor x, Tensor dy, Tensor kept, Tensor weights, Tensor gradients, "
      "int wanted, int choices, int width, int shared_width, bool fp32, bool accumulate, bool "
      "outside, "
      "int ctas=0, int ahead=0, Tensor? bases=None, int[] group=[]) -> (Tensor, Tensor, Tensor[])");
  m.def("route_fault_address() -> int");
  m.def("take_route_fault() -> int[]");
  m.def("workspace_parts(int ranks, int tokens, int choices, int hidden) -> int[]");
  m.def("refuse(Tensor bases, int[] group, int direction, int choices, int hidden) -> ()");
  m.def("load_kernels(int deadline=10) -> ()");
  m.def("exchange_fault_address() -> int");
  m.def("take_exchange_fault() -> int[]");
  m.def("stopped() -> int[]");
  m.def("stopped_address() -> int");
  m.def("check_stopped() -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(mok_megatron, CompositeExplicitAutograd, m) {
  m.impl("route", TORCH_BOX(&route));
  m.impl("schedule_words", TORCH_BOX(&schedule_words));
  m.impl("forward", TORCH_BOX(&forward));
  m.impl("backward", TORCH_BOX(&backward));
  m.impl("route_fault_address", TORCH_BOX(&route_fault_address));
  m.impl("take_route_fault", TORCH_BOX(&take_route_fault));
  m.impl("workspace_parts", TORCH_BOX(&workspace_parts));
  m.impl("refuse", TORCH_BOX(&refuse));
  m.impl("load_kernels", TORCH_BOX(&load_kernels));
  m.impl("exchange_fault_address", TORCH_BOX(&exchange_fault_address));
  m.impl("take_exchange_fault", TORCH_BOX(&take_exchange_fault));
  m.impl("stopped", TORCH_BOX(&stopped));
  m.impl("stopped_address", TORCH_BOX(&stopped_address));
  m.impl("check_stopped", TORCH_BOX(&check_fault));
}
