// Idea: the softmax Jacobian as the CPU writes it: for each key t3, loop over batch, heads, rows and keys.
//   dscores[t][t3] = scale * sum over t2 of P[t][t2] * (1[t2 == t3] - P[t][t3]) * dP[t][t2]
// Grid: (ceil(T / block), B * H) as published, and blockIdx.y is never read: all B * H rows of blocks do the whole work
//   and write the same values over each other. backward_v1_fixed launches one row of blocks instead.
// Memory: neighbouring lanes start at different rows and walk in step, so their reads lie T floats apart.
// Bound: latency: T threads, each with B * H * T * T / 2 dependent steps ahead of it.
// Against the previous rung: there is none. The redundancy looks like the whole trouble (48 times at B4,H12), but the
//   redundant blocks run beside each other: what hurts most is the serial loop. V1, V1-fixed and V2 part the two.
//
// weights, grad_weights, grad_scores are (B * H, T, row_stride). Only t3 <= t is written; prepare zeroed the rest.
#include "../cuda_headers/device.cuh"

extern "C" __global__ void __launch_bounds__(1024)
    softmax_backward_serial(float* grad_scores, const float* weights, const float* grad_weights, int heads, int T,
                            int row_stride, float scale) {
  int t3 = blockIdx.x * blockDim.x + threadIdx.x;
  if (t3 >= T) return;
  for (int head = 0; head < heads; head++) {
    for (int t = t3; t < T; t++) {
      i64 row = ((i64)head * T + t) * row_stride;
      const float *p = weights + row, *dp = grad_weights + row;
      float own = p[t3], sum = 0.0f;
      for (int t2 = 0; t2 <= t; t2++) {
        float indicator = t2 == t3 ? 1.0f : 0.0f;
        sum += p[t2] * (indicator - own) * dp[t2];
      }
      grad_scores[row + t3] = scale * sum;
    }
  }
}
