// Idea: the loop over batch and heads becomes the grid's second dimension.
// Grid: (ceil(T / block), B * H): a thread owns one key t3 of one head; rows and keys are loops within the thread.
// Memory: as V1, uncoalesced: lanes are on different rows at the same time.
// Bound: sector waste in L1 and L2, T * T * T / 6 steps a head.
// Against the previous rung: B * H times the parallelism, and each value is computed once.
//
// weights, grad_weights, grad_scores are (B * H, T, row_stride). Only t3 <= t is written; prepare zeroed the rest.
#include "../cuda_headers/device.cuh"

extern "C" __global__ void __launch_bounds__(1024)
    softmax_backward_thread_a_key(float* grad_scores, const float* weights, const float* grad_weights, int T,
                                  int row_stride, float scale) {
  int t3 = blockIdx.x * blockDim.x + threadIdx.x;
  if (t3 >= T) return;
  for (int t = t3; t < T; t++) {
    i64 row = ((i64)blockIdx.y * T + t) * row_stride;
    const float *p = weights + row, *dp = grad_weights + row;
    float own = p[t3], sum = 0.0f;
    for (int t2 = 0; t2 <= t; t2++) {
      float indicator = t2 == t3 ? 1.0f : 0.0f;
      sum += p[t2] * (indicator - own) * dp[t2];
    }
    grad_scores[row + t3] = scale * sum;
  }
}
