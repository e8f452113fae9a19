// Calls of both directions on the host, for emulation.py.
#include "csrc/sm90/direction_launch.cuh"

namespace {

struct Sizes { // the order of emulation.py's words
  int64_t tokens, choices, experts, rows, hidden, width, shared_width;
  int64_t ctas, ahead, fp32, accumulate;
  int64_t ranks, rank, most_tokens;
};

struct Buffers { // likewise; null: not there
  int32_t *row_start, *row_count, *row_TK, *slot_R;
  float *prob_R;
  int32_t *faulty, *words;
  uint16_t *x, *dy, *y, *dx;
  uint16_t *x_rows, *dy_rows, *dx_rows, *gate_up, *activation, *d_gate_up;
  uint16_t *shared_gate_up, *shared_activation, *shared_y, *shared_d_gate_up,
      *shared_dx;
  float *parts, *d_prob_TK;
  void **w1; // [E + 1]: the last one is the shared expert's
  void **w2;
  void **d_w1;
  void **d_w2;
  uint8_t **base; // [P] of the workspaces
};

// Of matrices [rows, columns] of the routed experts, or of the shared one.
struct Table {
  struct alignas(64) Record {
    uint8_t bytes[mok::kTensorMapBytes];
  };
  std::vector<Record> records;

  Table(mok::Role role, void **matrices, int64_t first, int64_t count,
        int64_t rows, int64_t columns, bool fp32 = false)
      : records(count + 1) {
    std::vector<mok::Matrix> all;
    for (int64_t i = 0; i < count; ++i) {
      all.push_back({.data = matrices[first + i],
                     .rows = rows,
                     .columns = columns,
                     .fp32 = fp32});
    }
    if (count > 0) {
      mok::sm90::encode_table(role, 0, all.data(), static_cast<int>(count),
                              records.data());
    }
  }
  const void *get() const {
    return records.size() > 1 ? records.data() : nullptr;
  }
};

mok::Routing routing(const Sizes &s, const Buffers &b) {
  return {.row_start = b.row_start,
          .row_count = b.row_count,
          .row_TK = b.row_TK,
          .slot_R = b.slot_R,
          .prob_R = b.prob_R,
          .faulty = b.faulty,
          .tokens = static_cast<int32_t>(s.tokens),
          .choices = static_cast<int32_t>(s.choices),
          .experts = static_cast<int32_t>(s.experts),
          .rows = static_cast<int32_t>(s.rows)};
}

mok::Sizes sizes(const Sizes &s) {
  return {.hidden = static_cast<int32_t>(s.hidden),
          .width = static_cast<int32_t>(s.width),
          .shared_width = static_cast<int32_t>(s.shared_width)};
}

mok::Peers peers(const Sizes &s, const Buffers &b) {
  if (s.ranks == 1)
    return {};
  return {.base = b.base,
          .ranks = static_cast<int32_t>(s.ranks),
          .rank = static_cast<int32_t>(s.rank),
          .slots = static_cast<int32_t>(s.most_tokens * s.choices),
          .at =
              mok::Workspace::of({.ranks = static_cast<int32_t>(s.ranks),
                                  .tokens = static_cast<int32_t>(s.most_tokens),
                                  .choices = static_cast<int32_t>(s.choices),
                                  .hidden = static_cast<int32_t>(s.hidden)})};
}

// A stream for each rank.
mok::DirectionLaunch launch_of(const Sizes &s, const Buffers &b) {
  return {.words = b.words,
          .ctas = static_cast<int32_t>(s.ctas),
          .ahead = static_cast<int32_t>(s.ahead),
          .stream = reinterpret_cast<void *>(s.rank + 1)};
}

struct Weights { // tables of a direction
  Table w1, w2, shared_w1, shared_w2;

