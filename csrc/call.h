// What a call of the layer's ops is made of: room for its buffers, the schedule's parts, and, where
// ranks share the experts, their group and how a call of theirs opens.
//
// Of the border to torch, like tensor_checks.h.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <optional>
#include <vector>

#include "arguments.h"
#include "direction_arguments.h"
#include "exchange_arguments.h"
#include "tensor_checks.h"

namespace mok::border {

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
inline T* inside(const Tensor& room, int64_t offset) {
  return reinterpret_cast<T*>(static_cast<char*>(room.mutable_data_ptr()) + offset);
}

// The group of a call: numbers are rank, Tmax, R, layer, the hash of what must be the same on all
// ranks, how many seconds a rank waits for the others' calls, and how many CTAs move rows (0: all).
// Without them: one rank.
struct Group {
  int64_t ranks = 1, rank = 0, tokens = 0, rows = 0, layer = 0, settings = 0, patience = 0;
  int64_t movers = 0;
  uint8_t* const* base = nullptr;

  static Group of(const std::optional<Tensor>& bases, const std::vector<int64_t>& numbers) {
    if (!bases) return {};
    check_tensor(*bases, "bases", ScalarType::Long, {-1}, 8);
    STD_TORCH_CHECK(
        numbers.size() == 7,
        "mok: a group must have 7 numbers (rank, tokens, rows, layer, settings, patience, movers), "
        "got ",
        numbers.size());
    const Group g{.ranks = bases->size(0),
                  .rank = numbers[0],
                  .tokens = numbers[1],
                  .rows = numbers[2],
                  .layer = numbers[3],
                  .settings = numbers[4],
                  .patience = numbers[5],
                  .movers = numbers[6],
                  .base = static_cast<uint8_t* const*>(bases->const_data_ptr())};
    STD_TORCH_CHECK(g.ranks > 1 && g.ranks <= mok::kMaxRanks,
                    "mok: a group must have 2 to ",
                    mok::kMaxRanks,
                    " ranks, got ",
                    g.ranks,
                    "; use --mok-backend reference");
    STD_TORCH_CHECK(
        g.rank >= 0 && g.rank < g.ranks, "mok: rank must be in [0, ", g.ranks, "), got ", g.rank);
    STD_TORCH_CHECK(g.tokens > 0 && g.tokens <= INT32_MAX,
                    "mok: the most tokens of a rank must be positive, got ",
                    g.tokens);
    STD_TORCH_CHECK(g.rows > 0 && g.rows % 128 == 0 && g.rows <= INT32_MAX,
                    "mok: the rows of a rank must be a positive multiple of 128, got ",
                    g.rows);
    STD_TORCH_CHECK(g.patience > 0 && g.patience <= INT32_MAX,
                    "mok: ranks must wait for each other at least a second, got ",
                    g.patience);
    STD_TORCH_CHECK(g.movers >= 0 && g.movers <= 65535,
                    "mok: movers must be 0 (all CTAs) to 65535, got ",
                    g.movers,
                    "; set --mok-movers");
    return g;
  }

