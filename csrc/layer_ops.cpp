// The border to torch of the layer: route, and the forward and backward kernels.
//
// ops.cpp is the same border for the products, table_ops.cpp that of weights and their tables of
// tensor maps; beside tensor_checks.h, which they share, no other file has torch headers.
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

#include "arguments.h"
#include "direction_arguments.h"
#include "layer_arguments.h"
#include "tensor_checks.h"

namespace {

using namespace mok::border;

// Offsets in one allocation, each at a multiple of 512 bytes, where torch's allocator would put it.
class Room {
 public:
  int64_t take(int64_t bytes) {
    const int64_t at = bytes_;
    bytes_ += (bytes + 511) / 512 * 512;
    return at;
  }
  int64_t take_bf16(int64_t rows, int64_t columns) { return take(2 * rows * columns); }
  int64_t take_words(int64_t count) { return take(4 * count); }
  Tensor allocate(const Tensor& like) const { return new_tensor(like, {bytes_}, ScalarType::Byte); }
  int64_t bytes() const { return bytes_; }

 private:
  int64_t bytes_ = 0;
};

template <class T = void>
T* at(const Tensor& room, int64_t offset) {
  return reinterpret_cast<T*>(static_cast<char*>(room.mutable_data_ptr()) + offset);
}

// R: rows for any routing of `slots` choices, each expert's starting at a row tile.
int64_t capacity(int64_t slots, int64_t experts) {
  const int64_t rows = (slots + 127 * (slots < experts ? slots : experts)) / 128 * 128;
  STD_TORCH_CHECK(rows <= INT32_MAX,
                  "mok: rows must be fewer than 2^31, got ",
                  rows,
                  " for ",
                  slots,
                  " slots and ",
                  experts,
                  " experts; lower --micro-batch-size");
  return rows < 128 ? 128 : rows;
}

// The schedule as route writes it, in one tensor of bytes; see layer_arguments.h.
struct Schedule {
  int64_t tokens = {}, choices = {}, experts = {}, rows = {};
  int64_t row_start = {}, row_count = {}, shared_start = {}, shared_count = {};
  int64_t faulty = {}, row = {}, slot = {}, prob = {}, bytes = {};

  static Schedule of(int64_t tokens, int64_t choices, int64_t experts) {
    STD_TORCH_CHECK(experts > 0 && experts <= mok::kMaxExperts,
                    "mok: there may be 1 to ",
                    mok::kMaxExperts,
                    " experts, got ",
                    experts,
                    "; use --mok-backend reference");
    STD_TORCH_CHECK(choices > 0 && choices <= mok::kMaxChoices,
                    "mok: a token may have 1 to ",
                    mok::kMaxChoices,
                    " choices, got ",
                    choices,
                    "; use --mok-backend reference");
    STD_TORCH_CHECK(tokens > 0, "mok: a layer's kernel needs tokens, got none");
    const int64_t slots = tokens * choices;
    STD_TORCH_CHECK(slots <= INT32_MAX / 2,
                    "mok: tokens x choices must be at most ",
                    INT32_MAX / 2,
                    ", got ",
                    tokens,
                    " x ",
                    choices,
                    "; lower --micro-batch-size");
    Room room;
    Schedule s{
        .tokens = tokens, .choices = choices, .experts = experts, .rows = capacity(slots, experts)};
    s.row_start = room.take_words(experts + 1);
    s.row_count = room.take_words(experts);
    s.shared_start = room.take_words(2);
    s.shared_count = room.take_words(1);
    s.faulty = room.take_words(1);
    s.row = room.take_words(slots);
    s.slot = room.take_words(s.rows);
    s.prob = room.take_words(s.rows);
    s.bytes = room.bytes();
    return s;
  }

  int64_t chunks() const { return (tokens * choices + mok::kChunk - 1) / mok::kChunk; }
  int64_t counts() const { return (chunks() + 1) * (experts + 1); }