  Weights(const Sizes &s, void **of_w1, void **of_w2, mok::Role role_1,
          mok::Role role_2, bool fp32 = false)
      : w1(role_1, of_w1, 0, s.experts, 2 * s.width, s.hidden, fp32),
        w2(role_2, of_w2, 0, s.experts, s.hidden, s.width, fp32),
        shared_w1(role_1, of_w1, s.experts, shared(s), 2 * s.shared_width,
                  s.hidden, fp32),
        shared_w2(role_2, of_w2, s.experts, shared(s), s.hidden, s.shared_width,
                  fp32) {}
  static int64_t shared(const Sizes &s) { return s.shared_width > 0 ? 1 : 0; }
  mok::WeightTables get() const {
    return {w1.get(), w2.get(), shared_w1.get(), shared_w2.get()};
  }
};

std::string fault;

// call(s, b) for every rank, then all of them at once.
template <class Call>
const char *run(int64_t ranks, const Sizes *const *sizes,
                const Buffers *const *buffers, int64_t seed, int64_t started,
                Call call) {
  emulated::machine = std::make_unique<emulated::Machine>();
  emulated::machine->draw.seed(static_cast<uint64_t>(seed));
  emulated::machine->started_ctas = static_cast<int>(started);
  try {
    for (int64_t rank = 0; rank < ranks; ++rank)
      call(*sizes[rank], *buffers[rank]);
    emulated::run();
    fault = emulated::machine->fault;
  } catch (const std::exception &error) {
    fault = error.what();
  }
  return fault.c_str();
}

} // namespace

extern "C" {

int64_t words(const Sizes *s) {
  return mok::direction_words(s->rows, s->tokens, s->experts);
}
void plant(int fault) { emulated::planted = fault; }
int64_t switches() { return emulated::machine->switches; }

// Bytes of a workspace, and where control, x, dy, arrived and home lie.
void workspace(int64_t ranks, int64_t tokens, int64_t choices, int64_t hidden,
               int64_t (&at)[8]) {
  const auto w = mok::Workspace::of({.ranks = static_cast<int32_t>(ranks),
                                     .tokens = static_cast<int32_t>(tokens),
                                     .choices = static_cast<int32_t>(choices),
                                     .hidden = static_cast<int32_t>(hidden)});
  const int64_t found[8] = {w.bytes, w.control, w.x[0],    w.x[1],
                            w.dy[0], w.dy[1],   w.arrived, w.home};
  std::copy_n(found, 8, at);
}

// Each returns why it stopped, or "".
const char *forward(int64_t ranks, const Sizes *const *sizes_P,
                    const Buffers *const *buffers_P, int64_t seed,
                    int64_t started) {
  std::vector<Weights> kept;
  kept.reserve(ranks);
  return run(
      ranks, sizes_P, buffers_P, seed, started,
      [&](const Sizes &s, const Buffers &b) {
        kept.emplace_back(s, b.w1, b.w2, mok::Role::kUp, mok::Role::kProduct);
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

const char *backward(int64_t ranks, const Sizes *const *sizes_P,
                     const Buffers *const *buffers_P, int64_t seed,
                     int64_t started) {
  std::vector<Weights> kept;
  kept.reserve(2 * ranks);
  return run(ranks, sizes_P, buffers_P, seed, started,
             [&](const Sizes &s, const Buffers &b) {
               using mok::Role;
               kept.emplace_back(s, b.w1, b.w2, Role::kInputGradient,
                                 Role::kDownGradient);
               const mok::WeightTables weights = kept.back().get();
               kept.emplace_back(s, b.d_w1, b.d_w2, Role::kGradient,
                                 Role::kGradient, s.fp32 != 0);
               const mok::WeightTables d = kept.back().get();
               mok::sm90::launch_backward(
                   {.routing = routing(s, b),
                    .peers = peers(s, b),
                    .sizes = sizes(s),
                    .weights = weights,
                    .gradients = {.w1 = d.w1,
                                  .w2 = d.w2,
                                  .shared_w1 = d.shared_w1,
                                  .shared_w2 = d.shared_w2,
                                  .type = s.fp32 != 0 ? mok::Gradient::kFp32
                                                      : mok::Gradient::kBf16,
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
