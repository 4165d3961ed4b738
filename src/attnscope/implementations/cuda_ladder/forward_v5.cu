// Idea: 16-bit numbers: queries, keys, values, scores and weights are bf16 or fp16; sums and exponents stay in fp32.
// Grid: as V4: a warp a row, long rows first.
// Memory: half the bytes everywhere; a lane loads eight scores (16 bytes) at once.
// Bound: memory bandwidth still, for the products too: a T x T matrix in and out around a few thousand FLOPs a row.
// Against the previous rung: the same algorithm on half the bytes. The price is accuracy: scores are rounded to 8 (bf16)
//   or 11 (fp16) bits before the exponent sees them, which no fused kernel does.
// V6 is this kernel too, without the permutes around it.
//
// Compiled with SCORE_T (bf16 or fp16). scores and weights are (B * H, T, row_stride), row_stride a multiple of 8.
#include "../cuda_headers/device.cuh"

#define PER_LANE 8

// Eight scores that start at column `first` of row t, times sign, as floats; -3e38 above the diagonal.
__device__ __forceinline__ void unpack(uint4 raw, int first, int t, float sign, float* x) {
  unsigned pairs[4] = {raw.x, raw.y, raw.z, raw.w};
  for (int p = 0; p < 4; p++) {
    x[2 * p] = first + 2 * p <= t ? to_float(low_half(pairs[p], SCORE_T())) * sign : -3.0e38f;
    x[2 * p + 1] = first + 2 * p + 1 <= t ? to_float(high_half(pairs[p], SCORE_T())) * sign : -3.0e38f;
  }
}

extern "C" __global__ void __launch_bounds__(1024)
    softmax_one_warp_a_row_16bit(SCORE_T* weights, const SCORE_T* scores, i64 rows, int T, int row_stride,
                                 float scale) {
  int lane = threadIdx.x % 32, warps = blockDim.x / 32;
  i64 row = rows - 1 - ((i64)blockIdx.x * warps + threadIdx.x / 32);
  if (row < 0) return;
  int t = (int)(row % T), groups = t / PER_LANE + 1;
  const uint4* score = (const uint4*)(scores + row * row_stride);
  uint4* weight = (uint4*)(weights + row * row_stride);
  float sign = scale < 0.0f ? -1.0f : 1.0f, size = fabsf(scale);
  float top = -3.0e38f, sum = 0.0f, x[PER_LANE];
  for (int g = lane; g < groups; g += 32) {
    unpack(score[g], g * PER_LANE, t, sign, x);
    float new_top = top;
    for (int e = 0; e < PER_LANE; e++) new_top = fmaxf(new_top, x[e]);
    sum *= exp_fast(size * (top - new_top));
    for (int e = 0; e < PER_LANE; e++) sum += g * PER_LANE + e <= t ? exp_fast(size * (x[e] - new_top)) : 0.0f;
    top = new_top;
  }
  float row_top = warp_max(top);
  sum = warp_sum(sum * exp_fast(size * (top - row_top)));
  float inverse = 1.0f / sum;
  for (int g = lane; g < groups; g += 32) {
    unpack(score[g], g * PER_LANE, t, sign, x);
    for (int e = 0; e < PER_LANE; e++) x[e] = g * PER_LANE + e <= t ? exp_fast(size * (x[e] - row_top)) * inverse : 0.0f;
    uint4 w;
    w.x = pack2<SCORE_T>(x[0], x[1]);
    w.y = pack2<SCORE_T>(x[2], x[3]);
    w.z = pack2<SCORE_T>(x[4], x[5]);
    w.w = pack2<SCORE_T>(x[6], x[7]);
    weight[g] = w;
  }
}