  mok::Routing routing(const Tensor& schedule) const {
    check_tensor(schedule, "schedule", ScalarType::Byte, {bytes}, 16);
    return {.row_start = at<int32_t>(schedule, row_start),
            .row_count = at<int32_t>(schedule, row_count),
            .row_TK = at<int32_t>(schedule, row),
            .slot_R = at<int32_t>(schedule, slot),
            .prob_R = at<float>(schedule, prob),
            .faulty = at<int32_t>(schedule, faulty),
            .tokens = static_cast<int32_t>(tokens),
            .choices = static_cast<int32_t>(choices),
            .experts = static_cast<int32_t>(experts),
            .rows = static_cast<int32_t>(rows)};
  }
};

Schedule check_choices(const Tensor& expert, const Tensor& prob, int64_t experts) {
  check_tensor(expert, "expert", ScalarType::Int, {-1, -1});
  const Schedule s = Schedule::of(expert.size(0), expert.size(1), experts);
  check_tensor(prob, "prob", ScalarType::Float, {s.tokens, s.choices});
  return s;
}

// counts: s.counts() words.
Tensor launch_route(const Schedule& s, const Tensor& expert, const Tensor& prob, int32_t* counts,
                    void* stream) {
  const Tensor schedule = new_tensor(expert, {s.bytes}, ScalarType::Byte);
  mok::launch_route({.expert_TK = expert.const_data_ptr<int32_t>(),
                     .prob_TK = prob.const_data_ptr<float>(),
                     .tokens = static_cast<int32_t>(s.tokens),
                     .choices = static_cast<int32_t>(s.choices),
                     .experts = static_cast<int32_t>(s.experts),
                     .chunks = static_cast<int32_t>(s.chunks()),
                     .counts = counts,
                     .row_start = at<int32_t>(schedule, s.row_start),
                     .row_count = at<int32_t>(schedule, s.row_count),
                     .shared_start = at<int32_t>(schedule, s.shared_start),
                     .shared_count = at<int32_t>(schedule, s.shared_count),
                     .faulty = at<int32_t>(schedule, s.faulty),
                     .row_TK = at<int32_t>(schedule, s.row),
                     .slot_R = at<int32_t>(schedule, s.slot),
                     .prob_R = at<float>(schedule, s.prob),
                     .fault = mok::route_fault_record(),
                     .stream = stream});
  return schedule;
}

// The schedule alone.
Tensor route(const Tensor& expert, const Tensor& prob, int64_t experts) {
  const Schedule s = check_choices(expert, prob, experts);
  check_device(expert, "route", {&prob});
  const torch::stable::accelerator::DeviceGuard guard(expert.get_device_index());
  const Tensor counts = new_tensor(expert, {s.counts()}, ScalarType::Int);
  return launch_route(s, expert, prob, counts.mutable_data_ptr<int32_t>(), stream_of(expert));
}

// Where its parts are, in words: row_start, row_count, shared_start, shared_count, faulty, row,
// slot, prob; then R, and the words of all.
std::vector<int64_t> schedule_words(int64_t tokens, int64_t choices, int64_t experts) {
  const Schedule s = Schedule::of(tokens, choices, experts);
  return {s.row_start / 4,
          s.row_count / 4,
          s.shared_start / 4,
          s.shared_count / 4,
          s.faulty / 4,
          s.row / 4,
          s.slot / 4,
          s.prob / 4,
          s.rows,
          s.bytes / 4};
}

// A table of `count` maps, or, where it may be left out, one without records.
const void* table_of(const Tensor& table, const char* name, int64_t count, bool optional) {
  if (optional && table.numel() == 0) return nullptr;
  check_tensor(table, name, ScalarType::Byte, {count + 1, mok::kTensorMapBytes}, 128);
  return table.const_data_ptr();
}

mok::WeightTables weights_of(const std::vector<Tensor>& weights, int64_t experts, bool shared) {
  return {.w1 = table_of(weights[0], "w1", experts, false),
          .w2 = table_of(weights[1], "w2", experts, false),
          .shared_w1 = shared ? table_of(weights[2], "shared w1", 1, false) : nullptr,
          .shared_w2 = shared ? table_of(weights[3], "shared w2", 1, false) : nullptr};
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

void check_count(const std::vector<Tensor>& list, const char* name, size_t wanted) {
  STD_TORCH_CHECK(
      list.size() == wanted, "mok: ", name, " must be ", wanted, " tensors, got ", list.size());
}

int64_t experts_of(const std::vector<Tensor>& weights, bool shared) {
  check_count(weights, "weights", shared ? 4 : 2);
  return weights[0].size(0) - 1;  // a table's last record says what the others are
}

mok::DirectionLaunch direction_launch(const Tensor& x, int32_t* words, int64_t ctas,
                                      int64_t ahead) {
  STD_TORCH_CHECK(ctas >= 0 && ctas <= 65535, "mok: ctas must be 0 (all SMs) to 65535, got ", ctas);
  STD_TORCH_CHECK(
      ahead >= 0 && ahead <= INT32_MAX, "mok: ahead must be 0 (chosen) or more, got ", ahead);
  return {.words = words,
          .ctas = static_cast<int32_t>(ctas),
          .ahead = static_cast<int32_t>(ahead),
          .device = x.get_device_index(),
          .stream = stream_of(x)};
}

void check_all_on(const Tensor& x, const char* op, std::vector<const Tensor*> all,
                  const std::vector<const std::vector<Tensor>*>& lists) {
  for (const auto* list : lists) {
    for (const Tensor& t : *list) {
      if (t.numel() > 0) all.push_back(&t);
    }
  }
  check_device(x, op, all);
  check_fault();
}

Tensor new_bf16(const Tensor& like, int64_t rows, int64_t columns) {
  return new_tensor(like, {rows, columns}, ScalarType::BFloat16);
}

// y, and what backward needs: the schedule, gate_up [R, 2F], the shared expert's [T, 2S].
// weights: tables of w1, w2, and of the shared expert's.
std::tuple<Tensor, std::vector<Tensor>> forward(const Tensor& x, const Tensor& expert,
                                                const Tensor& prob,
                                                const std::vector<Tensor>& weights, int64_t width,
                                                int64_t shared_width, int64_t ctas, int64_t ahead) {
  const bool shared = shared_width != 0;
  const Schedule s = check_choices(expert, prob, experts_of(weights, shared));
  check_tensor(x, "x", ScalarType::BFloat16, {s.tokens, -1}, 16);
  mok::ForwardArguments arguments{.sizes = check_sizes(x, width, shared_width),
                                  .weights = weights_of(weights, s.experts, shared)};
  const int64_t hidden = arguments.sizes.hidden;
  check_all_on(x, "forward", {&expert, &prob}, {&weights});
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());

  Room room;
  const int64_t words = room.take_words(mok::direction_words(s.rows, s.tokens, s.experts)),
                counts = room.take_words(s.counts()), rows = room.take_bf16(s.rows, hidden),
                activation = room.take_bf16(s.rows, width),
                shared_activation = room.take_bf16(s.tokens, shared_width),
                shared_y = room.take_bf16(shared ? s.tokens : 0, hidden);
  const Tensor scratch = room.allocate(x);
  const Tensor y = new_bf16(x, s.tokens, hidden);
  arguments.launch = direction_launch(x, at<int32_t>(scratch, words), ctas, ahead);
  std::vector<Tensor> kept{
      launch_route(s, expert, prob, at<int32_t>(scratch, counts), arguments.launch.stream),
      new_bf16(x, s.rows, 2 * width)};
  arguments.routing = s.routing(kept[0]);
  arguments.x = x.const_data_ptr();
  arguments.rows = at(scratch, rows);
  arguments.gate_up = kept[1].mutable_data_ptr();
  arguments.activation = at(scratch, activation);
  arguments.y = y.mutable_data_ptr();
  if (shared) {
    kept.push_back(new_bf16(x, s.tokens, 2 * shared_width));
    arguments.shared_gate_up = kept[2].mutable_data_ptr();
    arguments.shared_activation = at(scratch, shared_activation);
    arguments.shared_y = at(scratch, shared_y);
  }
  mok::sm90::launch_forward(arguments);
  return {y, kept};
}

// dx, dprob, and, if asked for, what weight gradients outside read: x rows, dy rows, d_gate_up,
// activation; with a shared expert its d_gate_up and activation. kept: forward's. gradients: tables
// in the order of weights, one without records where nothing is wanted here.
std::tuple<Tensor, Tensor, std::vector<Tensor>> backward(
    const Tensor& x, const Tensor& dy, const std::vector<Tensor>& kept,
    const std::vector<Tensor>& weights, const std::vector<Tensor>& gradients, int64_t choices,
    int64_t width, int64_t shared_width, bool fp32, bool accumulate, bool outside, int64_t ctas,
    int64_t ahead) {
  const bool shared = shared_width != 0;
  check_tensor(x, "x", ScalarType::BFloat16, {-1, -1}, 16);
  const Schedule s = Schedule::of(x.size(0), choices, experts_of(weights, shared));
  check_tensor(dy, "dy", ScalarType::BFloat16, {s.tokens, x.size(1)}, 16);
  check_count(kept, "kept", shared ? 3 : 2);
  check_count(gradients, "gradients", shared ? 4 : 2);
  mok::BackwardArguments arguments{.routing = s.routing(kept[0]),
                                   .sizes = check_sizes(x, width, shared_width),
                                   .weights = weights_of(weights, s.experts, shared)};
  check_tensor(kept[1], "gate_up", ScalarType::BFloat16, {s.rows, 2 * width}, 16);
  if (shared)
    check_tensor(kept[2], "shared gate_up", ScalarType::BFloat16, {s.tokens, 2 * shared_width}, 16);
  arguments.gradients = {
      .w1 = table_of(gradients[0], "the gradients of w1", s.experts, true),
      .w2 = table_of(gradients[1], "the gradients of w2", s.experts, true),
      .shared_w1 = shared ? table_of(gradients[2], "the shared gradient of w1", 1, true) : nullptr,
      .shared_w2 = shared ? table_of(gradients[3], "the shared gradient of w2", 1, true) : nullptr,
      .type = fp32 ? mok::Gradient::kFp32 : mok::Gradient::kBf16,
      .accumulate = accumulate};
  const int64_t hidden = arguments.sizes.hidden;
  check_all_on(x, "backward", {&dy}, {&kept, &weights, &gradients});
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());

