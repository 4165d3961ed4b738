// Runs a CUDA kernel on the CPU: each thread of a block is a fiber, run until it meets a barrier or ends, in an order
// that the caller chooses, so that results that hang on the order (a missing barrier) differ between orders. The blocks of
// a cluster run at once.
#undef _FORTIFY_SOURCE  // its longjmp refuses to go to another stack
#include <math.h>
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>
#include <algorithm>
#include <functional>
#include <map>
#include <vector>

using std::max;
using std::min;

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __grid_constant__
#define __shared__ static
#define __CUDA_ARCH__ 900

struct uint3_ { unsigned x, y, z; };
struct alignas(8) uint2 { unsigned x, y; };
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
struct alignas(8) float2 { float x, y; };
inline float2 make_float2(float x, float y) { return {x, y}; }
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline unsigned __float_as_uint(float x) { unsigned y; memcpy(&y, &x, 4); return y; }
inline float __uint_as_float(unsigned x) { float y; memcpy(&y, &x, 4); return y; }
inline float __logf(float x) { return logf(x); }

inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return (unsigned long long)((unsigned __int128)a * b >> 64);
}

static uint3_ threadIdx, blockIdx, blockDim, gridDim;
static unsigned emulator_rank;    // of this thread's block in its cluster
static unsigned emulator_cluster;  // blocks of a cluster
inline unsigned emulator_thread() { return emulator_rank * blockDim.x + threadIdx.x; }  // of the cluster
inline unsigned emulator_warp() { return emulator_thread() / 32; }

enum Wait { RUNNING, AT_WARP, AT_BLOCK, AT_CLUSTER, UNTIL, DONE };
struct Fiber {
  ucontext_t context;  // where it begins; from then on it goes by jumps, since swapcontext asks the kernel each time
  jmp_buf place;
  std::vector<char> stack;
  bool begun = false;
  Wait wait = DONE;
  std::function<bool()> until;
};
static std::vector<Fiber> emulator_fibers;
static jmp_buf emulator_scheduler;
static const std::function<void()>* emulator_body;
static std::vector<char> emulator_shared;
static size_t emulator_shared_stride;  // from a block's shared memory to the next one's, a multiple of 1024
static size_t emulator_shared_bytes;   // of them, what a block asked for
static bool emulator_cluster_met;
static const char* emulator_error;

struct Pending { void* to; const void* from; bool valid; int group; };
static std::vector<Pending> emulator_pending[1024];
static int emulator_groups[1024];
static int emulator_order;

inline void emulator_land(int groups) {
  auto& pending = emulator_pending[emulator_thread()];
  std::vector<Pending> later;
  for (auto& copy : pending) {
    if (copy.group >= groups) later.push_back(copy);
    else if (copy.valid) memcpy(copy.to, copy.from, 16);
    else memset(copy.to, 0, 16);
  }
  pending = later;
}
inline void emulator_fail(const char* message) { if (!emulator_error) emulator_error = message; }
inline void* emulator_dynamic_shared() {
  return (void*)(((unsigned long long)emulator_shared.data() + 127) / 128 * 128 + emulator_rank * emulator_shared_stride);
}
inline void emulator_become(unsigned thread) {
  blockIdx.x += thread / blockDim.x - emulator_rank;
  emulator_rank = thread / blockDim.x;
  threadIdx = {thread % blockDim.x, 0, 0};
}

inline void emulator_wait(Wait kind) {
  Fiber& me = emulator_fibers[emulator_thread()];
  me.wait = kind;
  if (!_setjmp(me.place)) _longjmp(emulator_scheduler, 1);
}
inline bool emulator_has_left(unsigned rank) {  // a block whose threads have all ended
  for (unsigned t = 0; t < blockDim.x; t++)
    if (emulator_fibers[rank * blockDim.x + t].wait != DONE) return false;
  return true;
}
inline void* emulator_place_in(unsigned rank, const void* place) { return (char*)place + ((long long)rank - emulator_rank) * (long long)emulator_shared_stride; }
inline void emulator_warp_barrier() { emulator_wait(AT_WARP); }
inline void __syncthreads() { emulator_wait(AT_BLOCK); }
inline void meet_cluster() { emulator_wait(AT_CLUSTER); }
inline void __syncwarp() { emulator_wait(AT_WARP); }
// Until something holds that other threads, or copies that land, bring about.
inline void emulator_wait_until(std::function<bool()> holds) {
  if (holds()) return;
  emulator_fibers[emulator_thread()].until = holds;
  emulator_wait(UNTIL);
}
// What the copy engine was asked for and did not do yet: the last is done first, when no thread can go on without one.
static std::vector<std::function<void()>> emulator_asked;
static std::vector<std::function<void()>> emulator_forget;  // called before each block
template <typename T> inline T __shfl_xor_sync(unsigned, T x, int mask) {
  static T slots[32][32];
  int warp = emulator_warp(), lane = threadIdx.x % 32;
  slots[warp][lane] = x;
  emulator_warp_barrier();
  T y = slots[warp][lane ^ mask];
  emulator_warp_barrier();
  return y;
}

inline int __shfl_sync(unsigned, int x, int lane) {
  static int slots[32][32];
  int warp = emulator_warp();
  slots[warp][threadIdx.x % 32] = x;
  emulator_warp_barrier();
  int y = slots[warp][lane];
  emulator_warp_barrier();
  return y;
}
inline bool __all_sync(unsigned, bool x) {
  static bool slots[32][32];
  int warp = emulator_warp();
  slots[warp][threadIdx.x % 32] = x;
  emulator_warp_barrier();
  bool all = true;
  for (int lane = 0; lane < 32; lane++) all = all && slots[warp][lane];
  emulator_warp_barrier();
  return all;
}

