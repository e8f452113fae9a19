// Assembly that holds from sm_90 on: mbarriers, proxies, named barriers, bulk groups, shared-memory
// matrices, fast special functions. Every wait goes through `wait` or `wait_count`, which have a
// deadline and a tag.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "../check.h"

namespace mok {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// ---- values the compiler keeps no longer than their use

// Addresses that follow from the pointer are made after this, not kept in registers before.
template <class T>
__device__ __forceinline__ void forget(T*& pointer) {
  asm volatile("" : "+l"(pointer));
}
// Read where it is needed: threadIdx would be kept.
__device__ __forceinline__ int lane_index() {
  int lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}

// The same clock for all SMs, in steps of 1 us or less. It goes on while another process has the
// GPU; an SM's own stands still.
__device__ __forceinline__ uint64_t global_nanoseconds() {
  uint64_t now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}

// ---- faults

// Writes the record, if nobody has.
__device__ __forceinline__ bool write_record(Fault* fault, Tag tag, uint32_t value) {
  forget(fault);
  if (fault == nullptr || atomicCAS_system(&fault->tag, 0u, static_cast<uint32_t>(tag)) != 0u)
    return false;
  fault->cta = blockIdx.x;
  fault->thread = threadIdx.x;
  fault->value = value;
  __threadfence_system();
  return true;
}
// And ends the grid.
[[noreturn]] __device__ __forceinline__ void fail(Fault* fault, Tag tag, uint32_t value) {
  write_record(fault, tag, value);
  __trap();
}

// How long a wait has failed, from its first failed poll on. Each further one looks at the clock:
// one instruction (CS2R). To look at fewer would take a branch, with which ptxas spills what
// multiply keeps in registers; of a predicated look it makes an unconditional one.
struct Stopwatch {
  uint64_t began = global_nanoseconds();

  __device__ __forceinline__ bool passes(int64_t limit_ns) const {
    return static_cast<int64_t>(global_nanoseconds() - began) > limit_ns;
  }
};

// ---- mbarrier

__device__ __forceinline__ void barrier_init(uint64_t& barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&barrier)),
               "r"(arrivals)
               : "memory");
}

__device__ __forceinline__ void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// A build with -DMOK_RANDOM_DELAYS sleeps up to 2 us before one arrival in four and after one wait
// in four, so that tests meet every order of the roles that the protocol allows
// (tests/csrc/attack.py).
__device__ __forceinline__ void perhaps_delay() {
#ifdef MOK_RANDOM_DELAYS  // by the SM's own clock, of which each cycle is another number
  uint32_t x =
      static_cast<uint32_t>(clock64()) * 2654435761u + threadIdx.x * 40503u + blockIdx.x * 7919u;
  x ^= x >> 15;
  x *= 2246822519u;
  x ^= x >> 13;
  if ((x & 3) == 0) __nanosleep(x >> 21);
#endif
}

__device__ __forceinline__ void arrive(uint64_t& barrier) {
  perhaps_delay();
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(&barrier))
               : "memory");
}

// Once for a warp, by its lane 0, behind what all of them did in front of a __syncwarp. racecheck
// follows no order from one thread to another and on to a barrier, so for it (scripts/sanitize.py)
// there is a build in which every lane arrives.
#ifdef MOK_SANITIZED
constexpr int kWarpArrivals = 32;
#else
constexpr int kWarpArrivals = 1;
#endif
__device__ __forceinline__ void arrive_of_warp(uint64_t& barrier) {
  if (kWarpArrivals > 1 || threadIdx.x % 32 == 0) arrive(barrier);
}

__device__ __forceinline__ void arrive_expect(uint64_t& barrier, uint32_t bytes) {
  perhaps_delay();
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&barrier)),
      "r"(bytes)
      : "memory");
}

__device__ __forceinline__ bool completed(uint64_t& barrier, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n"
      "}\n"
      : "=r"(done)
      : "r"(shared_address(&barrier)), "r"(parity)
      : "memory");
  return done != 0;
}

// Waits for the phase of that parity to complete.
__device__ __forceinline__ void wait(uint64_t& barrier, uint32_t parity, Fault* fault, Tag tag) {
  if (!completed(barrier, parity)) {
    const Stopwatch watch;
    while (!completed(barrier, parity)) {
      if (watch.passes(wait_limit.own_ns)) fail(fault, tag, parity);
    }
  }
  perhaps_delay();
}

// ---- order between threads and between proxies

// Shared memory written by ordinary stores is about to be read by the copy engine or the tensor
// cores.
__device__ __forceinline__ void fence_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Tensor maps that this thread wrote to global memory before are in order for kernels after this
// one.
__device__ __forceinline__ void release_tensor_maps() {
  asm volatile("fence.proxy.tensormap::generic.release.gpu;" ::: "memory");
}

// What this thread has seen other threads write is about to be read by its bulk copies.
__device__ __forceinline__ void fence_async() { asm volatile("fence.proxy.async;" ::: "memory"); }

// ---- counters between CTAs

