// What is done with results of the tensor cores in registers, laid out as tensor_core.cuh says; no PTX.
#pragma once
#include "tensor_core.cuh"

// The A operand of depth columns 16 * step .. of a row of 16 x 8 results, rounded to 16 bits: what was C becomes A.
template <typename T16> __device__ __forceinline__ void results_to_a(unsigned* a, const float (*c)[4], int step) {
  a[0] = pack2<T16>(c[2 * step][0], c[2 * step][1]);
  a[1] = pack2<T16>(c[2 * step][2], c[2 * step][3]);
  a[2] = pack2<T16>(c[2 * step + 1][0], c[2 * step + 1][1]);
  a[3] = pack2<T16>(c[2 * step + 1][2], c[2 * step + 1][3]);
}

// Sum and maximum over the four lanes that share a row of C.
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(FULL_WARP, x, 1);
  return x + __shfl_xor_sync(FULL_WARP, x, 2);
}
__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(FULL_WARP, x, 1));
  return fmaxf(x, __shfl_xor_sync(FULL_WARP, x, 2));
}
