// Tiles of rows of HEAD_DIM 16-bit numbers in shared memory, and products of them. Rows are padded by 16 bytes, so that
// the eight rows of a matrix lie in different banks: with HEAD_DIM a multiple of 16 the stride is an odd number of 16s.
#pragma once
#include "../cuda_headers/fragments.cuh"

#define TILE_STRIDE (HEAD_DIM + 8)
#define DIM_STEPS (HEAD_DIM / 16)
#define DIM_TILES (HEAD_DIM / 8)

// Rows first .. first + rows - 1 of a (T, HEAD_DIM) matrix into a tile; rows beyond T become zeros. Plain loads.
template <typename T16>
__device__ __forceinline__ void load_tile(T16* tile, const T16* matrix, i64 row_stride, int first, int rows, int T) {
  const int per_row = HEAD_DIM / 8;
  for (int i = threadIdx.x; i < rows * per_row; i += blockDim.x) {
    int row = i / per_row, part = i % per_row;
    uint4 x = make_uint4(0, 0, 0, 0);
    if (first + row < T) x = *(const uint4*)(matrix + (first + row) * row_stride + part * 8);
    *(uint4*)(tile + row * TILE_STRIDE + part * 8) = x;
  }
}

// The same by asynchronous copies; the caller commits and waits.
template <typename T16>
__device__ __forceinline__ void copy_tile(T16* tile, const T16* matrix, i64 row_stride, int first, int rows, int T) {
  const int per_row = HEAD_DIM / 8;
  for (int i = threadIdx.x; i < rows * per_row; i += blockDim.x) {
    int row = i / per_row, part = i % per_row;
    int source = min(first + row, T - 1);  // an address that exists, though nothing is read from it beyond T
    copy_async(tile + row * TILE_STRIDE + part * 8, matrix + source * row_stride + part * 8, first + row < T);
  }
}

// The A operand whose rows are tile rows row .. row + 15 and whose depth is dims dim .. dim + 15.
template <typename T16> __device__ __forceinline__ void load_a(unsigned* a, const T16* tile, int row, int dim) {
  int lane = threadIdx.x % 32, m = lane / 8;
  load_matrices(a, tile + (row + (m % 2) * 8 + lane % 8) * TILE_STRIDE + dim + (m / 2) * 8);
}

// Two B operands, of columns = tile rows row .. row + 7 and row + 8 .. row + 15, depth = dims dim .. dim + 15.
template <typename T16> __device__ __forceinline__ void load_b_rows(unsigned* b, const T16* tile, int row, int dim) {
  int lane = threadIdx.x % 32, m = lane / 8;
  load_matrices(b, tile + (row + (m / 2) * 8 + lane % 8) * TILE_STRIDE + dim + (m % 2) * 8);
}

// Two B operands, of columns = dims dim .. dim + 7 and dim + 8 .. dim + 15, depth = tile rows row .. row + 15.
template <typename T16> __device__ __forceinline__ void load_b_dims(unsigned* b, const T16* tile, int row, int dim) {
  int lane = threadIdx.x % 32, m = lane / 8;
  load_matrices_transposed(b, tile + (row + (m % 2) * 8 + lane % 8) * TILE_STRIDE + dim + (m / 2) * 8);
}

// out[row][dim..] = acc * factor for the two rows that a lane holds; rows beyond T are not written.
template <typename T16>
__device__ __forceinline__ void store_rows(T16* matrix, i64 row_stride, int row, int T, const float (*acc)[4],
                                           float factor0, float factor1) {
  int column = 2 * (threadIdx.x % 4);
#pragma unroll
  for (int n = 0; n < DIM_TILES; n++) {
    if (row < T)
      *(unsigned*)(matrix + row * row_stride + n * 8 + column) = pack2<T16>(acc[n][0] * factor0, acc[n][1] * factor0);
    if (row + 8 < T)
      *(unsigned*)(matrix + (row + 8) * row_stride + n * 8 + column) =
          pack2<T16>(acc[n][2] * factor1, acc[n][3] * factor1);
  }
}
