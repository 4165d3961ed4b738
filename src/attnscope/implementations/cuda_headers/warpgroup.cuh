// Products by a warpgroup (128 threads) of Hopper's tensor cores: 64 rows, 16 to 256 columns in steps of 16, depth 16, in
// bf16 or fp16 with fp32 sums (wgmma, sm_90a). B always lies in shared memory, A in shared memory or in registers. Both
// are asynchronous: between `begin_products` and a wait nobody may touch the registers of their results, nor operands.
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

// Keeps the order of what is computed on these registers and of the asynchronous products around: the compiler believes
// that results are there once wgmma was issued, and would move arithmetic across a wait.
template <int N> __device__ __forceinline__ void settle(float (*c)[4]) {
#pragma unroll
  for (int n = 0; n < N; n++)
    asm volatile("" : "+f"(c[n][0]), "+f"(c[n][1]), "+f"(c[n][2]), "+f"(c[n][3])::"memory");
}
template <int N> __device__ __forceinline__ void settle_operands(unsigned (*a)[4]) {
#pragma unroll
  for (int n = 0; n < N; n++) asm volatile("" : "+r"(a[n][0]), "+r"(a[n][1]), "+r"(a[n][2]), "+r"(a[n][3])::"memory");
}

// `x`, which is never below 0, is computed before the next wait. The assembler would move that wait to the front; it does
// not move it before a store that might happen, and this one never does. (A branch would do, too, but costs registers.)
__device__ __forceinline__ void compute_before_waiting(float x, void* shared) {
  unsigned address = (unsigned)__cvta_generic_to_shared(shared);
  asm volatile("{.reg .pred p; setp.lt.f32 p, %0, 0f00000000; @p st.shared.u32 [%1], 0;}" ::"f"(x), "r"(address) : "memory");
}

// Descriptor of an operand in panels. `depth in columns`: 8 rows further is 1024 bytes further. `depth in rows` (the
// operand is read transposed): 64 columns further is the next panel, 8 rows of depth further again 1024 bytes.
__device__ __forceinline__ u64 describe_operand(const void* place, int panel_bytes) {
  u64 address = (u64)__cvta_generic_to_shared(place);
  return (address & 0x3ffff) >> 4 | (u64)(panel_bytes >> 4) << 16 | (u64)(1024 >> 4) << 32 | (u64)1 << 62;
}

// Lists of a product's result registers, in chunks of 8 (16 columns): `%0,...` for PTX, and the operands to match.
#define TEXT_1 "%0,%1,%2,%3,%4,%5,%6,%7"
#define TEXT_2 TEXT_1 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define TEXT_3 TEXT_2 ",%16,%17,%18,%19,%20,%21,%22,%23"
#define TEXT_4 TEXT_3 ",%24,%25,%26,%27,%28,%29,%30,%31"
#define TEXT_5 TEXT_4 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define TEXT_6 TEXT_5 ",%40,%41,%42,%43,%44,%45,%46,%47"
#define TEXT_7 TEXT_6 ",%48,%49,%50,%51,%52,%53,%54,%55"
#define TEXT_8 TEXT_7 ",%56,%57,%58,%59,%60,%61,%62,%63"
#define TEXT_9 TEXT_8 ",%64,%65,%66,%67,%68,%69,%70,%71"
#define TEXT_10 TEXT_9 ",%72,%73,%74,%75,%76,%77,%78,%79"
#define TEXT_11 TEXT_10 ",%80,%81,%82,%83,%84,%85,%86,%87"
#define TEXT_12 TEXT_11 ",%88,%89,%90,%91,%92,%93,%94,%95"
#define TEXT_13 TEXT_12 ",%96,%97,%98,%99,%100,%101,%102,%103"
#define TEXT_14 TEXT_13 ",%104,%105,%106,%107,%108,%109,%110,%111"
#define TEXT_15 TEXT_14 ",%112,%113,%114,%115,%116,%117,%118,%119"
#define TEXT_16 TEXT_15 ",%120,%121,%122,%123,%124,%125,%126,%127"
#define FOUR(c, n) "+f"(c[n][0]), "+f"(c[n][1]), "+f"(c[n][2]), "+f"(c[n][3])
#define EIGHT(c, n) FOUR(c, n), FOUR(c, n + 1)
#define SUMS_1 EIGHT(c, 0)
#define SUMS_2 SUMS_1, EIGHT(c, 2)
#define SUMS_3 SUMS_2, EIGHT(c, 4)
#define SUMS_4 SUMS_3, EIGHT(c, 6)
#define SUMS_5 SUMS_4, EIGHT(c, 8)
#define SUMS_6 SUMS_5, EIGHT(c, 10)
#define SUMS_7 SUMS_6, EIGHT(c, 12)
#define SUMS_8 SUMS_7, EIGHT(c, 14)
#define SUMS_9 SUMS_8, EIGHT(c, 16)
#define SUMS_10 SUMS_9, EIGHT(c, 18)
#define SUMS_11 SUMS_10, EIGHT(c, 20)
#define SUMS_12 SUMS_11, EIGHT(c, 22)
#define SUMS_13 SUMS_12, EIGHT(c, 24)
#define SUMS_14 SUMS_13, EIGHT(c, 26)
#define SUMS_15 SUMS_14, EIGHT(c, 28)
#define SUMS_16 SUMS_15, EIGHT(c, 30)

