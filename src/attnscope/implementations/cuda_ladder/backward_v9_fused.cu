// Idea: no T x T matrix at all: what V8 reads twice and writes once is computed again, tile by tile, from the queries and
//   keys and one number a row that the forward kept (lse). Written once per side, so that nothing is added atomically:
//   one kernel owns keys and sums dK and dV over the queries, one owns queries and sums dQ over the keys.
// Grid: (ceil(T / rows a block), B * H), the blocks with the longest walk first; a warp owns 16 rows.
// Memory: tiles of 16-bit numbers through shared memory by asynchronous copies; the results of a product are the operand
//   of the next without leaving registers, because each side computes its scores with its own rows as rows.
// Bound: tensor cores: seven products where five would do with atomics.
// Against the previous rung: five cuBLAS products and a softmax kernel around four T x T matrices become three kernels
//   around none, and two permutes go. Deterministic, unlike the one-pass form.
// Predicted: at least 4 times over V8 at B4,H12,T1024,D64 in 16-bit, and memory linear in T.
//
// Compiled with T16, HEAD_DIM (a multiple of 16, at most 128), BLOCK_SIZE (64, 128 or 256) and COLUMNS (32 or 64), the
// rows of the tile that walks by. Strides count elements, are 64-bit and multiples of 8; d has stride 1.
// lse and delta are (B * H, T). Shared: (2 * BLOCK_SIZE / 2 + 2 * COLUMNS) * (HEAD_DIM + 8) * 2 + 2 * COLUMNS * 4 bytes.
#include "tiles.cuh"

#define ROWS (BLOCK_SIZE / 2)

// delta = rowsum(dO * O), a warp a row. Grid (ceil(B * H * T / (block / 32))).
extern "C" __global__ void rowsum_of_out_and_grad(float* delta, const T16* out, const T16* grad_out, i64 rows, int H,
                                                  int T, i64 ob, i64 oh, i64 ot, i64 gb, i64 gh, i64 gt) {
  i64 place = (i64)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
  if (place >= rows) return;
  i64 t = place % T, head = place / T, b = head / H, h = head % H;
  const T16 *o = out + b * ob + h * oh + t * ot, *g = grad_out + b * gb + h * gh + t * gt;
  float sum = 0.0f;
  for (int d = threadIdx.x % 32; d < HEAD_DIM; d += 32) sum += to_float(o[d]) * to_float(g[d]);
  sum = warp_sum(sum);
  if (threadIdx.x % 32 == 0) delta[place] = sum;
}

// s = A1 . B1^T and dp = A2 . B2^T over HEAD_DIM: rows warp_row.. of the own tiles against all rows of the walking ones.
__device__ __forceinline__ void two_products(float (*s)[4], float (*dp)[4], const T16* a1, const T16* a2, const T16* b1,
                                             const T16* b2, int warp_row) {
#pragma unroll
  for (int d = 0; d < DIM_STEPS; d++) {
    unsigned own1[4], own2[4];
    load_a(own1, a1, warp_row, d * 16);
    load_a(own2, a2, warp_row, d * 16);
#pragma unroll
    for (int n = 0; n < COLUMNS / 16; n++) {
      unsigned walking[4];
      load_b_rows(walking, b1, n * 16, d * 16);
      multiply_add(s[2 * n], own1, walking, T16());
      multiply_add(s[2 * n + 1], own1, walking + 2, T16());
      load_b_rows(walking, b2, n * 16, d * 16);
      multiply_add(dp[2 * n], own2, walking, T16());
      multiply_add(dp[2 * n + 1], own2, walking + 2, T16());
    }
  }
}

// acc += weights . tile: depth is the walking tile's rows.
__device__ __forceinline__ void accumulate(float (*acc)[4], const float (*weights)[4], const T16* tile) {
#pragma unroll
  for (int step = 0; step < COLUMNS / 16; step++) {
    unsigned a[4];
    results_to_a<T16>(a, weights, step);
#pragma unroll
    for (int n = 0; n < DIM_STEPS; n++) {
      unsigned values[4];
      load_b_dims(values, tile, step * 16, n * 16);
      multiply_add(acc[2 * n], a, values, T16());
      multiply_add(acc[2 * n + 1], a, values + 2, T16());
    }
  }
}

