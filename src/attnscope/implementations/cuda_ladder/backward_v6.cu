// Idea: tile the loops: a block owns a row, stages a tile of products P * dP in shared memory, and all its threads, each
//   with a key t3 of its own, consume the whole tile from there.
// Grid: (T, B * H), BLOCK_SIZE threads, a constant at compile time so that the inner loop unrolls.
// Memory: three global reads a tile and thread for BLOCK_SIZE steps each; the inner loop reads 16 shared bytes for all
//   lanes at once (a broadcast).
// Bound: arithmetic: a fused multiply-add for each of T * T * T / 3 steps a head, over the whole diagonal tile.
// Against the previous rung: global loads leave the inner loop.
//
// weights, grad_weights, grad_scores are (B * H, T, row_stride). Only t3 <= t is written; prepare zeroed the rest.
// Any T: loads are clipped to the row's visible part, and a product beyond it counts as zero.
#include "../cuda_headers/device.cuh"

extern "C" __global__ void __launch_bounds__(BLOCK_SIZE)
    softmax_backward_block_a_row(float* grad_scores, const float* weights, const float* grad_weights, int T,
                                 int row_stride, float scale) {
  __shared__ float4 staged[BLOCK_SIZE / 4];
  float* products = (float*)staged;
  int t = blockIdx.x, lane = threadIdx.x;
  i64 row = ((i64)blockIdx.y * T + t) * row_stride;
  const float *p = weights + row, *dp = grad_weights + row;
  for (int tile3 = 0; tile3 <= t; tile3 += BLOCK_SIZE) {
    int t3 = tile3 + lane;
    float own = p[min(t3, t)], sum = 0.0f;
    for (int tile2 = 0; tile2 <= t; tile2 += BLOCK_SIZE) {
      int t2 = tile2 + lane;
      float product = t2 <= t ? p[min(t2, t)] * dp[min(t2, t)] : 0.0f;
      products[lane] = product;
      __syncthreads();
      if (tile2 == tile3) {
        for (int k = 0; k < BLOCK_SIZE; k++) sum += ((k == lane ? 1.0f : 0.0f) - own) * products[k];
      } else {
#pragma unroll 8
        for (int k = 0; k < BLOCK_SIZE / 4; k++) {
          float4 four = staged[k];
          sum -= own * four.x;
          sum -= own * four.y;
          sum -= own * four.z;
          sum -= own * four.w;
        }
      }
      __syncthreads();
    }
    if (t3 <= t) grad_scores[row + t3] = scale * sum;
  }
}