  bool several() const { return ranks > 1; }
  int64_t slots(int64_t choices) const {  // of all ranks
    const int64_t all = ranks * tokens * choices;
    STD_TORCH_CHECK(all <= INT32_MAX / 2,
                    "mok: ranks x tokens x choices must be at most ",
                    INT32_MAX / 2,
                    ", got ",
                    all,
                    "; lower --mok-max-tokens");
    return all;
  }
  mok::Peers peers(int64_t choices, int64_t hidden) const {
    if (!several()) return {};
    return {.base = base,
            .ranks = static_cast<int32_t>(ranks),
            .rank = static_cast<int32_t>(rank),
            .slots = static_cast<int32_t>(tokens * choices),
            .at = mok::Workspace::of({.ranks = static_cast<int32_t>(ranks),
                                      .tokens = static_cast<int32_t>(tokens),
                                      .choices = static_cast<int32_t>(choices),
                                      .hidden = static_cast<int32_t>(hidden)})};
  }
};

// R: rows for any routing of `slots` choices, each expert's starting at a row tile.
inline int64_t capacity(int64_t slots, int64_t experts) {
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
  int64_t most = {};  // rows of any routing
  int64_t row_start = {}, row_count = {}, shared_start = {}, shared_count = {};
  int64_t faulty = {}, census = {}, row = {}, slot = {}, prob = {}, epoch = {}, bytes = {};

  // Of several ranks: the own tokens, the own experts, R, and the most tokens of all ranks; the
  // last two are 0 for one rank, whose R is room for any routing.
  static Schedule of(int64_t tokens, int64_t choices, int64_t experts, int64_t rows = 0,
                     int64_t all_tokens = 0) {
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
    STD_TORCH_CHECK(tokens > 0 || rows > 0, "mok: a layer's kernel needs tokens, got none");
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
    Schedule s{.tokens = tokens,
               .choices = choices,
               .experts = experts,
               .rows = rows > 0 ? rows : capacity(slots, experts)};
    s.most =
        rows > 0 ? capacity(all_tokens * (choices < experts ? choices : experts), experts) : s.rows;
    STD_TORCH_CHECK(s.most / s.rows < kMostLaps,
                    "mok: rows of any routing must be fewer than ",
                    kMostLaps,
                    " times what buffers hold, got ",
                    s.most,
                    " and ",
                    s.rows,
                    "; raise --mok-row-budget");
    s.row_start = room.take_words(experts + 1);
    s.row_count = room.take_words(experts);
    s.shared_start = room.take_words(2);
    s.shared_count = room.take_words(1);
    s.faulty = room.take_words(1);
    s.census = room.take(sizeof(mok::Census));
    s.row = room.take_words(slots);
    s.slot = room.take_words(s.most);
    s.prob = room.take_words(s.most);
    if (rows > 0) s.epoch = room.take_words(1);
    s.bytes = room.bytes();
    return s;
  }

  static int64_t chunks(int64_t slots) { return (slots + mok::kChunk - 1) / mok::kChunk; }
  static int64_t counts(int64_t slots, int64_t experts) {
    return (chunks(slots) + 1) * (experts + 1);
  }

  // schedule: a tensor that starts with it.
  mok::Routing routing(const Tensor& schedule) const {
    return {.row_start = inside<int32_t>(schedule, row_start),
            .row_count = inside<int32_t>(schedule, row_count),
            .row_TK = inside<int32_t>(schedule, row),
            .slot_R = inside<int32_t>(schedule, slot),
            .prob_R = inside<float>(schedule, prob),
            .faulty = inside<int32_t>(schedule, faulty),
            .census = inside<mok::Census>(schedule, census),
            .tokens = static_cast<int32_t>(tokens),
            .choices = static_cast<int32_t>(choices),
            .experts = static_cast<int32_t>(experts),
            .rows = static_cast<int32_t>(rows),
            .most = static_cast<int32_t>(most)};
  }

  int64_t words() const { return mok::direction_words(rows, most, tokens, experts); }

  static constexpr int64_t kMostLaps = 120;  // half of what a tile's byte can count
};

inline Schedule check_choices(const Tensor& expert, const Tensor& prob, int64_t experts,
                              const Group& g = {}) {
  check_tensor(expert, "expert", ScalarType::Int, {-1, -1});
  const Schedule s =
      Schedule::of(expert.size(0), expert.size(1), experts, g.rows, g.ranks * g.tokens);
  check_tensor(prob, "prob", ScalarType::Float, {s.tokens, s.choices});
  return s;
}

// Of `slots` choices among `experts`; counts: Schedule::counts() words.
inline mok::RouteArguments route_arguments(const Schedule& s, const Tensor& schedule,
                                           const int32_t* expert, const float* prob, int64_t slots,
                                           int64_t experts, int32_t* counts, void* stream,
                                           int32_t rank_tokens = 0) {
  return {.expert_TK = expert,
          .prob_TK = prob,
          .tokens = static_cast<int32_t>(slots / s.choices),
          .choices = static_cast<int32_t>(s.choices),
          .experts = static_cast<int32_t>(experts),
          .chunks = static_cast<int32_t>(Schedule::chunks(slots)),
          .counts = counts,
          .row_start = inside<int32_t>(schedule, s.row_start),
          .row_count = inside<int32_t>(schedule, s.row_count),
          .shared_start = inside<int32_t>(schedule, s.shared_start),
          .shared_count = inside<int32_t>(schedule, s.shared_count),
          .faulty = inside<int32_t>(schedule, s.faulty),
          .row_TK = inside<int32_t>(schedule, s.row),
          .slot_R = inside<int32_t>(schedule, s.slot),
          .prob_R = inside<float>(schedule, s.prob),
          .census = inside<mok::Census>(schedule, s.census),
          .fault = mok::route_fault_record(),
          .stream = stream,
          .rank_tokens = rank_tokens};
}

inline Tensor new_schedule(const Schedule& s, const Tensor& like) {
  return new_tensor(like, {s.bytes}, ScalarType::Byte);
}

// Offsets of what the opening of a call of several ranks needs meanwhile.
struct Opening {
  int64_t counts = 0, expert = 0, prob = 0, refused = 0;  // forward
  int64_t start = 0, count = 0, faulty = 0;               // backward

