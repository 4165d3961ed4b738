// Idea: leave the two products to cuBLAS, and give each softmax row a block: threads stride over it together.
// Grid: scale and mask: one thread an element, (ceil(T / block), T, B * H). Softmax: one block a row, (T, B * H).
// Memory: everything coalesced now. The scores cross the bus often: product out, scale in and out, softmax reads them
//   three times and writes them twice (from cache, where the row stays there), product in. The masked half too.
// Bound: memory bandwidth; the products' tensor cores wait for it.
// Against the previous rung: it moves far more bytes than V2 and is much faster, by parallelism and coalescing alone.
//
// scores are (B * H, T, row_stride).
#include "../cuda_headers/device.cuh"

extern "C" __global__ void __launch_bounds__(1024)
    scale_and_mask(float* scores, int T, int row_stride, float scale) {
  int t2 = blockIdx.x * blockDim.x + threadIdx.x, t = blockIdx.y;
  if (t2 >= T) return;
  float* score = scores + ((i64)blockIdx.z * T + t) * row_stride + t2;
  *score = t2 > t ? negative_infinity() : *score * scale;
}

extern "C" __global__ void __launch_bounds__(1024)
    softmax_one_block_a_row(float* weights, const float* scores, int T, int row_stride) {
  __shared__ float tops[32], sums[32];
  i64 row = ((i64)blockIdx.y * T + blockIdx.x) * row_stride;
  const float* score = scores + row;
  float* weight = weights + row;
  float top = negative_infinity();
  for (int t2 = threadIdx.x; t2 < T; t2 += blockDim.x) top = fmaxf(top, score[t2]);
  top = block_max(top, tops);
  for (int t2 = threadIdx.x; t2 < T; t2 += blockDim.x) weight[t2] = exp_fast(score[t2] - top);
  float sum = 0.0f;  // each thread reads back only what it wrote
  for (int t2 = threadIdx.x; t2 < T; t2 += blockDim.x) sum += weight[t2];
  sum = block_sum(sum, sums);
  for (int t2 = threadIdx.x; t2 < T; t2 += blockDim.x) weight[t2] = weight[t2] / sum;
}
