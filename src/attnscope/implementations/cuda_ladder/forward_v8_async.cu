// Idea: while one tile of keys and values is computed on, the next is on its way: asynchronous copies into the second of
//   two buffers, and each operand of keys and values that is read from shared memory serves ROW_TILES tiles of 16 rows.
// Grid: (ceil(T / rows a block), B * H), the longest rows first; a warp 16 * ROW_TILES rows.
// Memory: as V7, but copies go from global to shared memory without passing through registers, one barrier a tile.
// Bound: tensor cores (Ampere's instructions, which cannot keep Hopper's tensor cores busy as wgmma does) and, at D = 64,
//   the exponentials, which nothing here overlaps with products of the same warp.
// Against the previous rung: the wait for memory disappears behind the products, and shared memory is read half as often.
// Predicted: 1.5 times over V7; within reach of FlashAttention-2, out of reach of wgmma kernels on Hopper.
//
// Compiled with T16, HEAD_DIM (a multiple of 16, at most 128), BLOCK_SIZE (64, 128 or 256) and ROW_TILES (1 or 2).
// Strides count elements, are 64-bit and multiples of 8; d has stride 1. scale >= 0. lse is (B * H, T).
// Shared: (BLOCK_SIZE / 2 * ROW_TILES + 4 * 64) * (HEAD_DIM + 8) numbers of 2 bytes.
#include "tiles.cuh"

#define WARP_ROWS (16 * ROW_TILES)
#define QUERIES (BLOCK_SIZE / 32 * WARP_ROWS)
#define KEYS 64
// Query operands stay in registers for all tiles, but on Blackwell, whose compiler runs out of them, are read again.
#ifndef QUERIES_STAY
#define QUERIES_STAY (__CUDA_ARCH__ < 1000)
#endif

// Online softmax of the scores of one tile of 16 rows: s becomes weights; maximum, sum and output follow.
__device__ __forceinline__ void softmax_step(float (*s)[4], float (*acc)[4], float* top, float* sum, float scale2,
                                             bool masked) {
#pragma unroll
  for (int r = 0; r < 2; r++) {
    float new_top = top[r];
#pragma unroll
    for (int n = 0; n < KEYS / 8; n++) new_top = fmaxf(new_top, fmaxf(s[n][2 * r], s[n][2 * r + 1]));
    new_top = quad_max(new_top);  // finite: each row sees key 0, and tile 0 comes first
    float rescale = exp2_fast((top[r] - new_top) * scale2), shift = new_top * scale2;
    if (top[r] == negative_infinity()) rescale = 0.0f;  // also where scale is 0
    top[r] = new_top;
    float added = 0.0f;
#pragma unroll
    for (int n = 0; n < KEYS / 8; n++) {
#pragma unroll
      for (int e = 2 * r; e < 2 * r + 2; e++) {
        float x = s[n][e];
        s[n][e] = masked && x == negative_infinity() ? 0.0f : exp2_fast(x * scale2 - shift);
        added += s[n][e];
      }
    }
    sum[r] = sum[r] * rescale + added;
#pragma unroll
    for (int n = 0; n < DIM_TILES; n++) acc[n][2 * r] *= rescale, acc[n][2 * r + 1] *= rescale;
  }
}

