// Calls of both directions on the host, for emulation.py.
#include "csrc/exchange_arguments.h"
#include "csrc/sm90/direction_launch.cuh"

namespace {

struct Sizes {  // the order of emulation.py's words
  int64_t tokens, choices, experts, rows, hidden, width, shared_width;
  int64_t ctas, ahead, fp32, accumulate;
  int64_t ranks, rank, most_tokens, layer, most, capacity, movers;
};

struct Buffers {  // likewise; null: not there
  int32_t *row_start, *row_count, *row_TK, *slot_R;
  float* prob_R;
  int32_t *faulty, *words;
  uint16_t *x, *dy, *y, *dx;
  uint16_t *x_rows, *dy_rows, *dx_rows, *gate_up, *activation, *d_gate_up;
  uint16_t *shared_gate_up, *shared_activation, *shared_y, *shared_d_gate_up, *shared_dx;
  float *parts, *d_prob_TK;
  void** w1;  // [E + 1]: the last one is the shared expert's
  void** w2;
  void** d_w1;
  void** d_w2;
  uint8_t** base;  // [P] of the workspaces
  // Of several ranks: the own choices; room for those of all; counts of route.
  int32_t* expert_TK;
  float* prob_TK;
  int32_t* gathered_expert;
  float* gathered_prob;
  int32_t *counts, *few;  // few: refused, epoch, shared_start x 2, shared_count, admitted_faulty
  int32_t *admitted_start, *admitted_count;
  mok::Census* census;
};

// Of matrices [rows, columns] of the routed experts, or of the shared one.
struct Table {
  struct alignas(64) Record {
    uint8_t bytes[mok::kTensorMapBytes];
  };
  std::vector<Record> records;