static void emulator_entry() {
  for (;;) {  // a fiber that has ended is the same thread of the next block
    (*emulator_body)();
    emulator_wait(DONE);
  }
}
static void emulator_resume(Fiber& fiber) {  // until it waits or ends
  if (_setjmp(emulator_scheduler)) return;
  if (fiber.begun) _longjmp(fiber.place, 1);
  fiber.begun = true;
  fiber.stack.resize(64 * 1024);
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = fiber.stack.data();
  fiber.context.uc_stack.ss_size = fiber.stack.size();
  fiber.context.uc_link = nullptr;
  makecontext(&fiber.context, emulator_entry, 0);
  setcontext(&fiber.context);
}

static void emulator_run_cluster(unsigned threads, int order) {
  emulator_fibers.resize(std::max<size_t>(emulator_fibers.size(), threads));
  for (unsigned t = 0; t < threads; t++) {
    Fiber& fiber = emulator_fibers[t];
    fiber.begun &= fiber.wait == DONE;  // one that a deadlock left begins anew
    fiber.wait = RUNNING;
    emulator_pending[t].clear();
    emulator_groups[t] = 0;
  }
  for (;;) {
    bool ran = false;
    for (unsigned i = 0; i < threads; i++) {
      unsigned t = order == 1 ? threads - 1 - i : i;
      if (emulator_fibers[t].wait != RUNNING) continue;
      ran = true;
      emulator_become(t);
      emulator_resume(emulator_fibers[t]);
    }
    unsigned done = 0, at_cluster = 0;
    for (unsigned t = 0; t < threads; t++) done += emulator_fibers[t].wait == DONE, at_cluster += emulator_fibers[t].wait == AT_CLUSTER;
    if (done == threads) return;
    bool released = false;
    for (unsigned warp = 0; warp < threads; warp += 32) {
      unsigned in_warp = std::min(32u, threads - warp), waiting = 0, gone = 0;
      for (unsigned t = warp; t < warp + in_warp; t++) waiting += emulator_fibers[t].wait == AT_WARP, gone += emulator_fibers[t].wait == DONE;
      if (!waiting) continue;
      if (waiting + gone < in_warp) continue;
      if (gone) emulator_fail("a warp collective misses lanes that have ended");
      for (unsigned t = warp; t < warp + in_warp; t++) if (emulator_fibers[t].wait == AT_WARP) emulator_fibers[t].wait = RUNNING;
      released = true;
    }
    for (unsigned first = 0; first < threads; first += blockDim.x) {
      unsigned at_block = 0, gone = 0;
      for (unsigned t = first; t < first + blockDim.x; t++) at_block += emulator_fibers[t].wait == AT_BLOCK, gone += emulator_fibers[t].wait == DONE;
      if (!at_block || at_block + gone < blockDim.x) continue;
      if (gone) emulator_fail("a block barrier misses threads that have ended");
      for (unsigned t = first; t < first + blockDim.x; t++) if (emulator_fibers[t].wait == AT_BLOCK) emulator_fibers[t].wait = RUNNING;
      released = true;
    }
    if (at_cluster && at_cluster + done == threads) {
      if (done) emulator_fail("a cluster's barrier misses threads that have ended");
      for (unsigned t = 0; t < threads; t++) if (emulator_fibers[t].wait == AT_CLUSTER) emulator_fibers[t].wait = RUNNING;
      released = emulator_cluster_met = true;
    }
    for (unsigned t = 0; t < threads; t++) {
      if (emulator_fibers[t].wait != UNTIL) continue;
      emulator_become(t);
      if (!emulator_fibers[t].until()) continue;
      emulator_fibers[t].wait = RUNNING;
      released = true;
    }
    if (!ran && !released && !emulator_asked.empty()) {
      auto copy = emulator_asked.back();
      emulator_asked.pop_back();
      copy();
      released = true;
    }
    if (!ran && !released) { emulator_fail("deadlock: threads wait for different barriers"); return; }
  }
}

static const char* emulator_launch(unsigned gx, unsigned gy, unsigned gz, unsigned threads, size_t shared, int order,
                                   unsigned cluster, const std::function<void()>& body) {
  emulator_body = &body;
  emulator_error = nullptr;
  emulator_order = order;
  emulator_cluster = cluster;
  emulator_shared_stride = (shared + 1023) / 1024 * 1024;
  if (gx % cluster) return "the grid is not a multiple of the cluster";
  blockDim = {threads, 1, 1};
  gridDim = {gx, gy, gz};
  emulator_shared_bytes = shared;
  emulator_shared.assign(emulator_shared_stride * cluster + 256, (char)0xff);
  for (unsigned z = 0; z < gz && !emulator_error; z++)
    for (unsigned y = 0; y < gy && !emulator_error; y++)
      for (unsigned x = 0; x < gx && !emulator_error; x += cluster) {
        blockIdx = {x, y, z};
        emulator_rank = 0;
        emulator_cluster_met = false;
        std::fill(emulator_shared.begin(), emulator_shared.end(), (char)0xff);  // NaN: what is read unwritten shows
        emulator_asked.clear();
        for (auto& forget : emulator_forget) forget();
        emulator_run_cluster(threads * cluster, order);
        if (!emulator_asked.empty()) emulator_fail("a block ended before a copy that it asked for landed");
      }
  return emulator_error;
}