extern "C" __global__ void __launch_bounds__(BLOCK_SIZE)
    flash_async_copies(T16* out, float* lse, const T16* q, const T16* k, const T16* v, int H, int T, float scale,
                       i64 ob, i64 oh, i64 ot, i64 qb, i64 qh, i64 qt, i64 kb, i64 kh, i64 kt, i64 vb, i64 vh, i64 vt) {
  extern __shared__ uint4 shared[];
  T16 *q_tile = (T16*)shared, *kv_tiles = q_tile + QUERIES * TILE_STRIDE;
  int b = blockIdx.y / H, h = blockIdx.y % H, lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * WARP_ROWS;
  int first = (gridDim.x - 1 - blockIdx.x) * QUERIES, row = first + warp_row + lane / 4;
  int last = min(first + QUERIES, T) - 1;
  q += b * qb + h * qh, k += b * kb + h * kh, v += b * vb + h * vh, out += b * ob + h * oh;

  copy_tile(q_tile, q, qt, first, QUERIES, T);
  copy_tile(kv_tiles, k, kt, 0, KEYS, T);
  copy_tile(kv_tiles + KEYS * TILE_STRIDE, v, vt, 0, KEYS, T);
  commit_copies();

  float acc[ROW_TILES][DIM_TILES][4] = {}, top[ROW_TILES][2], sum[ROW_TILES][2] = {};
#pragma unroll
  for (int m = 0; m < ROW_TILES; m++) top[m][0] = top[m][1] = negative_infinity();
  float scale2 = scale * LOG2_E;
#if QUERIES_STAY
  unsigned query[ROW_TILES][DIM_STEPS][4];
#endif

  for (int key = 0, stage = 0; key <= last; key += KEYS, stage ^= 1) {
    T16 *k_tile = kv_tiles + stage * 2 * KEYS * TILE_STRIDE, *v_tile = k_tile + KEYS * TILE_STRIDE;
    wait_for_copies<0>();
    __syncthreads();  // all copies of this tile have arrived, and all warps are done with the other buffer
    if (key + KEYS <= last) {
      T16* next = kv_tiles + (stage ^ 1) * 2 * KEYS * TILE_STRIDE;
      copy_tile(next, k, kt, key + KEYS, KEYS, T);
      copy_tile(next + KEYS * TILE_STRIDE, v, vt, key + KEYS, KEYS, T);
      commit_copies();
    }
#if QUERIES_STAY
    if (key == 0) {
#pragma unroll
      for (int m = 0; m < ROW_TILES; m++) {
#pragma unroll
        for (int d = 0; d < DIM_STEPS; d++) load_a(query[m][d], q_tile, warp_row + m * 16, d * 16);
      }
    }
#endif
    if (key > first + warp_row + WARP_ROWS - 1) continue;  // this warp sees nothing of the tile

    float s[ROW_TILES][KEYS / 8][4] = {};
#pragma unroll
    for (int d = 0; d < DIM_STEPS; d++) {
#if QUERIES_STAY
#define QUERY(m) query[m][d]
#else
#define QUERY(m) query[m]
      unsigned query[ROW_TILES][4];
#pragma unroll
      for (int m = 0; m < ROW_TILES; m++) load_a(query[m], q_tile, warp_row + m * 16, d * 16);
#endif
#pragma unroll
      for (int n = 0; n < KEYS / 16; n++) {
        unsigned keys[4];
        load_b_rows(keys, k_tile, n * 16, d * 16);
#pragma unroll
        for (int m = 0; m < ROW_TILES; m++) {
          multiply_add(s[m][2 * n], QUERY(m), keys, T16());
          multiply_add(s[m][2 * n + 1], QUERY(m), keys + 2, T16());
        }
      }
    }
    bool masked = key + KEYS - 1 > first + warp_row;
    if (masked) {
#pragma unroll
      for (int m = 0; m < ROW_TILES; m++) {
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++) {
#pragma unroll
          for (int e = 0; e < 4; e++) {
            if (key + n * 8 + 2 * (lane % 4) + e % 2 > row + m * 16 + e / 2 * 8) s[m][n][e] = negative_infinity();
          }
        }
      }
    }
#pragma unroll
    for (int m = 0; m < ROW_TILES; m++) softmax_step(s[m], acc[m], top[m], sum[m], scale2, masked);
#pragma unroll
    for (int step = 0; step < KEYS / 16; step++) {
      unsigned weights[ROW_TILES][4];
#pragma unroll
      for (int m = 0; m < ROW_TILES; m++) results_to_a<T16>(weights[m], s[m], step);
#pragma unroll
      for (int n = 0; n < DIM_STEPS; n++) {
        unsigned values[4];
        load_b_dims(values, v_tile, step * 16, n * 16);
#pragma unroll
        for (int m = 0; m < ROW_TILES; m++) {
          multiply_add(acc[m][2 * n], weights[m], values, T16());
          multiply_add(acc[m][2 * n + 1], weights[m], values + 2, T16());
        }
      }
    }
  }

#pragma unroll
  for (int m = 0; m < ROW_TILES; m++) {
    float total0 = quad_sum(sum[m][0]), total1 = quad_sum(sum[m][1]);
    int r = row + m * 16;
    store_rows(out, ot, r, T, acc[m], 1.0f / total0, 1.0f / total1);
    if (lane % 4 == 0) {
      i64 place = (i64)blockIdx.y * T + r;
      if (r < T) lse[place] = top[m][0] * scale + __logf(total0);
      if (r + 8 < T) lse[place + 8] = top[m][1] * scale + __logf(total1);
    }
  }
}
