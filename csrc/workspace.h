// The workspace of a rank, and the protocol between the ranks of an expert parallel group.
//
// Every rank has one workspace of the same layout in symmetric memory, shared by all layers of one
// shape, zeroed before the first call and never by a call. A device table holds the addresses of
// all of them, the own one included, in rank order. No part is written by anybody whom this page
// does not name. Offsets are bytes; host code only computes them, kernels get the record.
//
// Letters: P ranks, T tokens of a call on a rank, Tmax the most it may be, K choices, H hidden,
// N = Tmax · K slots, n a call's epoch, g = n & 1 its generation.
//
//   part         form                  written by            read by
//   control      Control               the own rank, and   the own rank
//                                      abort: any rank
//                (device/wire.cuh keeps a Wire behind it, in a build for measurements alone)
//   start[g]     Start [P]             rank p its own entry  the own rank's gather
//   expert[g]    int32 [Tmax, K]       the own publish       every rank's gather (forward)
//   prob[g]      fp32 [Tmax, K]        the own publish       every rank's gather (forward)
//   x[g], dy[g]  bf16 [Tmax, H]        the own publish       movers of every rank's grid
//   home         bf16 [Tmax, K, H]     movers of the rank that had the row; the own combine
//   arrived      Arrival [Tmax, K]     the same, after home                ; the own combine
//
// A call, on every rank, all of it on the caller's stream:
//   publish  n = next(control.epoch); writes expert, prob and x (backward: x and dy) of generation
//            g; its last CTA: control.epoch = n, fence.sys, then, for every rank p,
//            start[g][own rank] at p, its epoch last (st.release.sys)
//   gather   waits until start[g][p].epoch == n for all p (ld.acquire.sys); compares all entries
//            with most ranks', so that all find the same fault; copies expert and prob of all
//   route    over P · Tmax tokens and all experts: every rank knows the whole schedule, and keeps
//            its experts' rows and its tokens' slots; an expert over budget: a fault, the same on
//            all
//   grid     movers pull rows of x (dy) from their ranks, tell `ready`; once a block's rows are
//            done (`done1`, and `sums` in backward), push each row whose token is another rank's:
//            home[slot] there, wait until it has arrived, fence.sys, arrived[slot] there =
//            {n, gradient of prob} (st.relaxed.sys, 8 bytes at once). Where the rows of a rank do
//            not fit at once, all go home, to its own tokens too. combine reads a row of the
//            own experts where it lies after done1, another in home after arrived[slot].epoch == n
//            (ld.acquire.sys)
// After a fault that gather or route finds there are no rows, hence no pulls, pushes or waits; the
// results are NaN on all ranks.
//
// Why it is sound. "After" is causality through the signals and each rank's stream.
// (1) start(n) of rank p comes after p's grid(n - 1), all of it. So whoever has passed gather(n)
//     comes after all of grid(n - 1) of all ranks.
// (2) x, dy, expert, prob of call n are overwritten by publish(n + 2), after the own gather(n + 1),
//     hence after grid(n) of all ranks, which read them. One generation would not do: publish(n +
//     1) waits for nobody while others may be in grid(n).
// (3) start[g][p] of call n is overwritten by p's publish(n + 2), after p's gather(n + 1), hence
//     after the own start(n + 1), which comes after the own gather(n), which has read it. So the
//     epoch that gather waits for cannot be passed over, and == suffices.
// (4) home and arrived of call n + 1 are written by grids after gather(n + 1), hence after the own
//     grid(n), which has read those of call n. One generation suffices.
// (5) A slot's arrival is written once a call, with the call's epoch: nothing needs to be zeroed,
//     and what an earlier call has left is another number. Epochs go round after 2^32 - 1 calls and
//     are never 0, what a workspace starts with. (A slot unused for exactly a whole round would be
//     taken for arrived: 136 years at a call a second.)
// (6) Progress: publish waits for nobody. gather waits for the others' publish, which only their
//     streams hold back. Pulls wait for nothing, those of a later lap for the own grid's tiles and
//     pushes of the laps before; tiles for pulls and earlier tiles; pushes for tiles, and every
//     mover takes all pulls of a lap before its first push, so that a waiting push holds back no
//     pull that its tiles need; combine, the last work of a CTA, for tiles and the pushes of all
//     ranks. No wait of any rank's pulls, tiles and pushes is for another rank's grid: so
//     each grid pushes all its rows with any non-empty set of its CTAs running, and then all
//     combines end.
// (7) Proxies: pulls read by bulk copies what generic stores have written: the mover fences
//     (fence.proxy.async) after gather's acquire, before its first pull, after each lap_done, and
//     after each done1, before its push. Pushes are bulk stores: their thread waits for their
//     completion (wait_group 0, not .read) before the fence.sys.
//
// The host, once for each group and shape: torch.ops.mok_megatron.workspace_parts(P, Tmax, K, H)
// -> [bytes, control, start x 2, expert x 2, prob x 2, x x 2, dy x 2, arrived, home]; allocates
// `bytes` in symmetric memory, writes zeros, makes the table int64 [P] of base addresses on its
// device, loads all kernels; then a host barrier of all ranks, and only then a first call. A freed
// workspace has the same barrier before it: no rank may still push.
#pragma once