  Room room;
  const int64_t words = room.take_words(mok::direction_words(s.rows, s.tokens, s.experts)),
                parts = room.take_words(s.rows * (width / mok::kPartColumns)),
                dx_rows = room.take_bf16(s.rows, hidden),
                shared_dx = room.take_bf16(shared ? s.tokens : 0, hidden);
  // What is read outside, if it is, is a tensor of its own; otherwise it is scratch too.
  struct Buffer {
    void** place;
    int64_t rows, columns, at;
  };
  std::vector<Buffer> buffers{{&arguments.x_rows, s.rows, hidden, 0},
                              {&arguments.dy_rows, s.rows, hidden, 0},
                              {&arguments.d_gate_up, s.rows, 2 * width, 0},
                              {&arguments.activation, s.rows, width, 0}};
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
  const Tensor scratch = room.allocate(x);
  if (!outside) {
    for (const Buffer& b : buffers) *b.place = at(scratch, b.at);
  }
  const Tensor dx = new_bf16(x, s.tokens, hidden);
  const Tensor dprob = new_tensor(x, {s.tokens, choices}, ScalarType::Float);
  arguments.launch = direction_launch(x, at<int32_t>(scratch, words), ctas, ahead);
  arguments.x = x.const_data_ptr();
  arguments.dy = dy.const_data_ptr();
  arguments.gate_up = kept[1].const_data_ptr();
  arguments.parts = at<float>(scratch, parts);
  arguments.dx_rows = at(scratch, dx_rows);
  arguments.dx = dx.mutable_data_ptr();
  arguments.d_prob_TK = dprob.mutable_data_ptr<float>();
  if (shared) {
    arguments.shared_gate_up = kept[2].const_data_ptr();
    arguments.shared_dx = at(scratch, shared_dx);
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
// and the bits of the probability. Sees what the device has written so far, and does not wait.
std::vector<int64_t> take_route_fault() {
  mok::RouteFault& record = fault_of_choices();
  std::atomic_ref<int32_t> kind(record.kind);
  const int32_t found = kind.load(std::memory_order_acquire);
  if (found == 0) return {0, 0, 0, 0, 0, 0, 0};
  std::vector<int64_t> words{found,
                             record.expert,
                             record.token,
                             record.choice,
                             record.experts,
                             record.choices,
                             std::bit_cast<uint32_t>(record.prob)};
  kind.store(0, std::memory_order_release);
  return words;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(mok_megatron, m) {
  m.def("route(Tensor expert, Tensor prob, int experts) -> Tensor");
  m.def("schedule_words(int tokens, int choices, int experts) -> int[]");
  m.def(
      "forward(Tensor x, Tensor expert, Tensor prob, Tensor[] weights, int width, "
      "int shared_width, int ctas=0, int ahead=0) -> (Tensor, Tensor[])");
  m.def(
      "backward(Tensor x, Tensor dy, Tensor[] kept, Tensor[] weights, Tensor[] gradients, "
      "int choices, int width, int shared_width, bool fp32, bool accumulate, bool outside, "
      "int ctas=0, int ahead=0) -> (Tensor, Tensor, Tensor[])");
  m.def("route_fault_address() -> int");
  m.def("take_route_fault() -> int[]");
}

STABLE_TORCH_LIBRARY_IMPL(mok_megatron, CompositeExplicitAutograd, m) {
  m.impl("route", TORCH_BOX(&route));
  m.impl("schedule_words", TORCH_BOX(&schedule_words));
  m.impl("forward", TORCH_BOX(&forward));
  m.impl("backward", TORCH_BOX(&backward));
  m.impl("route_fault_address", TORCH_BOX(&route_fault_address));
  m.impl("take_route_fault", TORCH_BOX(&take_route_fault));
}
