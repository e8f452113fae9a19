// Copies rows from global to global memory, of this GPU or of a peer, through a ring of chunks in
// shared memory. One thread issues everything and waits only when the ring is full, so that a row's
// journey of a microsecond or more costs no registers and few instructions.
//
// Chunk c uses slot c % SLOTS: loaded, then stored when kAhead later ones are under way, and the
// slot is loaded again when the store has read it. `full` completes phase c / SLOTS of a slot when
// its bytes are in; this thread is its only reader, so it cannot be two phases behind.
//
// A signal is sent when all copies before it have arrived in memory, not only left the ring: once
// kSettle later ones are on their way, or at `settle`. Who blocks on anything else must
// settle first.
#pragma once

#include "ptx.cuh"

namespace mok {

constexpr int kMoveBytes = 2048;  // of a chunk
constexpr int kMoveSignals = 16;

struct MoveSignal {
  int32_t* word;
  int32_t amount;
  uint32_t after;  // chunks before it
};

template <int SLOTS>
struct MoveStorage {
  alignas(128) uint8_t chunk[SLOTS][kMoveBytes];
  uint8_t* to[SLOTS];
  uint32_t bytes[SLOTS];
  MoveSignal signal[kMoveSignals];
  uint64_t full[SLOTS];
};

template <int SLOTS>
__device__ __forceinline__ void prepare(MoveStorage<SLOTS>& storage) {
  for (int i = 0; i < SLOTS; ++i) barrier_init(storage.full[i], 1);
}

template <int SLOTS>
struct Mover {
  static constexpr int kAhead = SLOTS * 3 / 4;  // loads under way
  static constexpr int kSettle = SLOTS / 2;     // stores under way when a signal is sent
  static_assert(kAhead + kSettle < kMoveSignals, "a signal has at least one chunk before it");

  MoveStorage<SLOTS>& storage;
  Fault* fault;
  uint32_t loaded = 0, stored = 0, asked = 0, signalled = 0;

  __device__ __forceinline__ void copy(const uint8_t* from, uint8_t* to, int bytes) {
    for (; bytes > 0; bytes -= kMoveBytes, from += kMoveBytes, to += kMoveBytes) {
      load(from, to, min(bytes, kMoveBytes));
    }
  }

  // The word grows when all copies so far are in memory.
  __device__ __forceinline__ void signal(int32_t* word, int32_t amount) {
    storage.signal[asked % kMoveSignals] = {word, amount, loaded};
    ++asked;
  }

  __device__ __forceinline__ void settle() {
    while (stored < loaded) store();
    bulk_wait<0>();
    while (signalled < asked) send();
  }

 private:
  __device__ __forceinline__ void load(const uint8_t* from, uint8_t* to, uint32_t bytes) {
    const uint32_t slot = loaded % SLOTS;
    bulk_wait_read<SLOTS - kAhead - 1>();  // what left this slot has been read
    arrive_expect(storage.full[slot], bytes);
    bulk_load(shared_address(storage.chunk[slot]), from, bytes, storage.full[slot]);
    storage.to[slot] = to;
    storage.bytes[slot] = bytes;
    ++loaded;
    if (loaded - stored > kAhead) store();
  }

  __device__ __forceinline__ void store() {
    const uint32_t slot = stored % SLOTS;
    wait(storage.full[slot], stored / SLOTS & 1, fault, Tag::kMoveChunk);
    bulk_store(storage.to[slot], shared_address(storage.chunk[slot]), storage.bytes[slot]);
    bulk_commit();
    ++stored;
    if (signalled == asked) return;
    if (stored < storage.signal[signalled % kMoveSignals].after + kSettle) return;
    bulk_wait<kSettle>();
    send();
  }

  __device__ __forceinline__ void send() {
    const MoveSignal& s = storage.signal[signalled % kMoveSignals];
    add_release(s.word, s.amount);
    ++signalled;
  }
};

}  // namespace mok
