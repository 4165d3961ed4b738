// Idea: a warp owns a key t3; its lanes stride over the keys t2 of a row together and add up at the end.
// Grid: (ceil(32 * T / block), B * H).
// Memory: the 32 lanes read 32 neighbours of one row: coalesced at last.
// Bound: L1/L2 bandwidth: each of the T keys reads every row below it again, T * T * T / 6 pairs of loads a head.
// Against the previous rung: the same number of loads in a tenth of the transactions. The article credits the finer
//   synchronisation of cooperative groups; that API only supplies the reduction. Compile with COOPERATIVE_GROUPS=1 and
//   it does here too: same machine code but for that, so that the claim can be timed.
//
// weights, grad_weights, grad_scores are (B * H, T, row_stride). Only t3 <= t is written; prepare zeroed the rest.
#include "../cuda_headers/device.cuh"

#if COOPERATIVE_GROUPS
#include <cooperative_groups.h>
#include <cooperative_groups/reduce.h>
namespace cg = cooperative_groups;
#endif

extern "C" __global__ void __launch_bounds__(1024)
    softmax_backward_warp_a_key(float* grad_scores, const float* weights, const float* grad_weights, int T,
                                int row_stride, float scale) {
#if COOPERATIVE_GROUPS
  cg::thread_block block = cg::this_thread_block();
  cg::thread_block_tile<32> warp = cg::tiled_partition<32>(block);
#endif
  int lane = threadIdx.x % 32, t3 = (blockIdx.x * blockDim.x + threadIdx.x) / 32;
  if (t3 >= T) return;
  for (int t = t3; t < T; t++) {
    i64 row = ((i64)blockIdx.y * T + t) * row_stride;
    const float *p = weights + row, *dp = grad_weights + row;
    float own = p[t3], sum = 0.0f;
    for (int t2 = lane; t2 <= t; t2 += 32) {
      float indicator = t2 == t3 ? 1.0f : 0.0f;
      sum += p[t2] * (indicator - own) * dp[t2];
    }
#if COOPERATIVE_GROUPS
    sum = cg::reduce(warp, sum, cg::plus<float>());
#else
    sum = warp_sum(sum);
#endif
    if (lane == 0) grad_scores[row + t3] = scale * sum;
  }
}
