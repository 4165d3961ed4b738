// Stands in for the ladder's tensor_core.cuh: products of 16 x 8 x 16 and matrix loads, by the layouts of PTX ISA 8.x,
// "Matrix fragments for mma.m16n8k16" and "ldmatrix". All lanes of a warp must call together.
#pragma once
#include "device.cuh"

struct MultiplyOperands {
  unsigned a[4], b[2];
};

template <typename T> inline void multiply_add(float* c, const unsigned* a, const unsigned* b, T) {
  static MultiplyOperands operands[32][32];
  int lane = threadIdx.x % 32, warp = emulator_warp();
  for (int i = 0; i < 4; i++) operands[warp][lane].a[i] = a[i];
  for (int i = 0; i < 2; i++) operands[warp][lane].b[i] = b[i];
  emulator_warp_barrier();
  auto a_at = [&](int row, int k) {
    unsigned pair = operands[warp][row % 8 * 4 + k % 8 / 2].a[row / 8 + 2 * (k / 8)];
    return to_float(k % 2 ? high_half(pair, T()) : low_half(pair, T()));
  };
  auto b_at = [&](int k, int n) {
    unsigned pair = operands[warp][n * 4 + k % 8 / 2].b[k / 8];
    return to_float(k % 2 ? high_half(pair, T()) : low_half(pair, T()));
  };
  for (int e = 0; e < 4; e++) {
    int row = lane / 4 + e / 2 * 8, n = 2 * (lane % 4) + e % 2;
    for (int k = 0; k < 16; k++) c[e] += a_at(row, k) * b_at(k, n);
  }
  emulator_warp_barrier();
}

inline void emulator_load_matrices(unsigned* r, const void* row, bool transposed) {
  static const unsigned short* rows[32][32];
  int lane = threadIdx.x % 32, warp = emulator_warp();
  if ((unsigned long long)row % 16) emulator_fail("ldmatrix: a row is not aligned to 16 bytes");
  rows[warp][lane] = (const unsigned short*)row;
  emulator_warp_barrier();
  for (int m = 0; m < 4; m++) {
    int i = lane / 4, j = 2 * (lane % 4);
    unsigned low = transposed ? rows[warp][m * 8 + j][i] : rows[warp][m * 8 + i][j];
    unsigned high = transposed ? rows[warp][m * 8 + j + 1][i] : rows[warp][m * 8 + i][j + 1];
    r[m] = low | (high << 16);
  }
  emulator_warp_barrier();
}
inline void load_matrices(unsigned* r, const void* row) { emulator_load_matrices(r, row, false); }
inline void load_matrices_transposed(unsigned* r, const void* row) { emulator_load_matrices(r, row, true); }

// Copies land only when they are waited for, so that a missing wait is seen; in the other order at once, so that a
// buffer that is still read is.
inline void copy_async(void* to, const void* from, bool valid) {
  if ((unsigned long long)to % 16 || (unsigned long long)from % 16) emulator_fail("cp.async: not aligned to 16 bytes");
  emulator_pending[emulator_thread()].push_back({to, from, valid, emulator_groups[emulator_thread()]});
  if (emulator_order) emulator_land(emulator_groups[emulator_thread()] + 1);
}
inline void commit_copies() { emulator_groups[emulator_thread()]++; }
static bool emulator_unpublished[1024];  // copies of this thread's landed, which wgmma may not see yet
template <int Left> inline void wait_for_copies() {
  emulator_land(emulator_groups[emulator_thread()] - Left);
  emulator_unpublished[emulator_thread()] = true;
}
