// Idea: products want each head's rows side by side; the model keeps heads side by side within a token. These kernels
//   carry data from one order to the other, changing the number type on the way where a rung asks for it.
// Grid: x covers the T * D elements of one head, y is the head b * H + h, z chooses the tensor. One thread WIDTH elements.
// Memory: D neighbours are contiguous on both sides, so both reads and writes are coalesced for D >= 32; WIDTH of them
//   travel as one number.
// Bound: memory bandwidth, one read and one write an element.
// Against the previous rung: forward V3 needs them first, V6 shows what they cost by leaving them out.
//
// Compiled with HEAD_DIM, INPUT_T, OUTPUT_T and WIDTH, which divides HEAD_DIM and all strides. Strides count elements and
// are 64-bit; d has stride 1.
#include "../cuda_headers/device.cuh"

template <typename T> struct alignas(WIDTH * sizeof(T)) Pack {
  T at[WIDTH];
};

__device__ __forceinline__ void convert(OUTPUT_T* to, const INPUT_T* from) {
  Pack<INPUT_T> x = *(const Pack<INPUT_T>*)from;
  Pack<OUTPUT_T> y;
#pragma unroll
  for (int i = 0; i < WIDTH; i++) y.at[i] = Make<OUTPUT_T>::from(to_float(x.at[i]));
  *(Pack<OUTPUT_T>*)to = y;
}

// (B, H, T, D) of any strides -> (B * H, T, D) contiguous, for up to three tensors of one shape.
extern "C" __global__ void __launch_bounds__(1024)
    gather_heads(const INPUT_T* in0, const INPUT_T* in1, const INPUT_T* in2, OUTPUT_T* out0, OUTPUT_T* out1,
                 OUTPUT_T* out2, int H, int T, i64 b0, i64 h0, i64 t0, i64 b1, i64 h1, i64 t1, i64 b2, i64 h2, i64 t2) {
  unsigned i = (blockIdx.x * blockDim.x + threadIdx.x) * WIDTH;
  if (i >= (unsigned)T * HEAD_DIM) return;
  unsigned t = i / HEAD_DIM, d = i % HEAD_DIM;
  int b = blockIdx.y / H, h = blockIdx.y % H, z = blockIdx.z;
  const INPUT_T* in = z == 0 ? in0 : z == 1 ? in1 : in2;
  OUTPUT_T* out = z == 0 ? out0 : z == 1 ? out1 : out2;
  i64 sb = z == 0 ? b0 : z == 1 ? b1 : b2, sh = z == 0 ? h0 : z == 1 ? h1 : h2, st = z == 0 ? t0 : z == 1 ? t1 : t2;
  convert(out + (i64)blockIdx.y * T * HEAD_DIM + i, in + b * sb + h * sh + t * st + d);
}

// (B * H, T, D) contiguous -> (B, H, T, D) of any strides, for up to three tensors of one shape.
extern "C" __global__ void __launch_bounds__(1024)
    scatter_heads(const INPUT_T* in0, const INPUT_T* in1, const INPUT_T* in2, OUTPUT_T* out0, OUTPUT_T* out1,
                  OUTPUT_T* out2, int H, int T, i64 b0, i64 h0, i64 t0, i64 b1, i64 h1, i64 t1, i64 b2, i64 h2,
                  i64 t2) {
  unsigned i = (blockIdx.x * blockDim.x + threadIdx.x) * WIDTH;
  if (i >= (unsigned)T * HEAD_DIM) return;
  unsigned t = i / HEAD_DIM, d = i % HEAD_DIM;
  int b = blockIdx.y / H, h = blockIdx.y % H, z = blockIdx.z;
  const INPUT_T* in = z == 0 ? in0 : z == 1 ? in1 : in2;
  OUTPUT_T* out = z == 0 ? out0 : z == 1 ? out1 : out2;
  i64 sb = z == 0 ? b0 : z == 1 ? b1 : b2, sh = z == 0 ? h0 : z == 1 ? h1 : h2, st = z == 0 ? t0 : z == 1 ? t1 : t2;
  convert(out + b * sb + h * sh + t * st + d, in + (i64)blockIdx.y * T * HEAD_DIM + i);
}

// Writes zeros above the diagonal of (heads, T, row_stride) float scores: what defining the upper triangle costs.
// Grid (ceil(T / block), T, heads). The rungs pay it once, in prepare; the published programs never do it.
extern "C" __global__ void __launch_bounds__(1024)
    zero_above_diagonal(OUTPUT_T* scores, int T, int row_stride) {
  int t2 = blockIdx.x * blockDim.x + threadIdx.x, t = blockIdx.y;
  if (t2 > t && t2 < T) scores[((i64)blockIdx.z * T + t) * row_stride + t2] = Make<OUTPUT_T>::from(0.0f);
}
