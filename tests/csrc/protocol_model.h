// The protocol between ranks (csrc/workspace.h) and inside a grid
// (csrc/sm90/direction.cuh) as small state machines over the kernels' own
// planner: epochs, generations, segments, tickets and tiles come from the
// headers that the kernels compile.
//
// A state is a vector of words; an agent is one thread of work that can take
// one step, or cannot. Rank: publish, a sender and a watcher for each peer,
// gather, then a grid of CTAs, each a mover (warp), load, multiply and store. A
// CTA runs when it has a slot: with fewer slots than CTAs the others start when
// one leaves.
//
// Memory. A shared cell holds the epoch of what was written to it, and whether
// its writer has made that visible. A store that is issued but not behind its
// writer's fence (a bulk store: its completion) may have drained or not, before
// or after any other: so a cell is unreadable from the store to the fence,
// whatever the order, and reading it is a fault, as is reading another call's
// bytes. Signals are single words and seen at once; a late one is a watcher
// that runs late.
//
// Laps. The rows of a rank beyond its buffers take them in turn, a block of the
// schedule at a time: each part of a buffer's block holds the number of whose
// bytes were last written there, and who reads another's is at fault, when it
// begins to read and when it ends.
//
// What must hold: no agent is left blocked; a cell is read only while it holds
// this call's bytes, and a buffer only while it holds the reader's rows;
// products and pushes start after what they read is there; each token is
// combined once; after one rank's limit has passed, no other waits out its own.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "../../csrc/device/plan.cuh"
#include "../../csrc/workspace.h"

namespace protocol {

using Word = uint16_t;

// Faults planted into the state machines. Those of the planner are edits of its
// headers.
enum Seed : int {
  kSound,
  kNoStartWait,     // gather goes on without its peers
  kDroppedStart,    // the last rank gets no start
  kEarlyStart,      // start is sent before what it announces is visible
  kOneGeneration,   // x and choices are overwritten by the next call
  kWrongGeneration, // gather looks at the other generation's starts
  kAnyArrival,      // combine takes an arrival of any call
  kDroppedArrival,  // the last row of a push is not announced
  kEarlyArrival,    // a row is announced before it has arrived
  kPushEarly,       // a push does not wait for its tiles
  kPushFirst,     // an expert's rows go home before the next one's are brought
  kUnsettled,     // a mover waits for tiles while rows it has brought are not
                  // announced
  kOwedAnnounce,  // store announces a tile when it has the next
  kEarlyReady,    // rows are announced when their copy is issued
  kEarlyDone,     // a tile is announced before it is in memory
  kOwnedTiles,    // CTA c has tickets c, c + ctas, ... instead of the next
  kGridBarrier,   // combine waits until all CTAs run
  kTornTicket,    // two CTAs may get one ticket
  kStaleCounters, // done1 keeps what the last call left
  kFrozenEpoch,   // a call has the epoch of the one before
  kSwappedWait,   // pass 1 waits for the rows, not for pass 0
  kNoSums, // backward pushes without waiting for the probability's gradient
  kNoRows, // the last weight gradient does not wait for the rows that only it
           // reads
  kUncheckedStart, // gather does not compare the starts
  kNoDeadline,     // gather waits without a deadline
  kAbortNotTold,   // a rank that expires tells nobody
  kAbortNotPolled, // combine does not look whether it has been told
  kNoLapWait,      // rows are brought without waiting for the lap before
  kNoWeightTiles,  // a lap is over when its rows are home
  kNoHomeRows,     // a lap is over when its weight tiles are made
  kNoSecondRows,   // a lap's rows under way that no tile reads are not counted
  kStay,           // with laps, too, the own tokens' rows stay where they are
  kOwnLapDone,     // moves wait for their own lap
  kOneSource,      // what is done again waits for the rows of one source
  kNoAgain,        // pass 0 of a later lap does not wait for what is done again
  kFirstPass, // a later lap's last weight gradient waits as the first lap's
              // does
  kSeeds,
};

struct Call { // what a rank brings; equal on all ranks but tokens and choices
  int layer = 0;
  bool backward = false;
  bool spoiled =
      false; // a choice is faulty: combine writes NaN and waits for nothing
  std::vector<int> tokens;              // [P]
  std::vector<std::vector<int>> choice; // [P][T · K] expert, -1: none
};

struct Setup {
  int ranks = 2, local = 1, choices = 1, most = 1; // most: Tmax
  int ctas = 1, slots = 1;
  int depth = 1, held = 0; // moves whose copies a mover has under way; tickets
                           // it has for later
  int movers = 1 << 8;     // CTAs that move rows
  int n0 = 1, n1 = 1, again = 1, ahead = 1, token_tile = 1;
  int kept = 1 << 8, capacity = 1 << 8; // row blocks that the first lap holds,
                                        // and a later one
  bool shared = false;
  bool frozen = false;     // nobody wants the experts' weight gradients
  bool keep_empty = false; // experts without rows have weight tiles
  uint32_t epoch = 0;      // of the workspace before the first call
  std::vector<Call> calls;
  std::vector<std::vector<int>> order; // [P] the calls that a rank makes
  int dies = -1;                       // this rank stops somewhere
  bool may_expire = false;             // waits may end by their deadlines
  int seed = kSound;
};

// One rank's work in one call, from the headers.
struct Work {
  struct Row {
    int at, rank, slot;
  };
  bool refused = false;
  std::vector<int32_t> start, count, first;
  mok::PlanShape shape{};
  std::vector<mok::Lap> laps;
  std::vector<mok::Tile> tiles;
  std::vector<Row> rows;    // in schedule order
  std::vector<int> brought; // [block] rows
  struct Move {
    int source, block, expert; // source: kHome of rows that go home
    int lap, groups;           // groups: that the lap counts
    std::vector<int> rows;     // of them, those that there are
  };
  // By ticket, without those of no row; but a lap that another waits for counts
  // its groups to send home, whether or not there are rows in them.
  std::vector<Move> moves;
  struct Piece {
    bool here;
    int at; // block here, or slot
  };
  std::vector<std::vector<Piece>> pieces; // [token]

