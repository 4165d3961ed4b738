// Idea: V2's order again, on tensor cores: a warp holds 16 query rows, their running maximum, sum and output in
//   registers, and walks over tiles of 64 keys. Scores become the next product's operand without leaving registers.
// Grid: (ceil(T / rows a block), B * H), the longest rows first; a warp 16 rows, so a block of 128 threads 64.
// Memory: queries, keys and values are read straight from the model's layout, 16 bytes a thread, into padded tiles of
//   shared memory; no permute, no T x T matrix. Tiles above the diagonal are never touched.
// Bound: tensor cores and exponentials in the limit; here the load of a tile and the products on it take turns, so
//   neither is busy for long.
// Against the previous rung: (V5, V6) two T x T matrices of 16-bit numbers, written and read, fall away. V2 failed with
//   this very order for want of parallelism: here there are T / 64 blocks a head, and a row is spread over four lanes.
// Predicted: bytes fall from about 0.9 GB to 0.1 GB at B8,H12,T1024,D64, so at least 4 times over V5.
//
// Compiled with T16 (bf16 or fp16), HEAD_DIM (a multiple of 16, at most 128) and BLOCK_SIZE (64, 128 or 256).
// Strides count elements, are 64-bit and multiples of 8; d has stride 1. scale >= 0. lse is (B * H, T).
// Shared: (BLOCK_SIZE / 2 + 2 * 64) * (HEAD_DIM + 8) numbers of 2 bytes.
#include "tiles.cuh"

#define QUERIES (BLOCK_SIZE / 2)
#define KEYS 64

extern "C" __global__ void __launch_bounds__(BLOCK_SIZE)
    flash_tensor_cores(T16* out, float* lse, const T16* q, const T16* k, const T16* v, int H, int T, float scale,
                       i64 ob, i64 oh, i64 ot, i64 qb, i64 qh, i64 qt, i64 kb, i64 kh, i64 kt, i64 vb, i64 vh, i64 vt) {
  extern __shared__ uint4 shared[];
  T16 *q_tile = (T16*)shared, *k_tile = q_tile + QUERIES * TILE_STRIDE, *v_tile = k_tile + KEYS * TILE_STRIDE;
  int b = blockIdx.y / H, h = blockIdx.y % H, lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * 16;
  int first = (gridDim.x - 1 - blockIdx.x) * QUERIES;
  q += b * qb + h * qh, k += b * kb + h * kh, v += b * vb + h * vh, out += b * ob + h * oh;

  load_tile(q_tile, q, qt, first, QUERIES, T);
  __syncthreads();
  unsigned query[DIM_STEPS][4];
#pragma unroll
  for (int d = 0; d < DIM_STEPS; d++) load_a(query[d], q_tile, warp_row, d * 16);

  float acc[DIM_TILES][4] = {}, top[2] = {negative_infinity(), negative_infinity()}, sum[2] = {};
  float scale2 = scale * LOG2_E;  // exponents to base 2: one multiply-add and one instruction each
  int row = first + warp_row + lane / 4, last = min(first + QUERIES, T) - 1;
  for (int key = 0; key <= last; key += KEYS) {
    __syncthreads();
    load_tile(k_tile, k, kt, key, KEYS, T);
    load_tile(v_tile, v, vt, key, KEYS, T);
    __syncthreads();
    if (key > first + warp_row + 15) continue;  // this warp sees nothing of the tile

    float s[KEYS / 8][4] = {};
#pragma unroll
    for (int d = 0; d < DIM_STEPS; d++) {
#pragma unroll
      for (int n = 0; n < KEYS / 16; n++) {
        unsigned keys[4];
        load_b_rows(keys, k_tile, n * 16, d * 16);
        multiply_add(s[2 * n], query[d], keys, T16());
        multiply_add(s[2 * n + 1], query[d], keys + 2, T16());
      }
    }
    if (key + KEYS - 1 > first + warp_row) {
#pragma unroll
      for (int n = 0; n < KEYS / 8; n++) {
#pragma unroll
        for (int e = 0; e < 4; e++) {
          if (key + n * 8 + 2 * (lane % 4) + e % 2 > row + e / 2 * 8) s[n][e] = negative_infinity();
        }
      }
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {  // the lane's two rows
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
          s[n][e] = x == negative_infinity() ? 0.0f : exp2_fast(x * scale2 - shift);
          added += s[n][e];
        }
      }
      sum[r] = sum[r] * rescale + added;
#pragma unroll
      for (int n = 0; n < DIM_TILES; n++) acc[n][2 * r] *= rescale, acc[n][2 * r + 1] *= rescale;
    }
#pragma unroll
    for (int step = 0; step < KEYS / 16; step++) {
      unsigned weights[4];
      results_to_a<T16>(weights, s, step);
#pragma unroll
      for (int n = 0; n < DIM_STEPS; n++) {
        unsigned values[4];
        load_b_dims(values, v_tile, step * 16, n * 16);
        multiply_add(acc[2 * n], weights, values, T16());
        multiply_add(acc[2 * n + 1], weights, values + 2, T16());
      }
    }
  }

  float total0 = quad_sum(sum[0]), total1 = quad_sum(sum[1]);
  store_rows(out, ot, row, T, acc, 1.0f / total0, 1.0f / total1);
  if (lane % 4 == 0) {
    i64 place = (i64)blockIdx.y * T + row;
    if (row < T) lse[place] = top[0] * scale + __logf(total0);
    if (row + 8 < T) lse[place + 8] = top[1] * scale + __logf(total1);
  }
}
