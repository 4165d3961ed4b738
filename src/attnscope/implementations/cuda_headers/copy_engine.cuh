// Hopper's copy engine (TMA), the barriers in shared memory that its copies report to, barriers of some of a block's
// threads, and registers that move between warpgroups (sm_90a).
//
// A Barrier goes through phases: one ends when all arrivals that it was made for came and all bytes that were announced
// have landed. `wait_for(barrier, phase)` returns once the phase of that parity (0 first) has ended, so a wait with parity
// 1 before anything happened returns at once: what starts out empty needs no first arrival.
#pragma once
#include "device.cuh"

typedef unsigned long long Barrier;
struct alignas(64) TensorMap {  // as cuTensorMapEncodeTiled wrote it
  unsigned long long opaque[16];
};

__device__ __forceinline__ unsigned shared_address(const void* place) { return (unsigned)__cvta_generic_to_shared(place); }

__device__ __forceinline__ void make_barrier(Barrier* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}
// By whom the barriers were made, before the block meets: the copy engine sees them, too.
__device__ __forceinline__ void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory");
}
__device__ __forceinline__ void arrive(Barrier* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
// At the barrier that lies in the same place in another block of the cluster, or in this one. No memory but what the copy
// engine and products read hangs on it, so it waits for no stores: a release that the cluster sees would, for all.
__device__ __forceinline__ void arrive_at(Barrier* barrier, int rank) {
  asm volatile("{.reg .b32 there; mapa.shared::cluster.u32 there, %0, %1; mbarrier.arrive.shared::cluster.b64 _, [there];}"
               ::"r"(shared_address(barrier)), "r"(rank) : "memory");
}
// Arrives, and announces so many bytes of copies.
__device__ __forceinline__ void arrive_expecting(Barrier* barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes) : "memory");
}
__device__ __forceinline__ void wait_for(Barrier* barrier, unsigned phase) {
  unsigned done;  // the loop is not in the PTX: the compiler then sees that it keeps a warp together
  do {
    asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                 : "=r"(done) : "r"(shared_address(barrier)), "r"(phase) : "memory");
  } while (!done);
}

// A box of a tensor of four axes, from (x, row, head, batch) on, lands in shared memory, zeros where the box leaves the
// tensor; its bytes, those of the zeros included, are reported to the barrier. One thread asks.
__device__ __forceinline__ void copy_box(void* to, const TensorMap& map, Barrier* barrier, int x, int row, int head, int batch) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];"
      ::"r"(shared_address(to)), "l"(&map), "r"(shared_address(barrier)), "r"(x), "r"(row), "r"(head), "r"(batch)
      : "memory");
}
// The same, to the same place in each block of the cluster, where it is reported to the same barrier. One block asks.
template <int Blocks>
__device__ __forceinline__ void copy_box_to(void* to, const TensorMap& map, Barrier* barrier, int x, int row, int head, int batch) {
  if (Blocks == 1) return copy_box(to, map, barrier, x, row, head, batch);
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
      "[%1, {%3, %4, %5, %6}], [%2], %7;"
      ::"r"(shared_address(to)), "l"(&map), "r"(shared_address(barrier)), "r"(x), "r"(row), "r"(head), "r"(batch),
      "h"((unsigned short)((1 << Blocks) - 1)) : "memory");
}
__device__ __forceinline__ void fetch_map(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// All threads of all blocks of a cluster meet; each sees the barriers that others made and published.
__device__ __forceinline__ void meet_cluster() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Barrier `id` (1 to 15) ends when Threads threads met it: those of `meet_at` wait for that, those of `pass` do not.
template <int Threads> __device__ __forceinline__ void meet_at(int id) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(Threads) : "memory");
}
template <int Threads> __device__ __forceinline__ void pass(int id) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "n"(Threads) : "memory");
}

// Whether x holds for any of Threads threads, which all meet at barrier `id`.
template <int Threads> __device__ __forceinline__ bool any_of(int id, bool x) {
  int any;
  asm volatile("{.reg .pred x, any; setp.ne.s32 x, %1, 0; barrier.cta.red.or.pred any, %2, %3, x; selp.s32 %0, 1, 0, any;}"
               : "=r"(any) : "r"((int)x), "r"(id), "n"(Threads) : "memory");
  return any;
}

// All threads of a warpgroup: from here on each has so many registers.
template <int Registers> __device__ __forceinline__ void shrink_to() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Registers));
}
template <int Registers> __device__ __forceinline__ void grow_to() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Registers));
}
