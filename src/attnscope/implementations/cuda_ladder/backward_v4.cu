// Idea: a warp owns eight neighbouring keys, so that each pair loaded serves eight results from registers.
// Grid: (ceil(32 * ceil(T / 8) / block), B * H).
// Memory: an eighth of V3's row reads; lanes 0 to 7 write eight neighbours.
// Bound: instruction issue: the branch that asks whether key t3 + k lies above the diagonal sits in the inner loop.
// Against the previous rung: register reuse. The article calls it loop unrolling, yet the original has no unroll
//   pragma: UNROLL is a constant 8 that sizes register arrays. Compile with UNROLL = 1, 2, 4, 16 to see reuse alone.
//
// Compiled with UNROLL, at most 32. weights, grad_weights, grad_scores are (B * H, T, row_stride). Only t3 <= t is
// written; prepare zeroed the rest.
#include "../cuda_headers/device.cuh"

extern "C" __global__ void __launch_bounds__(1024)
    softmax_backward_warp_eight_keys(float* grad_scores, const float* weights, const float* grad_weights, int T,
                                     int row_stride, float scale) {
  int lane = threadIdx.x % 32, t3 = (blockIdx.x * blockDim.x + threadIdx.x) / 32 * UNROLL;
  if (t3 >= T) return;
  for (int t = t3; t < T; t++) {
    i64 row = ((i64)blockIdx.y * T + t) * row_stride;
    const float *p = weights + row, *dp = grad_weights + row;
    float own[UNROLL], sum[UNROLL];
    for (int k = 0; k < UNROLL; k++) {
      own[k] = t3 + k <= t ? p[t3 + k] : 0.0f;
      sum[k] = 0.0f;
    }
    for (int t2 = lane; t2 <= t; t2 += 32) {
      float weight = p[t2], grad = dp[t2];
      for (int k = 0; k < UNROLL; k++) {
        if (t3 + k > t) continue;
        float indicator = t2 == t3 + k ? 1.0f : 0.0f;
        sum[k] += weight * (indicator - own[k]) * grad;
      }
    }
    float mine = 0.0f;
    for (int k = 0; k < UNROLL; k++) {
      float total = warp_sum(sum[k]);
      if (lane == k) mine = total;
    }
    if (lane < UNROLL && t3 + lane <= t) grad_scores[row + t3 + lane] = scale * mine;
  }
}
