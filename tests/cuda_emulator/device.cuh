// Stands in for the ladder's device.cuh where a kernel runs on the CPU: the same functions, in plain C++.
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

inline float negative_infinity() { return -INFINITY; }
inline float to_float(float x) { return x; }
inline float to_float(bf16 x) { return __uint_as_float((unsigned)x.bits << 16); }
inline float to_float(fp16 x) {
  _Float16 half;
  memcpy(&half, &x.bits, 2);
  return (float)half;
}

template <typename T> struct Make;
template <> struct Make<float> {
  static float from(float x) { return x; }
};
template <> struct Make<fp16> {
  static fp16 from(float x) {
    _Float16 half = (_Float16)x;
    fp16 y;
    memcpy(&y.bits, &half, 2);
    return y;
  }
};
template <> struct Make<bf16> {
  static bf16 from(float x) {
    unsigned bits = __float_as_uint(x);
    bf16 y;
    y.bits = (bits & 0x7fffffffu) > 0x7f800000u ? 0x7fff : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return y;
  }
};
template <typename T> inline unsigned pack2(float low, float high) {
  return Make<T>::from(low).bits | ((unsigned)Make<T>::from(high).bits << 16);
}
inline bf16 low_half(unsigned pair, bf16) { return bf16{(unsigned short)(pair & 0xffff)}; }
inline bf16 high_half(unsigned pair, bf16) { return bf16{(unsigned short)(pair >> 16)}; }
inline fp16 low_half(unsigned pair, fp16) { return fp16{(unsigned short)(pair & 0xffff)}; }
inline fp16 high_half(unsigned pair, fp16) { return fp16{(unsigned short)(pair >> 16)}; }

inline float exp_fast(float x) { return expf(x); }
inline float exp2_fast(float x) { return exp2f(x); }
inline void hide(int&) {}
inline int blocks_of_grid() { return gridDim.x; }
inline float add_log(float x, float total) { return x + logf(total); }

inline float warp_sum(float x) {
  for (int distance = 16; distance > 0; distance /= 2) x += __shfl_xor_sync(FULL_WARP, x, distance);
  return x;
}
inline float warp_max(float x) {
  for (int distance = 16; distance > 0; distance /= 2) x = fmaxf(x, __shfl_xor_sync(FULL_WARP, x, distance));
  return x;
}
BLOCK_REDUCTIONS
inline float4 load_streaming(const float4* p) { return *p; }
inline void store_streaming(float4* p, float4 x) { *p = x; }

inline unsigned atomicOr(unsigned* place, unsigned bits) {
  unsigned before = *place;
  *place |= bits;
  return before;
}