__device__ __forceinline__ int32_t load_acquire(const int32_t* word) {
  int32_t value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}
// What this thread has written or seen written is in memory before the count grows.
__device__ __forceinline__ void add_release(int32_t* word, int32_t amount) {
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(word), "r"(amount) : "memory");
}

// One thread's ticket. atomicAdd would first gather a warp's.
__device__ __forceinline__ int take_ticket(uint32_t* word) {
  int ticket;
  asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], 1;"
               : "=r"(ticket)
               : "l"(word)
               : "memory");
  return ticket;
}

// Waits until the word is at least `wanted`.
__device__ __forceinline__ void wait_count(const int32_t* word, int32_t wanted, Fault* fault,
                                           Tag tag) {
  if (load_acquire(word) >= wanted) return;
  const Stopwatch watch;
  for (;;) {
    const int32_t seen = load_acquire(word);
    if (seen >= wanted) return;
    if (watch.passes(wait_limit.own_ns)) fail(fault, tag, static_cast<uint32_t>(seen));
  }
}

// Loads of what this grid writes: never through the read-only path.
__device__ __forceinline__ uint4 load_written(const uint4* from) {
  uint4 v;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from)
               : "memory");
  return v;
}
__device__ __forceinline__ float2 load_written(const float2* from) {
  float2 v;
  asm volatile("ld.global.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "l"(from) : "memory");
  return v;
}

enum class NamedBarrier : int {
  kSetUp = 0,   // __syncthreads
  kZeroed = 1,  // + warpgroup: the last rows of a stage have been zeroed
};

__device__ __forceinline__ void named_sync(NamedBarrier name, int offset, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(static_cast<int>(name) + offset), "r"(threads) : "memory");
}

// ---- bulk copies of whole pieces of 16 bytes

__device__ __forceinline__ void bulk_load(uint32_t to, const void* from, uint32_t bytes,
                                          uint64_t& barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(to),
      "l"(from),
      "r"(bytes),
      "r"(shared_address(&barrier))
      : "memory");
}
__device__ __forceinline__ void bulk_store(void* to, uint32_t from, uint32_t bytes) {
  asm volatile(
      "cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes)
      : "memory");
}

// ---- bulk groups (stores issued by this thread)

__device__ __forceinline__ void bulk_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
template <int PENDING>
__device__ __forceinline__ void
bulk_wait_read() {  // all but PENDING groups have left shared memory
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}
template <int PENDING>
__device__ __forceinline__ void bulk_wait() {  // all but PENDING groups have arrived in memory
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(PENDING) : "memory");
}

// ---- shared memory

__device__ __forceinline__ void store_matrices(uint32_t address, uint32_t a, uint32_t b, uint32_t c,
                                               uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(a),
               "r"(b),
               "r"(c),
               "r"(d)
               : "memory");
}

__device__ __forceinline__ void load_matrices(uint32_t address, uint32_t (&r)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

__device__ __forceinline__ void store_matrices(uint32_t address, uint32_t a, uint32_t b) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1, %2};" ::"r"(address), "r"(a), "r"(b)
      : "memory");
}

__device__ __forceinline__ void load_matrices(uint32_t address, uint32_t (&r)[2]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(address)
               : "memory");
}

__device__ __forceinline__ void store_shared(uint32_t address, float x, float y) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(x), "f"(y) : "memory");
}

__device__ __forceinline__ float2 load_shared(uint32_t address) {
  float2 v;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(address) : "memory");
  return v;
}

__device__ __forceinline__ uint4 load_shared_16(uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

__device__ __forceinline__ void zero_shared_16(uint32_t address) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(address), "r"(0) : "memory");
}

// ---- numbers

__device__ __forceinline__ uint32_t pack(float low, float high) {
  uint32_t both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}
__device__ __forceinline__ float low_of(uint32_t both) { return __uint_as_float(both << 16); }
__device__ __forceinline__ float high_of(uint32_t both) {
  return __uint_as_float(both & 0xffff0000u);
}

__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float reciprocal_fast(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// ---- words between ranks: order holds for the whole system

__device__ __forceinline__ void fence_system() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }
__device__ __forceinline__ uint32_t load_acquire_system(const uint32_t* word) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}
__device__ __forceinline__ uint64_t load_acquire_system(const uint64_t* word) {
  uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
}
__device__ __forceinline__ uint32_t load_relaxed_system(const uint32_t* word) {
  uint32_t value;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}
// After a fence_system of this thread: what it has seen written is in memory before the word.
__device__ __forceinline__ void store_relaxed_system(uint32_t* word, uint32_t value) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}
__device__ __forceinline__ void store_relaxed_system(uint64_t* word, uint64_t value) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}
__device__ __forceinline__ int32_t load_written(const int32_t* from) {
  int32_t value;
  asm volatile("ld.global.s32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}
__device__ __forceinline__ float load_written(const float* from) {
  float value;
  asm volatile("ld.global.f32 %0, [%1];" : "=f"(value) : "l"(from) : "memory");
  return value;
}

}  // namespace mok
