// Idea: V7's algebra with the last tricks: four rows a block, the longest first, so that no straggler ends the launch
//   alone; a row stays in registers between its two passes; cache hints say which loads are the last.
// Grid: (ceil(T / 4), B * H).
// Memory: as V7. Rows keep up to ROW_REGISTERS groups of four a thread in registers; only longer rows are read a second
//   time (streaming).
// Bound: memory bandwidth.
// Against the previous rung: nothing to see in the whole operation, whose products dominate; timed alone it shows.
//   Shared slots alternate from row to row, so that one barrier a row is enough; the published program reuses its array
//   without one. Any T: the last block stops early.
// Tried and lost on an H200: hints on the first loads and the stores too, as published; the next row's loads before this
//   row's sum (predicted to win, with more bytes in flight), which takes twice the registers and so half the blocks.
//
// Compiled with BLOCK_SIZE.
// weights, grad_weights, grad_scores are (B * H, T, row_stride), row_stride a multiple of 4. Only t3 <= t is written (up
// to the end of a group of four, where it writes the zeros that prepare wrote).
#include "../cuda_headers/device.cuh"

#define ROWS 4
#define ROW_REGISTERS (BLOCK_SIZE <= 64 ? 4 : BLOCK_SIZE <= 128 ? 2 : 1)

// What lies above the diagonal has weight 0, but its dP may be anything, so neither is used.
__device__ __forceinline__ void hide_above(float4& p, float4& dp, int first, int t) {
  if (first + 1 > t) p.y = dp.y = 0.0f;
  if (first + 2 > t) p.z = dp.z = 0.0f;
  if (first + 3 > t) p.w = dp.w = 0.0f;
}
__device__ __forceinline__ float dot(float4 p, float4 dp) {
  return p.x * dp.x + p.y * dp.y + p.z * dp.z + p.w * dp.w;
}
__device__ __forceinline__ float4 times_difference(float4 p, float4 dp, float scale, float sum) {
  return make_float4(scale * p.x * (dp.x - sum), scale * p.y * (dp.y - sum), scale * p.z * (dp.z - sum),
                     scale * p.w * (dp.w - sum));
}

extern "C" __global__ void __launch_bounds__(BLOCK_SIZE)
    softmax_backward_four_rows(float* grad_scores, const float* weights, const float* grad_weights, int T,
                               int row_stride, float scale) {
  __shared__ float partial[2][32];
  for (int r = 0; r < ROWS; r++) {
    int t = T - 1 - ((int)blockIdx.x * ROWS + r), groups = t / 4 + 1;
    if (t < 0) return;
    i64 row = ((i64)blockIdx.y * T + t) * row_stride;
    const float4 *p = (const float4*)(weights + row), *dp = (const float4*)(grad_weights + row);
    float4* ds = (float4*)(grad_scores + row);
    float4 a[ROW_REGISTERS], b[ROW_REGISTERS];
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < ROW_REGISTERS; i++) {
      int g = threadIdx.x + i * BLOCK_SIZE;
      a[i] = b[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if (g < groups) a[i] = p[g], b[i] = dp[g];
    }
#pragma unroll
    for (int i = 0; i < ROW_REGISTERS; i++) {
      hide_above(a[i], b[i], 4 * (threadIdx.x + i * BLOCK_SIZE), t);
      sum += dot(a[i], b[i]);
    }
    for (int g = threadIdx.x + ROW_REGISTERS * BLOCK_SIZE; g < groups; g += BLOCK_SIZE) {
      float4 x = p[g], y = dp[g];
      hide_above(x, y, 4 * g, t);
      sum += dot(x, y);
    }
    sum = block_sum(sum, partial[r % 2]);
#pragma unroll
    for (int i = 0; i < ROW_REGISTERS; i++) {
      int g = threadIdx.x + i * BLOCK_SIZE;
      if (g < groups) ds[g] = times_difference(a[i], b[i], scale, sum);
    }
    for (int g = threadIdx.x + ROW_REGISTERS * BLOCK_SIZE; g < groups; g += BLOCK_SIZE) {
      float4 x = load_streaming(p + g), y = load_streaming(dp + g);
      hide_above(x, y, 4 * g, t);
      ds[g] = times_difference(x, y, scale, sum);
    }
  }
}