#include <cstddef>
#include <cstdint>

#include "device/schedule.cuh"  // MOK_HOST_DEVICE

namespace mok {

constexpr int kMaxRanks = 256;  // a thread of gather each
constexpr int kGenerations = 2;

enum class CallDirection : int32_t { kForward = 1, kBackward = 2 };

// The first signal of a call: 32 bytes, `epoch` written last. All fields but tokens are the same on
// all ranks, or the call is a fault.
struct Start {
  uint32_t epoch;
  int32_t layer;
  int32_t direction;  // CallDirection
  uint32_t forward;   // backward: the epoch of its forward; else 0
  int32_t rows;       // budget: what each rank's row buffers hold
  int32_t tokens;     // T of the rank that sends it; above Tmax, or below 0, when the rank cannot
                      // make the call: a fault, nothing is published
  uint64_t settings;  // hash of shape, flags and build
};
static_assert(sizeof(Start) == 32);

// What a rank waits for of others, where nothing hides it.
enum Wait : int {
  kWaitStart,  // gather: their calls
  kWaitRows,   // load: rows for its next tile
  kWaitHome,   // combine: rows that come home
  kWaits,
};

struct Control {
  uint32_t epoch;                          // of the last call that was published
  uint32_t published;                      // CTAs of publish that are done; 0 between calls
  uint32_t abort;                          // not 0: who has stopped, and why (check.h); it stays
  alignas(16) uint64_t waited_ns[kWaits];  // of all calls; in a grid the mean of its CTAs' roles
};
static_assert(offsetof(Control, waited_ns) == 16);  // mok_megatron/backends/ranks.py

struct Arrival {  // written and read as one word of 8 bytes
  uint32_t epoch;
  float d_prob;  // backward
};
static_assert(sizeof(Arrival) == 8);

MOK_HOST_DEVICE uint32_t next_epoch(uint32_t epoch) {  // odd and even in turn, never 0
  return epoch + 1 != 0 ? epoch + 1 : 2;
}

struct WorkspaceShape {
  int32_t ranks;    // P
  int32_t tokens;   // Tmax
  int32_t choices;  // K
  int32_t hidden;   // H
};

// Where the parts of a workspace start, in bytes, each at a multiple of 512.
struct Workspace {
  int64_t control;
  int64_t start[kGenerations], expert[kGenerations], prob[kGenerations];
  int64_t x[kGenerations], dy[kGenerations];
  int64_t arrived, home;
  int64_t bytes;  // of all

  static Workspace of(const WorkspaceShape& s) {
    const int64_t slots = static_cast<int64_t>(s.tokens) * s.choices;
    const int64_t row = 2 * static_cast<int64_t>(s.hidden);
    Workspace w{};
    const auto take = [&w](int64_t size) {
      const int64_t at = w.bytes;
      w.bytes += (size + 511) / 512 * 512;
      return at;
    };
    w.control = take(sizeof(Control));
    for (int64_t& at : w.start) at = take(static_cast<int64_t>(sizeof(Start)) * s.ranks);
    for (int64_t& at : w.expert) at = take(4 * slots);
    for (int64_t& at : w.prob) at = take(4 * slots);
    w.arrived = take(static_cast<int64_t>(sizeof(Arrival)) * slots);
    for (int64_t& at : w.x) at = take(row * s.tokens);
    for (int64_t& at : w.dy) at = take(row * s.tokens);
    w.home = take(row * slots);
    return w;
  }
};

}  // namespace mok