  static Opening forward(Room& room, const Group& g, const Schedule& s) {
    const int64_t slots = g.slots(s.choices);
    Opening at{};
    at.counts = room.take_words(Schedule::counts(slots, g.ranks * s.experts));
    at.expert = room.take_words(slots);
    at.prob = room.take_words(slots);
    at.refused = room.take_words(1);
    return at;
  }
  static Opening backward(Room& room, const Schedule& s) {
    Opening at{};
    at.start = room.take_words(s.experts + 1);
    at.count = room.take_words(s.experts);
    at.faulty = room.take_words(1);
    return at;
  }
};

inline int ctas_of(const mok::DirectionLaunch& launch) {
  return launch.ctas > 0 ? launch.ctas : mok::sm90::sm_count(launch.device);
}

inline mok::Start start_of(const Group& g, const Schedule& s, mok::CallDirection direction) {
  return {.epoch = 0,
          .layer = static_cast<int32_t>(g.layer),
          .direction = static_cast<int32_t>(direction),
          .forward = 0,
          .rows = static_cast<int32_t>(s.rows),
          .tokens = static_cast<int32_t>(s.tokens),
          .settings = static_cast<uint64_t>(g.settings)};
}

// Publishes x and the choices, gathers those of all ranks, and writes the schedule.
inline void open_forward(const Group& g, const Schedule& s, const Opening& o,
                         const mok::DirectionLaunch& launch, const mok::Peers& peers,
                         const Tensor& x, const Tensor& expert, const Tensor& prob,
                         const Tensor& scratch, const Tensor& schedule) {
  const int ctas = ctas_of(launch);
  const auto choices = static_cast<int32_t>(s.choices), limit = static_cast<int32_t>(g.tokens);
  mok::launch_publish({.peers = peers,
                       .start = start_of(g, s, mok::CallDirection::kForward),
                       .forward = nullptr,
                       .x = x.const_data_ptr(),
                       .dy = nullptr,
                       .expert_TK = expert.const_data_ptr<int32_t>(),
                       .prob_TK = prob.const_data_ptr<float>(),
                       .choices = choices,
                       .hidden = static_cast<int32_t>(x.size(1)),
                       .limit = limit,
                       .ctas = ctas,
                       .stream = launch.stream});
  int32_t* const refused = inside<int32_t>(scratch, o.refused);
  mok::launch_gather({.peers = peers,
                      .choices = choices,
                      .limit = limit,
                      .expert = inside<int32_t>(scratch, o.expert),
                      .prob = inside<float>(scratch, o.prob),
                      .epoch = inside<uint32_t>(schedule, s.epoch),
                      .refused = refused,
                      .experts = static_cast<int32_t>(s.experts),
                      .start = nullptr,
                      .count = nullptr,
                      .faulty = nullptr,
                      .admitted_start = nullptr,
                      .admitted_count = nullptr,
                      .admitted_faulty = nullptr,
                      .patience_ns = g.patience * kNanosecondsPerSecond,
                      .record = mok::exchange_fault_record(),
                      .fault = mok::fault_record(),
                      .ctas = ctas,
                      .stream = launch.stream});
  mok::launch_view({.route = route_arguments(s,
                                             schedule,
                                             inside<int32_t>(scratch, o.expert),
                                             inside<float>(scratch, o.prob),
                                             g.slots(s.choices),
                                             g.ranks * s.experts,
                                             inside<int32_t>(scratch, o.counts),
                                             launch.stream,
                                             limit),
                    .peers = peers,
                    .tokens = static_cast<int32_t>(s.tokens),
                    .rows = static_cast<int32_t>(s.rows),
                    .refused = refused,
                    .record = mok::exchange_fault_record()});
}

// Publishes x and dy; the routing that the grid takes: forward's, or one without rows.
inline mok::Routing open_backward(const Group& g, const Schedule& s, const Opening& o,
                                  const mok::DirectionLaunch& launch, const mok::Peers& peers,
                                  const Tensor& x, const Tensor& dy, const Tensor& scratch,
                                  const Tensor& schedule) {
  const int ctas = ctas_of(launch);
  const auto choices = static_cast<int32_t>(s.choices), limit = static_cast<int32_t>(g.tokens);
  mok::launch_publish({.peers = peers,
                       .start = start_of(g, s, mok::CallDirection::kBackward),
                       .forward = inside<uint32_t>(schedule, s.epoch),
                       .x = x.const_data_ptr(),
                       .dy = dy.const_data_ptr(),
                       .expert_TK = nullptr,
                       .prob_TK = nullptr,
                       .choices = choices,
                       .hidden = static_cast<int32_t>(x.size(1)),
                       .limit = limit,
                       .ctas = ctas,
                       .stream = launch.stream});
  mok::Routing routing = s.routing(schedule);
  mok::launch_gather({.peers = peers,
                      .choices = choices,
                      .limit = limit,
                      .expert = nullptr,
                      .prob = nullptr,
                      .epoch = nullptr,
                      .refused = nullptr,
                      .experts = static_cast<int32_t>(s.experts),
                      .start = routing.row_start,
                      .count = routing.row_count,
                      .faulty = routing.faulty,
                      .admitted_start = inside<int32_t>(scratch, o.start),
                      .admitted_count = inside<int32_t>(scratch, o.count),
                      .admitted_faulty = inside<int32_t>(scratch, o.faulty),
                      .patience_ns = g.patience * kNanosecondsPerSecond,
                      .record = mok::exchange_fault_record(),
                      .fault = mok::fault_record(),
                      .ctas = ctas,
                      .stream = launch.stream});
  routing.row_start = inside<int32_t>(scratch, o.start);
  routing.row_count = inside<int32_t>(scratch, o.count);
  routing.faulty = inside<int32_t>(scratch, o.faulty);
  return routing;
}

// Publishes that this rank makes no call, and meets the others.
inline void open_refused(const Group& g, int64_t direction, int64_t choices, int64_t hidden,
                         void* stream) {
  const mok::Peers peers = g.peers(choices, hidden);
  mok::Start start =
      start_of(g, {.tokens = -1, .rows = g.rows}, static_cast<mok::CallDirection>(direction));
  const auto limit = static_cast<int32_t>(g.tokens);
  mok::PublishArguments publish{};
  publish.peers = peers;
  publish.start = start;
  publish.limit = limit;
  publish.ctas = 1;
  publish.stream = stream;
  mok::launch_publish(publish);
  mok::GatherArguments gather{};
  gather.peers = peers;
  gather.limit = limit;
  gather.patience_ns = g.patience * kNanosecondsPerSecond;
  gather.record = nullptr;  // the caller has an error of its own to raise
  gather.fault = mok::fault_record();
  gather.ctas = 1;
  gather.stream = stream;
  mok::launch_gather(gather);
}

}  // namespace mok::border