extern "C" __global__ void __launch_bounds__(BLOCK_SIZE)
    grad_keys_and_values(T16* dk, T16* dv, const T16* q, const T16* k, const T16* v, const T16* grad_out,
                         const float* lse, const float* delta, int H, int T, float scale, i64 dkb, i64 dkh, i64 dkt,
                         i64 dvb, i64 dvh, i64 dvt, i64 qb, i64 qh, i64 qt, i64 kb, i64 kh, i64 kt, i64 vb, i64 vh,
                         i64 vt, i64 gb, i64 gh, i64 gt) {
  extern __shared__ uint4 shared[];
  T16 *k_tile = (T16*)shared, *v_tile = k_tile + ROWS * TILE_STRIDE, *q_tile = v_tile + ROWS * TILE_STRIDE,
      *g_tile = q_tile + COLUMNS * TILE_STRIDE;
  float *lse2 = (float*)(g_tile + COLUMNS * TILE_STRIDE), *row_sum = lse2 + COLUMNS;
  int b = blockIdx.y / H, h = blockIdx.y % H, lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * 16;
  int first = blockIdx.x * ROWS, key = first + warp_row + lane / 4;
  q += b * qb + h * qh, k += b * kb + h * kh, v += b * vb + h * vh, grad_out += b * gb + h * gh;
  lse += (i64)blockIdx.y * T, delta += (i64)blockIdx.y * T;
  copy_tile(k_tile, k, kt, first, ROWS, T);
  copy_tile(v_tile, v, vt, first, ROWS, T);

  float dk_acc[DIM_TILES][4] = {}, dv_acc[DIM_TILES][4] = {}, scale2 = scale * LOG2_E;
  for (int query = first / COLUMNS * COLUMNS; query < T; query += COLUMNS) {
    __syncthreads();
    copy_tile(q_tile, q, qt, query, COLUMNS, T);
    copy_tile(g_tile, grad_out, gt, query, COLUMNS, T);
    commit_copies();
    for (int i = threadIdx.x; i < COLUMNS; i += BLOCK_SIZE) {
      lse2[i] = query + i < T ? lse[query + i] * LOG2_E : 0.0f;
      row_sum[i] = query + i < T ? delta[query + i] : 0.0f;
    }
    wait_for_copies<0>();
    __syncthreads();
    if (query + COLUMNS - 1 < first + warp_row) continue;  // no query of the tile sees a key of this warp

    float p[COLUMNS / 8][4] = {}, ds[COLUMNS / 8][4] = {};
    two_products(p, ds, k_tile, v_tile, q_tile, g_tile, warp_row);
#pragma unroll
    for (int n = 0; n < COLUMNS / 8; n++) {
#pragma unroll
      for (int e = 0; e < 4; e++) {
        int column = n * 8 + 2 * (lane % 4) + e % 2;
        bool seen = query + column >= key + e / 2 * 8 && query + column < T;
        p[n][e] = seen ? exp2_fast(p[n][e] * scale2 - lse2[column]) : 0.0f;
        ds[n][e] = p[n][e] * (ds[n][e] - row_sum[column]);
      }
    }
    accumulate(dv_acc, p, g_tile);
    accumulate(dk_acc, ds, q_tile);
  }
  store_rows(dk + b * dkb + h * dkh, dkt, key, T, dk_acc, scale, scale);
  store_rows(dv + b * dvb + h * dvh, dvt, key, T, dv_acc, 1.0f, 1.0f);
}

extern "C" __global__ void __launch_bounds__(BLOCK_SIZE)
    grad_queries(T16* dq, const T16* q, const T16* k, const T16* v, const T16* grad_out, const float* lse,
                 const float* delta, int H, int T, float scale, i64 dqb, i64 dqh, i64 dqt, i64 qb, i64 qh, i64 qt,
                 i64 kb, i64 kh, i64 kt, i64 vb, i64 vh, i64 vt, i64 gb, i64 gh, i64 gt) {
  extern __shared__ uint4 shared[];
  T16 *q_tile = (T16*)shared, *g_tile = q_tile + ROWS * TILE_STRIDE, *k_tile = g_tile + ROWS * TILE_STRIDE,
      *v_tile = k_tile + COLUMNS * TILE_STRIDE;
  int b = blockIdx.y / H, h = blockIdx.y % H, lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * 16;
  int first = (gridDim.x - 1 - blockIdx.x) * ROWS, row = first + warp_row + lane / 4;
  int last = min(first + ROWS, T) - 1;
  q += b * qb + h * qh, k += b * kb + h * kh, v += b * vb + h * vh, grad_out += b * gb + h * gh;
  copy_tile(q_tile, q, qt, first, ROWS, T);
  copy_tile(g_tile, grad_out, gt, first, ROWS, T);

  float lse2[2], row_sum[2];
#pragma unroll
  for (int r = 0; r < 2; r++) {
    i64 place = (i64)blockIdx.y * T + row + r * 8;
    lse2[r] = row + r * 8 < T ? lse[place] * LOG2_E : 0.0f;
    row_sum[r] = row + r * 8 < T ? delta[place] : 0.0f;
  }
  float dq_acc[DIM_TILES][4] = {}, scale2 = scale * LOG2_E;
  for (int key = 0; key <= last; key += COLUMNS) {
    __syncthreads();
    copy_tile(k_tile, k, kt, key, COLUMNS, T);
    copy_tile(v_tile, v, vt, key, COLUMNS, T);
    commit_copies();
    wait_for_copies<0>();
    __syncthreads();
    if (key > first + warp_row + 15) continue;  // this warp sees nothing of the tile

    float p[COLUMNS / 8][4] = {}, ds[COLUMNS / 8][4] = {};
    two_products(p, ds, q_tile, g_tile, k_tile, v_tile, warp_row);
#pragma unroll
    for (int n = 0; n < COLUMNS / 8; n++) {
#pragma unroll
      for (int e = 0; e < 4; e++) {
        int r = e / 2, column = key + n * 8 + 2 * (lane % 4) + e % 2;
        float weight = column <= row + r * 8 && row + r * 8 < T ? exp2_fast(p[n][e] * scale2 - lse2[r]) : 0.0f;
        ds[n][e] = weight * (ds[n][e] - row_sum[r]);
      }
    }
    accumulate(dq_acc, ds, k_tile);
  }
  store_rows(dq + b * dqb + h * dqh, dqt, row, T, dq_acc, scale, scale);
}