// c = (or +=, where `add`) A * B with both in shared memory, depth in columns; c += A * B with A in registers and B's depth
// in rows. One of each for every number type and width: N columns are N / 2 results a thread, so that A is the next
// operand after those.
template <int N, typename T16> struct Products;
#define PRODUCTS(TYPE, NAME, CHUNKS, N, A0, A1, A2, A3, A4) \
  template <> struct Products<N, TYPE> { \
    static __device__ __forceinline__ void multiply_shared(float (*c)[4], u64 a, u64 b, int add) { \
      asm volatile("{.reg .pred p; setp.ne.b32 p, %" #A2 ", 0; wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." NAME \
                   "." NAME " {" TEXT_##CHUNKS "}, %" #A0 ", %" #A1 ", p, 1, 1, 0, 0;}" \
                   : SUMS_##CHUNKS : "l"(a), "l"(b), "r"(add)); \
    } \
    static __device__ __forceinline__ void add_product(float (*c)[4], const unsigned* a, u64 b) { \
      asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." NAME "." NAME " {" TEXT_##CHUNKS \
                   "}, {%" #A0 ", %" #A1 ", %" #A2 ", %" #A3 "}, %" #A4 ", 1, 1, 1, 1;" \
                   : SUMS_##CHUNKS : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)); \
    } \
  };
#define BOTH_TYPES(CHUNKS, N, A0, A1, A2, A3, A4) \
  PRODUCTS(bf16, "bf16", CHUNKS, N, A0, A1, A2, A3, A4) \
  PRODUCTS(fp16, "f16", CHUNKS, N, A0, A1, A2, A3, A4)
BOTH_TYPES(1, 16, 8, 9, 10, 11, 12)
BOTH_TYPES(2, 32, 16, 17, 18, 19, 20)
BOTH_TYPES(3, 48, 24, 25, 26, 27, 28)
BOTH_TYPES(4, 64, 32, 33, 34, 35, 36)
BOTH_TYPES(5, 80, 40, 41, 42, 43, 44)
BOTH_TYPES(6, 96, 48, 49, 50, 51, 52)
BOTH_TYPES(7, 112, 56, 57, 58, 59, 60)
BOTH_TYPES(8, 128, 64, 65, 66, 67, 68)
BOTH_TYPES(9, 144, 72, 73, 74, 75, 76)
BOTH_TYPES(10, 160, 80, 81, 82, 83, 84)
BOTH_TYPES(11, 176, 88, 89, 90, 91, 92)
BOTH_TYPES(12, 192, 96, 97, 98, 99, 100)
BOTH_TYPES(13, 208, 104, 105, 106, 107, 108)
BOTH_TYPES(14, 224, 112, 113, 114, 115, 116)
BOTH_TYPES(15, 240, 120, 121, 122, 123, 124)
BOTH_TYPES(16, 256, 128, 129, 130, 131, 132)

template <int N, typename T16>
__device__ __forceinline__ void multiply_shared(float (*c)[4], u64 a, u64 b, int add) {
  Products<N, T16>::multiply_shared(c, a, b, add);
}
template <int N, typename T16> __device__ __forceinline__ void add_product(float (*c)[4], const unsigned* a, u64 b) {
  Products<N, T16>::add_product(c, a, b);
}
