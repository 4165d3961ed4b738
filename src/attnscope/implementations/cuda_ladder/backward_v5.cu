// Idea: take the special cases out of the hot loop. The indicator can be 1 only where t2 meets t3 .. t3 + 7, so the walk
//   over t2 is split in three: before (no indicator), across (indicator), after (no indicator). Keys above the diagonal
//   are not branched around but read at a clipped index, and their results are not stored.
// Grid: as V4, (ceil(32 * ceil(T / 8) / block), B * H).
// Memory: as V4.
// Bound: instruction issue, now one fused multiply-add a result and step.
// Against the previous rung: the same loads without branches between them: with the indicator gone, sum += own * product
//   for eight results is eight instructions.
//
// Compiled with UNROLL, at most 32. weights, grad_weights, grad_scores are (B * H, T, row_stride). Only t3 <= t is
// written; prepare zeroed the rest.
#include "../cuda_headers/device.cuh"

extern "C" __global__ void __launch_bounds__(1024)
    softmax_backward_warp_no_branches(float* grad_scores, const float* weights, const float* grad_weights, int T,
                                      int row_stride, float scale) {
  int lane = threadIdx.x % 32, t3 = (blockIdx.x * blockDim.x + threadIdx.x) / 32 * UNROLL;
  if (t3 >= T) return;
  for (int t = t3; t < T; t++) {
    i64 row = ((i64)blockIdx.y * T + t) * row_stride;
    const float *p = weights + row, *dp = grad_weights + row;
    float own[UNROLL], sum[UNROLL];
    for (int k = 0; k < UNROLL; k++) {
      own[k] = p[min(t, t3 + k)];
      sum[k] = 0.0f;
    }
    // The lane's steps t2 = lane, lane + 32, ... that lie wholly before t3, then those that may meet t3 .. t3 + UNROLL - 1
    // (one or two), then the rest.
    int t2 = lane;
    for (; t2 < t3; t2 += 32) {
      float product = p[t2] * dp[t2];
      for (int k = 0; k < UNROLL; k++) sum[k] -= own[k] * product;
    }
    for (; t2 < t3 + UNROLL && t2 <= t; t2 += 32) {
      float product = p[t2] * dp[t2];
      for (int k = 0; k < UNROLL; k++) sum[k] += ((t2 == t3 + k ? 1.0f : 0.0f) - own[k]) * product;
    }
    for (; t2 <= t; t2 += 32) {
      float product = p[t2] * dp[t2];
      for (int k = 0; k < UNROLL; k++) sum[k] -= own[k] * product;
    }
    float mine = 0.0f;
    for (int k = 0; k < UNROLL; k++) {
      float total = warp_sum(sum[k]);
      if (lane == k) mine = total;
    }
    if (lane < UNROLL && t3 + lane <= t) grad_scores[row + t3 + lane] = scale * mine;
  }
}
