// What every rung shares: number types, warp sums, fast exponentials, cache hints. No header of CUDA's is needed, so
// NVRTC alone compiles it. Each function that is PTX lives here or in tensor_core.cuh.
#pragma once

typedef long long i64;

#define FULL_WARP 0xffffffffu
#define LOG2_E 1.4426950408889634f
#define LN_2 0.6931471805599453f

struct bf16 {
  unsigned short bits;
};
struct fp16 {
  unsigned short bits;
};

__device__ __forceinline__ float negative_infinity() { return __int_as_float(0xff800000); }

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(bf16 x) { return __uint_as_float((unsigned)x.bits << 16); }
__device__ __forceinline__ float to_float(fp16 x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return y;
}

template <typename T> struct Make;
template <> struct Make<float> {
  static __device__ __forceinline__ float from(float x) { return x; }
};
template <> struct Make<fp16> {
  static __device__ __forceinline__ fp16 from(float x) {
    fp16 y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
    return y;
  }
};
template <> struct Make<bf16> {
  static __device__ __forceinline__ bf16 from(float x) {
    bf16 y;
#if __CUDA_ARCH__ >= 800
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
#else  // nearest, ties to even; NaN stays NaN
    unsigned bits = __float_as_uint(x);
    y.bits = (bits & 0x7fffffffu) > 0x7f800000u ? 0x7fff : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
#endif
    return y;
  }
};

// The compiler no longer knows where x comes from, and computes what hangs on it again instead of keeping it.
__device__ __forceinline__ void hide(int& x) { asm volatile("" : "+r"(x)); }
// gridDim.x, read anew.
__device__ __forceinline__ int blocks_of_grid() {
  int x;
  asm volatile("mov.u32 %0, %%nctaid.x;" : "=r"(x));
  return x;
}

// Two neighbours in one register, the first in the low half.
template <typename T> __device__ __forceinline__ unsigned pack2(float low, float high) {
  return Make<T>::from(low).bits | ((unsigned)Make<T>::from(high).bits << 16);
}
__device__ __forceinline__ bf16 low_half(unsigned pair, bf16) { return bf16{(unsigned short)(pair & 0xffff)}; }
__device__ __forceinline__ bf16 high_half(unsigned pair, bf16) { return bf16{(unsigned short)(pair >> 16)}; }
__device__ __forceinline__ fp16 low_half(unsigned pair, fp16) { return fp16{(unsigned short)(pair & 0xffff)}; }
__device__ __forceinline__ fp16 high_half(unsigned pair, fp16) { return fp16{(unsigned short)(pair >> 16)}; }

__device__ __forceinline__ float exp_fast(float x) { return __expf(x); }
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// x + log(total), total > 0 and not denormal. The hardware's logarithm is exact to 2e-7 below 2 alone, and sums of weights may
// be large; so exponent and mantissa are taken apart, and what is large is added last, in one rounding: log(2) as a sum of
// which the first part has 13 bits.
__device__ __forceinline__ float add_log(float x, float total) {
  unsigned bits = __float_as_uint(total);
  if (bits >= 0x7f800000u) return total;  // infinite, or none
  float exponent = (float)((int)(bits >> 23) - 127), mantissa = __uint_as_float((bits & 0x7fffffu) | 0x3f800000u);
  return fmaf(exponent, 0.693115234375f, x + fmaf(exponent, 3.194618494e-5f, __logf(mantissa)));
}

// Sum and maximum over a warp; every lane gets the result. All 32 lanes must call.
__device__ __forceinline__ float warp_sum(float x) {
  for (int distance = 16; distance > 0; distance /= 2) x += __shfl_xor_sync(FULL_WARP, x, distance);
  return x;
}
__device__ __forceinline__ float warp_max(float x) {
  for (int distance = 16; distance > 0; distance /= 2) x = fmaxf(x, __shfl_xor_sync(FULL_WARP, x, distance));
  return x;
}

// Sum over a block of whole warps; every thread gets the result. `partial` holds 32 floats, and the caller must not
// write it again before a barrier of its own or a call with another array.
__device__ __forceinline__ float block_sum(float x, float* partial) {
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  x = warp_sum(x);
  if (warps == 1) return x;
  if (lane == 0) partial[warp] = x;
  __syncthreads();
  return warp_sum(lane < warps ? partial[lane] : 0.0f);
}
__device__ __forceinline__ float block_max(float x, float* partial) {
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  x = warp_max(x);
  if (warps == 1) return x;
  if (lane == 0) partial[warp] = x;
  __syncthreads();
  return warp_max(lane < warps ? partial[lane] : negative_infinity());
}

// Loads and stores that ask the cache to let the line go first.
__device__ __forceinline__ float4 load_streaming(const float4* p) { return __ldcs(p); }
__device__ __forceinline__ void store_streaming(float4* p, float4 x) { __stcs(p, x); }
