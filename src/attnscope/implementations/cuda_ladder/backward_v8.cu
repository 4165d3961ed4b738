// Idea: V7's algebra with the last tricks: four rows a block, the longest first, so that no straggler ends the launch
//   alone; cache hints that say the row is not needed again.
// Grid: (ceil(T / 4), B * H).
// Memory: as V7. Rows keep up to ROW_REGISTERS groups of four a thread in registers between the two passes; only longer
//   rows are read a second time (streaming).
// Bound: memory bandwidth.
// Against the previous rung: nothing to see in the whole operation, whose products dominate; timed alone it shows.
//   Shared slots alternate from row to row, so that one barrier a row is enough; the published program reuses its array
//   without one. Any T: the last block stops early.
//
// weights, grad_weights, grad_scores are (B * H, T, row_stride), row_stride a multiple of 4. Only t3 <= t is written (up
// to the end of a group of four, where it writes the zeros that prepare wrote).
#include "device.cuh"

#define ROWS 4
#define ROW_REGISTERS 4

extern "C" __global__ void __launch_bounds__(1024)
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
      int g = threadIdx.x + i * blockDim.x;
      a[i] = b[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if (g < groups) {
        a[i] = load_streaming(p + g);
        b[i] = load_streaming(dp + g);
      }
    }
#pragma unroll
    for (int i = 0; i < ROW_REGISTERS; i++) {
      int g = threadIdx.x + i * blockDim.x;
      // What lies above the diagonal has weight 0, but its dP may be anything, so neither is used.
      if (4 * g + 1 > t) a[i].y = b[i].y = 0.0f;
      if (4 * g + 2 > t) a[i].z = b[i].z = 0.0f;
      if (4 * g + 3 > t) a[i].w = b[i].w = 0.0f;
      sum += a[i].x * b[i].x + a[i].y * b[i].y + a[i].z * b[i].z + a[i].w * b[i].w;
    }
    for (int g = threadIdx.x + ROW_REGISTERS * blockDim.x; g < groups; g += blockDim.x) {
      float4 x = p[g], y = dp[g];
      sum += x.x * y.x;
      if (4 * g + 1 <= t) sum += x.y * y.y;
      if (4 * g + 2 <= t) sum += x.z * y.z;
      if (4 * g + 3 <= t) sum += x.w * y.w;
    }
    sum = block_sum(sum, partial[r % 2]);
#pragma unroll
    for (int i = 0; i < ROW_REGISTERS; i++) {
      int g = threadIdx.x + i * blockDim.x;
      if (g < groups)
        store_streaming(ds + g, make_float4(scale * a[i].x * (b[i].x - sum), scale * a[i].y * (b[i].y - sum),
                                            scale * a[i].z * (b[i].z - sum), scale * a[i].w * (b[i].w - sum)));
    }
    for (int g = threadIdx.x + ROW_REGISTERS * blockDim.x; g < groups; g += blockDim.x) {
      float4 x = load_streaming(p + g), y = load_streaming(dp + g), z;
      z.x = scale * x.x * (y.x - sum);
      z.y = 4 * g + 1 <= t ? scale * x.y * (y.y - sum) : 0.0f;
      z.z = 4 * g + 2 <= t ? scale * x.z * (y.z - sum) : 0.0f;
      z.w = 4 * g + 3 <= t ? scale * x.w * (y.w - sum) : 0.0f;
      store_streaming(ds + g, z);
    }
  }
}
