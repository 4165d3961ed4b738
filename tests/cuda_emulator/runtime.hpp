// Runs a CUDA kernel on the CPU: each thread of a block is a fiber, run until it meets a barrier or ends, in an order
// that the caller chooses, so that results that hang on the order (a missing barrier) differ between orders.
#include <math.h>
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
#define __grid_constant__
#define __shared__ static
#define __CUDA_ARCH__ 900

struct uint3_ { unsigned x, y, z; };
struct alignas(8) uint2 { unsigned x, y; };
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline unsigned __float_as_uint(float x) { unsigned y; memcpy(&y, &x, 4); return y; }
inline float __uint_as_float(unsigned x) { float y; memcpy(&y, &x, 4); return y; }
inline float __logf(float x) { return logf(x); }

static uint3_ threadIdx, blockIdx, blockDim, gridDim;

enum Wait { RUNNING, AT_WARP, AT_BLOCK, UNTIL, DONE };
struct Fiber {
  ucontext_t context;
  std::vector<char> stack;
  Wait wait;
  std::function<bool()> until;
};
static std::vector<Fiber> emulator_fibers;
static ucontext_t emulator_scheduler;
static const std::function<void()>* emulator_body;
static std::vector<char> emulator_shared;  // of which a margin is not the block's, so that its own part can be aligned
#define EMULATOR_MARGIN 256
static const char* emulator_error;

struct Pending { void* to; const void* from; bool valid; int group; };
static std::vector<Pending> emulator_pending[1024];
static int emulator_groups[1024];
static int emulator_order;

inline void emulator_land(int groups) {
  auto& pending = emulator_pending[threadIdx.x];
  std::vector<Pending> later;
  for (auto& copy : pending) {
    if (copy.group >= groups) later.push_back(copy);
    else if (copy.valid) memcpy(copy.to, copy.from, 16);
    else memset(copy.to, 0, 16);
  }
  pending = later;
}
inline void emulator_fail(const char* message) { if (!emulator_error) emulator_error = message; }
inline void* emulator_dynamic_shared() { return (void*)(((unsigned long long)emulator_shared.data() + 127) / 128 * 128); }

inline void emulator_wait(Wait kind) {
  unsigned me = threadIdx.x;
  emulator_fibers[me].wait = kind;
  swapcontext(&emulator_fibers[me].context, &emulator_scheduler);
  threadIdx.x = me;
}
inline void emulator_warp_barrier() { emulator_wait(AT_WARP); }
inline void __syncthreads() { emulator_wait(AT_BLOCK); }
inline void __syncwarp() { emulator_wait(AT_WARP); }
// Until something holds that other threads, or copies that land, bring about.
inline void emulator_wait_until(std::function<bool()> holds) {
  if (holds()) return;
  emulator_fibers[threadIdx.x].until = holds;
  emulator_wait(UNTIL);
}
// What the copy engine was asked for and did not do yet: the last is done first, when no thread can go on without one.
static std::vector<std::function<void()>> emulator_asked;
static std::vector<std::function<void()>> emulator_forget;  // called before each block
template <typename T> inline T __shfl_xor_sync(unsigned, T x, int mask) {
  static T slots[32][32];
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  slots[warp][lane] = x;
  emulator_warp_barrier();
  T y = slots[warp][lane ^ mask];
  emulator_warp_barrier();
  return y;
}

inline int __shfl_sync(unsigned, int x, int lane) {
  static int slots[32][32];
  int warp = threadIdx.x / 32;
  slots[warp][threadIdx.x % 32] = x;
  emulator_warp_barrier();
  int y = slots[warp][lane];
  emulator_warp_barrier();
  return y;
}
inline bool __all_sync(unsigned, bool x) {
  static bool slots[32][32];
  int warp = threadIdx.x / 32;
  slots[warp][threadIdx.x % 32] = x;
  emulator_warp_barrier();
  bool all = true;
  for (int lane = 0; lane < 32; lane++) all = all && slots[warp][lane];
  emulator_warp_barrier();
  return all;
}

static void emulator_entry() {
  (*emulator_body)();
  emulator_fibers[threadIdx.x].wait = DONE;
  swapcontext(&emulator_fibers[threadIdx.x].context, &emulator_scheduler);
}

static void emulator_run_block(unsigned threads, int order) {
  emulator_fibers.resize(std::max<size_t>(emulator_fibers.size(), threads));
  for (unsigned t = 0; t < threads; t++) {
    Fiber& fiber = emulator_fibers[t];
    fiber.stack.resize(64 * 1024);
    fiber.wait = RUNNING;
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.data();
    fiber.context.uc_stack.ss_size = fiber.stack.size();
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, emulator_entry, 0);
    emulator_pending[t].clear();
    emulator_groups[t] = 0;
  }
  for (;;) {
    bool ran = false;
    for (unsigned i = 0; i < threads; i++) {
      unsigned t = order == 1 ? threads - 1 - i : i;
      if (emulator_fibers[t].wait != RUNNING) continue;
      ran = true;
      threadIdx = {t, 0, 0};
      swapcontext(&emulator_scheduler, &emulator_fibers[t].context);
    }
    unsigned done = 0, at_block = 0;
    for (unsigned t = 0; t < threads; t++) done += emulator_fibers[t].wait == DONE, at_block += emulator_fibers[t].wait == AT_BLOCK;
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
    if (at_block && at_block + done == threads) {
      if (done) emulator_fail("a block barrier misses threads that have ended");
      for (unsigned t = 0; t < threads; t++) if (emulator_fibers[t].wait == AT_BLOCK) emulator_fibers[t].wait = RUNNING;
      released = true;
    }
    for (unsigned t = 0; t < threads; t++) {
      if (emulator_fibers[t].wait != UNTIL || !emulator_fibers[t].until()) continue;
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
                                   const std::function<void()>& body) {
  emulator_body = &body;
  emulator_error = nullptr;
  emulator_order = order;
  blockDim = {threads, 1, 1};
  gridDim = {gx, gy, gz};
  emulator_shared.assign(shared + EMULATOR_MARGIN, (char)0xff);
  for (unsigned z = 0; z < gz && !emulator_error; z++)
    for (unsigned y = 0; y < gy && !emulator_error; y++)
      for (unsigned x = 0; x < gx && !emulator_error; x++) {
        blockIdx = {x, y, z};
        std::fill(emulator_shared.begin(), emulator_shared.end(), (char)0xff);  // NaN: what is read unwritten shows
        emulator_asked.clear();
        for (auto& forget : emulator_forget) forget();
        emulator_run_block(threads, order);
        if (!emulator_asked.empty()) emulator_fail("a block ended before a copy that it asked for landed");
      }
  return emulator_error;
}
