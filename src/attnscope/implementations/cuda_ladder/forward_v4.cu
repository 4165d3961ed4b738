// Idea: one warp a row, one pass for maximum and sum together (online), the scale folded into the exponent, and nothing
//   above the diagonal ever read or written.
// Grid: (ceil(rows / (block / 32))), a warp a row of all B * H * T, long rows first.
// Memory: float4 loads of the visible triangle only; the row is read a second time (from cache, mostly) when the
//   weights are computed and streamed out. The upper triangle of the weights is zeroed once, in prepare, and no kernel
//   writes it: the published program relies on memory that happens to be zero.
// Bound: memory bandwidth: half of V3's softmax traffic falls away with the mask, and the scale pass with it.
// Against the previous rung: one kernel less, half the bytes, no block barrier.
//
// scores and weights are (B * H, T, row_stride) with row_stride a multiple of 4.
#include "../cuda_headers/device.cuh"

extern "C" __global__ void __launch_bounds__(1024)
    softmax_one_warp_a_row(float* weights, const float* scores, i64 rows, int T, int row_stride, float scale) {
  int lane = threadIdx.x % 32, warps = blockDim.x / 32;
  i64 row = rows - 1 - ((i64)blockIdx.x * warps + threadIdx.x / 32);
  if (row < 0) return;
  int t = (int)(row % T), groups = t / 4 + 1;  // the last group reaches beyond t by up to three, masked below
  const float4* score = (const float4*)(scores + row * row_stride);
  float4* weight = (float4*)(weights + row * row_stride);
  // A scale may be negative or zero: what is largest is scale * x. The sign moves into x, so that |scale| remains.
  float sign = scale < 0.0f ? -1.0f : 1.0f, size = fabsf(scale);
  float top = -3.0e38f, sum = 0.0f;
  for (int g = lane; g < groups; g += 32) {
    float4 x = score[g];
    float group_top = x.x * sign;
    if (4 * g + 1 <= t) group_top = fmaxf(group_top, x.y * sign);
    if (4 * g + 2 <= t) group_top = fmaxf(group_top, x.z * sign);
    if (4 * g + 3 <= t) group_top = fmaxf(group_top, x.w * sign);
    float new_top = fmaxf(top, group_top);
    sum *= exp_fast(size * (top - new_top));
    sum += exp_fast(size * (x.x * sign - new_top));
    if (4 * g + 1 <= t) sum += exp_fast(size * (x.y * sign - new_top));
    if (4 * g + 2 <= t) sum += exp_fast(size * (x.z * sign - new_top));
    if (4 * g + 3 <= t) sum += exp_fast(size * (x.w * sign - new_top));
    top = new_top;
  }
  float row_top = warp_max(top);
  sum = warp_sum(sum * exp_fast(size * (top - row_top)));
  float inverse = 1.0f / sum;
  for (int g = lane; g < groups; g += 32) {
    float4 x = load_streaming(score + g), w;
    w.x = exp_fast(size * (x.x * sign - row_top)) * inverse;
    w.y = 4 * g + 1 <= t ? exp_fast(size * (x.y * sign - row_top)) * inverse : 0.0f;
    w.z = 4 * g + 2 <= t ? exp_fast(size * (x.z * sign - row_top)) * inverse : 0.0f;
    w.w = 4 * g + 3 <= t ? exp_fast(size * (x.w * sign - row_top)) * inverse : 0.0f;
    store_streaming(weight + g, w);
  }
}
