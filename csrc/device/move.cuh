// Copies rows from global to global memory, of this GPU or of a peer, through a ring of chunks in
// shared memory. One thread issues everything and waits only when the ring is full, so that a row's
// journey of a microsecond or more costs no registers and few instructions.
//
// Chunk c uses slot c % kMoveSlots: loaded, then stored when kAhead later ones are under way, and
// the slot is loaded again when the store has read it. `full` completes phase c / kMoveSlots of a
// slot when its bytes are in; this thread is its only reader, so it cannot be two phases behind.
//
// A signal is sent when all copies before it have arrived in memory, not only left the ring: once
// kSettle later ones are on their way, or at `settle`. Who blocks on anything else must
// settle first.
#pragma once

#include "ptx.cuh"

namespace mok {

constexpr int kMoveBytes = 2048;  // of a chunk
constexpr int kMoveSlots = 8;
constexpr int kMoveSignals = 16;

struct MoveSignal {
  int32_t* word;
  int32_t amount;
  uint32_t after;  // chunks before it
};

struct MoveStorage {
  alignas(128) uint8_t chunk[kMoveSlots][kMoveBytes];
  uint8_t* to[kMoveSlots];
  uint32_t bytes[kMoveSlots];
  MoveSignal signal[kMoveSignals];
  uint64_t full[kMoveSlots];
  uint32_t asked, signalled;  // signals
};

__device__ __forceinline__ void prepare(MoveStorage& storage) {
  for (int i = 0; i < kMoveSlots; ++i) barrier_init(storage.full[i], 1);
  storage.asked = storage.signalled = 0;
}

struct Mover {
  static constexpr int kAhead = 6;   // loads under way
  static constexpr int kSettle = 4;  // stores under way when a signal is sent
  static_assert(kAhead + kSettle < kMoveSignals, "a signal has at least one chunk before it");

  MoveStorage& storage;
  Fault* fault;
  uint32_t loaded = 0, stored = 0;  // chunks

  __device__ __forceinline__ void copy(const uint8_t* from, uint8_t* to, int bytes) {
    for (; bytes > 0; bytes -= kMoveBytes, from += kMoveBytes, to += kMoveBytes) {
      load(from, to, min(bytes, kMoveBytes));
    }
  }

  // The word grows when all copies so far are in memory.
  __device__ __forceinline__ void signal(int32_t* word, int32_t amount) {
    storage.signal[storage.asked++ % kMoveSignals] = {word, amount, loaded};
  }

  __device__ __forceinline__ void settle() {
    while (stored < loaded) store();
    bulk_wait<0>();
    while (storage.signalled < storage.asked) send();
  }

 private:
  __device__ __forceinline__ void load(const uint8_t* from, uint8_t* to, uint32_t bytes) {
    const uint32_t slot = loaded % kMoveSlots;
    bulk_wait_read<kMoveSlots - kAhead - 1>();  // what left this slot has been read
    arrive_expect(storage.full[slot], bytes);
    bulk_load(shared_address(storage.chunk[slot]), from, bytes, storage.full[slot]);
    storage.to[slot] = to;
    storage.bytes[slot] = bytes;
    ++loaded;
    if (loaded - stored > kAhead) store();
  }

  __device__ __forceinline__ void store() {
    const uint32_t slot = stored % kMoveSlots;
    wait(storage.full[slot], stored / kMoveSlots & 1, fault, Tag::kMoveChunk);
    bulk_store(storage.to[slot], shared_address(storage.chunk[slot]), storage.bytes[slot]);
    bulk_commit();
    ++stored;
    if (storage.signalled == storage.asked) return;
    if (stored < storage.signal[storage.signalled % kMoveSignals].after + kSettle) return;
    bulk_wait<kSettle>();
    send();
  }

  __device__ __forceinline__ void send() {
    const MoveSignal& s = storage.signal[storage.signalled++ % kMoveSignals];
    add_release(s.word, s.amount);
  }
};

}  // namespace mok