  int blocks() const { return static_cast<int>(brought.size()); }
  bool several_laps() const { return laps.size() > 2; }
  int lap_of(int block) const {
    int lap = 0;
    while (laps[lap + 1].row <= block * mok::kRowTile)
      ++lap;
    return lap;
  }
  int buffer(int block) const { // where its rows lie
    return block - laps[lap_of(block)].row / mok::kRowTile;
  }
};

constexpr int kHome = 2;

// Of each lap, tickets of rows to bring, then of rows to send home. mixed: an
// expert's go home after its own.
inline void set_moves(Work &w, int sources, int rank, int ranks, bool mixed,
                      bool stay) {
  int lap = 0;
  const auto add = [&](int source, int first, int count) {
    const bool counts = source == kHome && lap + 2u < w.laps.size();
    Work::Move move{source, first / mok::kRowTile, 0, lap, counts, {}};
    for (int i = 0; i < static_cast<int>(w.rows.size()); ++i) {
      const bool wanted = source != kHome || w.rows[i].rank != rank ||
                          (w.several_laps() && !stay);
      if (wanted && w.rows[i].at >= first && w.rows[i].at < first + count)
        move.rows.push_back(i);
    }
    while (w.start[move.expert + 1] <= first)
      ++move.expert;
    if (move.rows.empty() && counts && !w.moves.empty() &&
        w.moves.back().rows.empty() && w.moves.back().expert == move.expert)
      ++w.moves.back().groups; // one after the other they wait for nothing
    else if (!move.rows.empty() || counts)
      w.moves.push_back(move);
  };
  const auto row_of = [&](int group, int rows) {
    const int ticket = group + w.laps[lap].row / rows;
    int expert = 0;
    while (w.start[expert + 1] <= ticket * rows)
      ++expert;
    const int first = w.start[expert] / rows;
    const mok::Turns turns = mok::Turns::of(ranks, rank, mok::kRowTile / rows);
    return (first +
            turns.at(ticket - first, w.start[expert + 1] / rows - first)) *
           rows;
  };
  for (; lap + 1u < w.laps.size(); ++lap) {
    const mok::MoveOrder order =
        mok::MoveOrder::of(w.shape, sources, w.laps.data(), lap);
    for (int ticket = 0; ticket < order.count(); ++ticket) {
      const mok::Move move = order.at(ticket);
      add(move.source, row_of(move.group, mok::kMoveRows), mok::kMoveRows);
    }
    for (int push = 0; push < order.pushes; ++push)
      add(kHome, row_of(push, mok::kPushRows), mok::kPushRows);
  }
  const auto before = [](const Work::Move &a, const Work::Move &b) {
    return a.expert < b.expert;
  };
  if (mixed)
    std::stable_sort(w.moves.begin(), w.moves.end(), before);
}

inline Work work_of(const Setup &s, const Call &call, int rank, bool refused) {
  Work w;
  w.refused = refused;
  w.start = {0};
  w.pieces.resize(refused && call.tokens[rank] > s.most ? 0
                                                        : call.tokens[rank]);
  for (int e = rank * s.local; e < (rank + 1) * s.local; ++e) {
    const int first = w.start.back();
    int rows = 0;
    for (int p = 0; p < s.ranks && !refused; ++p) {
      for (int i = 0; i < call.tokens[p] * s.choices; ++i) {
        if (call.choice[p][i] != e)
          continue;
        w.rows.push_back({first + rows, p, i});
        ++rows;
      }
    }
    w.count.push_back(rows);
    w.start.push_back(first +
                      mok::tiles_of(rows, mok::kRowTile) * mok::kRowTile);
  }
  const int blocks = w.start.back() / mok::kRowTile;
  w.brought.resize(blocks);
  for (const Work::Row &row : w.rows)
    ++w.brought[row.at / mok::kRowTile];
  const bool stay = blocks <= s.kept || s.seed == kStay;
  for (int t = 0; t < static_cast<int>(w.pieces.size()) && !refused; ++t) {
    for (int k = 0; k < s.choices; ++k) {
      const int slot = t * s.choices + k, expert = call.choice[rank][slot];
      if (expert < 0)
        continue;
      if (expert / s.local != rank || !stay) {
        w.pieces[t].push_back({false, slot});
        continue;
      }
      for (const Work::Row &row : w.rows)
        if (row.rank == rank && row.slot == slot)
          w.pieces[t].push_back({true, row.at / mok::kRowTile});
    }
  }
  mok::PlanShape &shape = w.shape;
  shape.passes = call.backward ? 4 : 2;
  shape.experts = s.local;
  shape.ahead = s.ahead;
  shape.tokens = static_cast<int>(w.pieces.size());
  shape.combine_tiles = mok::tiles_of(shape.tokens, s.token_tile);
  shape.start = w.start.data();
  shape.count = w.count.data();
  shape.kept = s.kept * mok::kRowTile;
  shape.capacity = s.capacity * mok::kRowTile;
  shape.most = s.local * mok::kRowTile;
  shape.laps = mok::most_laps(shape.most, shape.kept, shape.capacity);
  shape.keep_empty = s.keep_empty;
  if (call.backward && s.ranks > 1)
    shape.again = {0, s.again, 1};
  for (mok::PassShape *pass : {shape.routed, shape.shared}) {
    if (pass == shape.shared && !s.shared)
      break;
    pass[0] = {0, s.n0, 1};
    pass[1] = {0, s.n1, 1};
    if (call.backward && !(s.frozen && pass == shape.routed))
      pass[2] = pass[3] = {1, 1, 0};
  }
  w.laps.resize(shape.laps + 1);
  const int32_t lap_count = mok::find_laps(shape, w.laps.data());
  w.laps.resize(lap_count + 1);
  set_moves(w, call.backward ? 2 : 1, rank, s.ranks, s.seed == kPushFirst,
            s.seed == kStay);
  std::vector<mok::Segment> segments(w.laps[lap_count].segment);
  w.first.resize(segments.size() + 4);
  for (int i = 0; i < static_cast<int>(segments.size()); ++i) {
    segments[i] = mok::segment_at(shape, w.laps.data(), i);
    w.first[i + 1] = w.first[i] + mok::segment_tiles(shape, segments[i]);
  }
  const mok::Plan plan{shape, w.first.data(), segments.data(), w.laps.data(),
                       &lap_count};
  mok::PlanWalker walker;
  for (int ticket = 0; ticket < plan.count(); ++ticket) {
    mok::Tile tile = mok::no_tile();
    while (!walker.find(plan, ticket, tile)) {
    }
    w.tiles.push_back(tile);
  }
  return w;
}

} // namespace protocol
