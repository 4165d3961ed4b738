// Products by a warpgroup (128 threads) of Hopper's tensor cores: 64 rows, 64 or 128 columns, depth 16, in bf16 or fp16
// with fp32 sums (wgmma, sm_90a). B always lies in shared memory, A in shared memory or in registers. Both are asynchronous:
// between `begin_products` and a wait nobody may touch the registers of their results, nor their operands.
//
// A warp holds 16 rows of the result, as in tensor_core.cuh: c[n][0..1] row lane / 4, columns 8 * n + 2 * (lane % 4) and
// its neighbour, c[n][2..3] the same of row lane / 4 + 8. A in registers is that of tensor_core.cuh, too.
//
// Tiles in shared memory are panels of rows of 64 numbers (128 bytes), each panel aligned to 1024 bytes; the 16-byte piece
// p of row r lies at place p ^ (r % 8) of its row, the hardware's 128-byte swizzle: neither a column of pieces nor a row
// meets a bank twice.
#pragma once
#include "tensor_core.cuh"

typedef unsigned long long u64;

__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int Left> __device__ __forceinline__ void wait_for_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Left) : "memory");
}
// What this thread wrote to shared memory, copies that it waited for included, becomes visible to wgmma.
__device__ __forceinline__ void publish_to_products() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// A barrier of all threads of the block that they may reach at different places of the program, warp by warp, as groups
// with different numbers of tiles do; __syncthreads must be the same one for all.
template <int Threads> __device__ __forceinline__ void meet() {
  asm volatile("bar.sync 1, %0;" ::"n"(Threads) : "memory");
}

// Keeps the order of what is computed on these registers and of the asynchronous products around: the compiler believes
// that results are there once wgmma was issued, and would move arithmetic across a wait.
template <int N> __device__ __forceinline__ void settle(float (*c)[4]) {
#pragma unroll
  for (int n = 0; n < N; n++)
    asm volatile("" : "+f"(c[n][0]), "+f"(c[n][1]), "+f"(c[n][2]), "+f"(c[n][3])::"memory");
}

// Descriptor of an operand in panels. `depth in columns`: 8 rows further is 1024 bytes further. `depth in rows` (the
// operand is read transposed): 64 columns further is the next panel, 8 rows of depth further again 1024 bytes.
__device__ __forceinline__ u64 describe_operand(const void* place, int panel_bytes) {
  u64 address = (u64)__cvta_generic_to_shared(place);
  return (address & 0x3ffff) >> 4 | (u64)(panel_bytes >> 4) << 16 | (u64)(1024 >> 4) << 32 | (u64)1 << 62;
}

#define FOUR(c, n) "+f"(c[n][0]), "+f"(c[n][1]), "+f"(c[n][2]), "+f"(c[n][3])
#define THIRTY_TWO(c, n) \
  FOUR(c, n), FOUR(c, n + 1), FOUR(c, n + 2), FOUR(c, n + 3), FOUR(c, n + 4), FOUR(c, n + 5), FOUR(c, n + 6), FOUR(c, n + 7)
#define RESULTS_64 \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28," \
  "%29,%30,%31"
#define RESULTS_128 \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28," \
  "%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55," \
  "%56,%57,%58,%59,%60,%61,%62,%63"

// c = (or +=, where `add`) A * B with both in shared memory, depth in columns; c += A * B with A in registers and B's depth
// in rows. One of each for every width and number type.
#define PRODUCTS(TYPE, NAME, N, OPERANDS, A0, A1, A2, A3, A4) \
  __device__ __forceinline__ void multiply_shared_##N(float (*c)[4], u64 a, u64 b, int add, TYPE) { \
    asm volatile("{.reg .pred p; setp.ne.b32 p, %" #A2 ", 0; wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." NAME \
                 "." NAME " {" RESULTS_##N "}, %" #A0 ", %" #A1 ", p, 1, 1, 0, 0;}" \
                 : OPERANDS : "l"(a), "l"(b), "r"(add)); \
  } \
  __device__ __forceinline__ void add_product_##N(float (*c)[4], const unsigned* a, u64 b, TYPE) { \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." NAME "." NAME " {" RESULTS_##N \
                 "}, {%" #A0 ", %" #A1 ", %" #A2 ", %" #A3 "}, %" #A4 ", 1, 1, 1, 1;" \
                 : OPERANDS : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)); \
  }
#define OPERANDS_64 THIRTY_TWO(c, 0)
#define OPERANDS_128 THIRTY_TWO(c, 0), THIRTY_TWO(c, 8)
PRODUCTS(bf16, "bf16", 64, OPERANDS_64, 32, 33, 34, 35, 36)
PRODUCTS(fp16, "f16", 64, OPERANDS_64, 32, 33, 34, 35, 36)
PRODUCTS(bf16, "bf16", 128, OPERANDS_128, 64, 65, 66, 67, 68)
PRODUCTS(fp16, "f16", 128, OPERANDS_128, 64, 65, 66, 67, 68)

template <int N, typename T16>
__device__ __forceinline__ void multiply_shared(float (*c)[4], u64 a, u64 b, int add) {
  if constexpr (N == 64) multiply_shared_64(c, a, b, add, T16());
  else multiply_shared_128(c, a, b, add, T16());
}
template <int N, typename T16> __device__ __forceinline__ void add_product(float (*c)[4], const unsigned* a, u64 b) {
  if constexpr (N == 64) add_product_64(c, a, b, T16());
  else add_product_128(c, a, b, T16());
}
