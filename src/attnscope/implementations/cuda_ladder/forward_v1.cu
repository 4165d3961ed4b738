// Idea: the CPU loops as they are, each output of a loop given to a thread: three kernels, no shared memory.
// Grid: scores: one thread a (b, h, t, t2). Softmax and values: one thread a row (b, h, t), heads fastest.
// Memory: a warp of the scores kernel shares a query row, but reads 32 keys that lie a token apart; the warps of the
//   other two walk rows of different heads, a whole T x T matrix apart. Nothing is coalesced, and the output row is
//   read, changed and written in global memory once a key.
// Bound: the latency and sector waste of uncoalesced access: each 4-byte read moves a 32-byte sector.
// Against the previous rung: there is none; this is what all others are measured against.
//
// Compiled with HEAD_DIM. Strides count elements and are 64-bit; d has stride 1. row_stride is that of the scores.
#include "../cuda_headers/device.cuh"

// Grid (ceil(T * T / block), B * H).
extern "C" __global__ void __launch_bounds__(1024)
    scores_one_thread_each(float* scores, const float* q, const float* k, int H, int T, int row_stride, float scale,
                           i64 qb, i64 qh, i64 qt, i64 kb, i64 kh, i64 kt) {
  i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= (i64)T * T) return;
  int t = (int)(i / T), t2 = (int)(i % T), b = blockIdx.y / H, h = blockIdx.y % H;
  float* score = scores + ((i64)blockIdx.y * T + t) * row_stride + t2;
  if (t2 > t) {
    *score = negative_infinity();
    return;
  }
  const float* query = q + b * qb + h * qh + t * qt;
  const float* key = k + b * kb + h * kh + t2 * kt;
  float sum = 0.0f;
  for (int d = 0; d < HEAD_DIM; d++) sum += query[d] * key[d];
  *score = sum * scale;
}

// Grid (ceil(B * T * H / block)); in place would do, but the published one keeps scores and weights apart.
extern "C" __global__ void __launch_bounds__(1024)
    softmax_one_thread_a_row(float* weights, const float* scores, int B, int H, int T, int row_stride) {
  i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= (i64)B * T * H) return;
  int h = (int)(i % H), t = (int)((i / H) % T), b = (int)(i / H / T);
  i64 row = (((i64)b * H + h) * T + t) * row_stride;
  float top = negative_infinity();
  for (int t2 = 0; t2 <= t; t2++) top = fmaxf(top, scores[row + t2]);
  float sum = 0.0f;
  for (int t2 = 0; t2 <= t; t2++) {
    float e = exp_fast(scores[row + t2] - top);
    sum += e;
    weights[row + t2] = e;
  }
  float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
  for (int t2 = 0; t2 < T; t2++) weights[row + t2] = t2 <= t ? weights[row + t2] * inverse : 0.0f;
}

// Grid (ceil(B * T * H / block)).
extern "C" __global__ void __launch_bounds__(1024)
    values_one_thread_a_row(float* out, const float* weights, const float* v, int B, int H, int T, int row_stride,
                            i64 vb, i64 vh, i64 vt, i64 ob, i64 oh, i64 ot) {
  i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= (i64)B * T * H) return;
  int h = (int)(i % H), t = (int)((i / H) % T), b = (int)(i / H / T);
  const float* weight = weights + (((i64)b * H + h) * T + t) * row_stride;
  float* row = out + b * ob + h * oh + t * ot;
  for (int d = 0; d < HEAD_DIM; d++) row[d] = 0.0f;
  for (int t2 = 0; t2 <= t; t2++) {
    const float* value = v + b * vb + h * vh + t2 * vt;
    float w = weight[t2];
#pragma unroll 8
    for (int d = 0; d < HEAD_DIM; d++) row[d] += w * value[d];
  }
}