  Table(mok::Role role, void** matrices, int64_t first, int64_t count, int64_t rows,
        int64_t columns, bool fp32 = false)
      : records(count + 1) {
    std::vector<mok::Matrix> all;
    for (int64_t i = 0; i < count; ++i) {
      all.push_back({.data = matrices[first + i], .rows = rows, .columns = columns, .fp32 = fp32});
    }
    if (count > 0) {
      mok::sm90::encode_table(role, 0, all.data(), static_cast<int>(count), records.data());
    }
  }
  const void* get() const { return records.size() > 1 ? records.data() : nullptr; }
};

mok::Routing routing(const Sizes& s, const Buffers& b) {
  return {.row_start = b.row_start,
          .row_count = b.row_count,
          .row_TK = b.row_TK,
          .slot_R = b.slot_R,
          .prob_R = b.prob_R,
          .faulty = b.faulty,
          .census = b.census,
          .tokens = static_cast<int32_t>(s.tokens),
          .choices = static_cast<int32_t>(s.choices),
          .experts = static_cast<int32_t>(s.experts),
          .rows = static_cast<int32_t>(s.rows),
          .capacity = static_cast<int32_t>(s.capacity),
          .most = static_cast<int32_t>(s.most)};
}

mok::Sizes sizes(const Sizes& s) {
  return {.hidden = static_cast<int32_t>(s.hidden),
          .width = static_cast<int32_t>(s.width),
          .shared_width = static_cast<int32_t>(s.shared_width)};
}

mok::Peers peers(const Sizes& s, const Buffers& b) {
  if (s.ranks == 1) return {};
  return {.base = b.base,
          .ranks = static_cast<int32_t>(s.ranks),
          .rank = static_cast<int32_t>(s.rank),
          .slots = static_cast<int32_t>(s.most_tokens * s.choices),
          .at = mok::Workspace::of({.ranks = static_cast<int32_t>(s.ranks),
                                    .tokens = static_cast<int32_t>(s.most_tokens),
                                    .choices = static_cast<int32_t>(s.choices),
                                    .hidden = static_cast<int32_t>(s.hidden)})};
}

// A stream for each rank.
mok::DirectionLaunch launch_of(const Sizes& s, const Buffers& b) {
  return {.words = b.words,
          .ctas = static_cast<int32_t>(s.ctas),
          .ahead = static_cast<int32_t>(s.ahead),
          .movers = static_cast<int32_t>(s.movers),
          .stream = reinterpret_cast<void*>(s.rank + 1)};
}

mok::PublishArguments publish_of(const Sizes& s, const Buffers& b, const mok::Peers& peers,
                                 mok::CallDirection direction) {
  const bool forward = direction == mok::CallDirection::kForward;
  return {.peers = peers,
          .start = {.epoch = 0,
                    .layer = static_cast<int32_t>(s.layer),
                    .direction = static_cast<int32_t>(direction),
                    .forward = 0,
                    .rows = 1 << 20,
                    .tokens = static_cast<int32_t>(s.tokens),
                    .settings = 11},
          .forward = forward ? nullptr : reinterpret_cast<uint32_t*>(b.few + 1),
          .x = b.x,
          .dy = forward ? nullptr : b.dy,
          .expert_TK = b.expert_TK,
          .prob_TK = b.prob_TK,
          .choices = static_cast<int32_t>(s.choices),
          .hidden = static_cast<int32_t>(s.hidden),
          .limit = static_cast<int32_t>(s.most_tokens),
          .ctas = static_cast<int32_t>(s.ctas),
          .stream = launch_of(s, b).stream};
}

mok::GatherArguments gather_of(const Sizes& s, const mok::Peers& peers, void* stream) {
  mok::GatherArguments a{};
  a.peers = peers;
  a.choices = static_cast<int32_t>(s.choices);
  a.limit = static_cast<int32_t>(s.most_tokens);
  a.experts = static_cast<int32_t>(s.experts);
  a.patience_ns = 1;
  a.record = mok::exchange_fault_record();
  a.fault = mok::fault_record();
  a.ctas = static_cast<int32_t>(s.ctas);
  a.stream = stream;
  return a;
}

// Opens a call of several ranks, as the border to torch does.
void open_forward(const Sizes& s, const Buffers& b) {
  const mok::Peers group = peers(s, b);
  const mok::PublishArguments publish = publish_of(s, b, group, mok::CallDirection::kForward);
  mok::launch_publish(publish);
  mok::GatherArguments gather = gather_of(s, group, publish.stream);
  gather.expert = b.gathered_expert;
  gather.prob = b.gathered_prob;
  gather.epoch = reinterpret_cast<uint32_t*>(b.few + 1);
  gather.refused = b.few;
  mok::launch_gather(gather);
  const auto slots = s.ranks * s.most_tokens * s.choices;
  mok::launch_view(
      {.route = {.expert_TK = b.gathered_expert,
                 .prob_TK = b.gathered_prob,
                 .tokens = static_cast<int32_t>(s.ranks * s.most_tokens),
                 .choices = static_cast<int32_t>(s.choices),
                 .experts = static_cast<int32_t>(s.ranks * s.experts),
                 .chunks = static_cast<int32_t>((slots + mok::kChunk - 1) / mok::kChunk),
                 .counts = b.counts,
                 .row_start = b.row_start,
                 .row_count = b.row_count,
                 .shared_start = b.few + 2,
                 .shared_count = b.few + 4,
                 .faulty = b.faulty,
                 .row_TK = b.row_TK,
                 .slot_R = b.slot_R,
                 .prob_R = b.prob_R,
                 .census = b.census,
                 .fault = mok::route_fault_record(),
                 .stream = publish.stream,
                 .rank_tokens = static_cast<int32_t>(s.most_tokens)},
       .peers = group,
       .tokens = static_cast<int32_t>(s.tokens),
       .rows = static_cast<int32_t>(s.rows),
       .capacity = static_cast<int32_t>(s.capacity),
       .refused = b.few,
       .record = mok::exchange_fault_record()});
}

mok::Routing open_backward(const Sizes& s, const Buffers& b) {
  const mok::Peers group = peers(s, b);
  const mok::PublishArguments publish = publish_of(s, b, group, mok::CallDirection::kBackward);
  mok::launch_publish(publish);
  mok::GatherArguments gather = gather_of(s, group, publish.stream);
  gather.start = b.row_start;
  gather.count = b.row_count;
  gather.faulty = b.faulty;
  gather.admitted_start = b.admitted_start;
  gather.admitted_count = b.admitted_count;
  gather.admitted_faulty = b.few + 5;
  mok::launch_gather(gather);
  mok::Routing admitted = routing(s, b);
  admitted.row_start = b.admitted_start;
  admitted.row_count = b.admitted_count;
  admitted.faulty = b.few + 5;
  return admitted;
}

struct Weights {  // tables of a direction
  Table w1, w2, shared_w1, shared_w2;

  Weights(const Sizes& s, void** of_w1, void** of_w2, mok::Role role_1, mok::Role role_2,
          bool fp32 = false)
      : w1(role_1, of_w1, 0, s.experts, 2 * s.width, s.hidden, fp32),
        w2(role_2, of_w2, 0, s.experts, s.hidden, s.width, fp32),
        shared_w1(role_1, of_w1, s.experts, shared(s), 2 * s.shared_width, s.hidden, fp32),
        shared_w2(role_2, of_w2, s.experts, shared(s), s.hidden, s.shared_width, fp32) {}
  static int64_t shared(const Sizes& s) { return s.shared_width > 0 ? 1 : 0; }
  mok::WeightTables get() const { return {w1.get(), w2.get(), shared_w1.get(), shared_w2.get()}; }
};

std::string fault;

// call(s, b) for every rank, then all of them at once.
template <class Call>
const char* run(int64_t ranks, const Sizes* const* sizes, const Buffers* const* buffers,
                int64_t seed, int64_t started, Call call) {
  emulated::machine = std::make_unique<emulated::Machine>();
  emulated::machine->draw.seed(static_cast<uint64_t>(seed));
  emulated::machine->started_ctas = static_cast<int>(started);
  *mok::fault_record() = {};
  try {
    for (int64_t rank = 0; rank < ranks; ++rank) call(*sizes[rank], *buffers[rank]);
    emulated::run();
    fault = emulated::machine->fault;
  } catch (const std::exception& error) {
    fault = error.what();
  }
  return fault.c_str();
}

}  // namespace

extern "C" {

int64_t words(const Sizes* s) { return mok::direction_words(s->rows, s->capacity, s->most, s->tokens, s->experts); }
void plant(int fault) { emulated::planted = fault; }
// What gather, view and the end of a grid found since the last call of this: kind, rank, value, wanted.
void exchange_fault(int64_t (&found)[4]) {
  mok::ExchangeFault& fault = *mok::exchange_fault_record();
  found[0] = fault.kind;
  found[1] = fault.rank;
  found[2] = fault.value;
  found[3] = fault.wanted;
  fault = {};
}
// tag, thread, value and expected of check.h's record, which all ranks share, since the last run began.
void stopped(int64_t (&found)[4]) {
  const mok::Fault& fault = *mok::fault_record();
  found[0] = fault.tag;
  found[1] = fault.thread;
  found[2] = fault.value;
  found[3] = fault.expected;
}
int64_t encoded_maps() { return encoded; }
int64_t switches() { return emulated::machine->switches; }

// Its control part lies first.
int64_t workspace_bytes(int64_t ranks, int64_t tokens, int64_t choices, int64_t hidden) {
  const auto w = mok::Workspace::of({.ranks = static_cast<int32_t>(ranks),
                                     .tokens = static_cast<int32_t>(tokens),
                                     .choices = static_cast<int32_t>(choices),
                                     .hidden = static_cast<int32_t>(hidden)});
  return w.bytes;
}

// Each returns why it stopped, or "".
const char* forward(int64_t ranks, const Sizes* const* sizes_P, const Buffers* const* buffers_P,
                    int64_t seed, int64_t started) {
  std::vector<Weights> kept;
  kept.reserve(ranks);
  return run(ranks, sizes_P, buffers_P, seed, started, [&](const Sizes& s, const Buffers& b) {
    kept.emplace_back(s, b.w1, b.w2, mok::Role::kUp, mok::Role::kProduct);
    if (s.ranks > 1) open_forward(s, b);
    mok::sm90::launch_forward({.routing = routing(s, b),
                               .peers = peers(s, b),
                               .sizes = sizes(s),
                               .weights = kept.back().get(),
                               .launch = launch_of(s, b),
                               .x = b.x,
                               .rows = b.x_rows,
                               .gate_up = b.gate_up,
                               .activation = b.activation,
                               .shared_gate_up = b.shared_gate_up,
                               .shared_activation = b.shared_activation,
                               .shared_y = b.shared_y,
                               .y = b.y});
  });
}

const char* backward(int64_t ranks, const Sizes* const* sizes_P, const Buffers* const* buffers_P,
                     int64_t seed, int64_t started) {
  std::vector<Weights> kept;
  kept.reserve(3 * ranks);
  return run(ranks, sizes_P, buffers_P, seed, started, [&](const Sizes& s, const Buffers& b) {
    using mok::Role;
    kept.emplace_back(s, b.w1, b.w2, Role::kInputGradient, Role::kDownGradient);
    const mok::WeightTables weights = kept.back().get();
    kept.emplace_back(s, b.d_w1, b.d_w2, Role::kGradient, Role::kGradient, s.fp32 != 0);
    const mok::WeightTables d = kept.back().get();
    kept.emplace_back(s, b.w1, b.w2, Role::kUp, Role::kProduct);
    const void* const again = kept.back().get().w1;
    mok::sm90::launch_backward(
        {.routing = s.ranks > 1 ? open_backward(s, b) : routing(s, b),
         .peers = peers(s, b),
         .sizes = sizes(s),
         .weights = weights,
         .again_w1 = s.ranks > 1 ? again : nullptr,
         .gradients = {.w1 = d.w1,
                       .w2 = d.w2,
                       .shared_w1 = d.shared_w1,
                       .shared_w2 = d.shared_w2,
                       .type = s.fp32 != 0 ? mok::Gradient::kFp32 : mok::Gradient::kBf16,
                       .accumulate = s.accumulate != 0},
         .launch = launch_of(s, b),
         .x = b.x,
         .dy = b.dy,
         .gate_up = b.gate_up,
         .shared_gate_up = b.shared_gate_up,
         .x_rows = b.x_rows,
         .dy_rows = b.dy_rows,
         .dx_rows = b.dx_rows,
         .d_gate_up = b.d_gate_up,
         .activation = b.activation,
         .parts = b.parts,
         .shared_d_gate_up = b.shared_d_gate_up,
         .shared_activation = b.shared_activation,
         .shared_dx = b.shared_dx,
         .dx = b.dx,
         .d_prob_TK = b.d_prob_TK});
  });
}
}
