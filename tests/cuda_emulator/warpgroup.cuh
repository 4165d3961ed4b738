// Stands in for the ladder's warpgroup.cuh: products of a warpgroup by the layouts of PTX ISA 8.x, "Asynchronous
// warpgroup-level matrix instructions". A product is computed only when it is waited for, from what then lies in shared
// memory and registers, so that a missing wait and a buffer that is overwritten too early are seen.
#pragma once
#include "tensor_core.cuh"

typedef unsigned long long u64;

static std::vector<std::vector<std::function<void()>>> emulator_products[1024];  // groups, the last one still open
inline std::vector<std::vector<std::function<void()>>>& emulator_groups_of_products() {
  auto& groups = emulator_products[emulator_thread()];
  if (groups.empty()) groups.emplace_back();
  return groups;
}

inline u64 __cvta_generic_to_shared(const void* place) { return (u64)place - (u64)emulator_dynamic_shared() / 1024 * 1024; }
inline void __trap() { emulator_fail("a trap was met"); }

inline void begin_products() {}
inline void publish_to_products() { emulator_unpublished[emulator_thread()] = false; }
inline void commit_products() { emulator_groups_of_products().emplace_back(); }
template <int Left> inline void wait_for_products() {
  auto& groups = emulator_groups_of_products();
  while ((int)groups.size() - 1 > Left) {
    for (auto& product : groups.front()) product();
    groups.erase(groups.begin());
  }
  emulator_warp_barrier();  // `.aligned`: a warp waits as one
}
template <int N> inline void settle(float (*)[4]) {}
template <int N> inline void settle_operands(unsigned (*)[4]) {}
inline void compute_before_waiting(float x, const void*) {
  if (x < 0.0f) emulator_fail("what is never below 0 was");
}

inline u64 describe_operand(const void* place, int panel_bytes) {
  u64 address = __cvta_generic_to_shared(place);
  if (address % 16 || address >= 1 << 18) emulator_fail("wgmma: an operand is not where a descriptor can point to");
  return address >> 4 | (u64)(panel_bytes >> 4) << 16;
}

// Element (row, column) of panels of 64 columns in the 128-byte swizzle, from where a descriptor points to.
template <typename T> inline float emulator_element(u64 descriptor, int row, int column) {
  u64 address = ((descriptor & 0x3fff) << 4) + row * 128 + column / 64 * ((descriptor >> 16 & 0x3fff) << 4) + column % 64 * 2;
  address ^= (address >> 7 & 7) << 4;
  T x;
  memcpy(&x, (const char*)((u64)emulator_dynamic_shared() / 1024 * 1024) + address, 2);
  return to_float(x);
}
inline void emulator_check_published() {
  for (unsigned t = 0; t < blockDim.x; t++)
    if (emulator_unpublished[emulator_rank * blockDim.x + t]) emulator_fail("wgmma: reads what was copied but not published");
}

template <int N, typename T> inline void multiply_shared(float (*c)[4], u64 a, u64 b, int add) {
  emulator_groups_of_products().back().push_back([=] {
    emulator_check_published();
    int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 % 4 * 16;
    for (int n = 0; n < N / 8; n++)
      for (int e = 0; e < 4; e++) {
        int row = warp_row + lane / 4 + e / 2 * 8, column = n * 8 + 2 * (lane % 4) + e % 2;
        float sum = add ? c[n][e] : 0.0f;
        for (int k = 0; k < 16; k++) sum += emulator_element<T>(a, row, k) * emulator_element<T>(b, column, k);
        c[n][e] = sum;
      }
  });
}

template <int N, typename T> inline void add_product(float (*c)[4], const unsigned* a, u64 b) {
  emulator_groups_of_products().back().push_back([=] {
    static unsigned operands[32][32][4];
    emulator_check_published();
    int lane = threadIdx.x % 32, warp = emulator_warp();
    for (int i = 0; i < 4; i++) operands[warp][lane][i] = a[i];
    emulator_warp_barrier();
    for (int n = 0; n < N / 8; n++)
      for (int e = 0; e < 4; e++) {
        int row = lane / 4 + e / 2 * 8, column = n * 8 + 2 * (lane % 4) + e % 2;
        for (int k = 0; k < 16; k++) {
          unsigned pair = operands[warp][row % 8 * 4 + k % 8 / 2][row / 8 + 2 * (k / 8)];
          float x = to_float(k % 2 ? high_half(pair, T()) : low_half(pair, T()));
          c[n][e] += x * emulator_element<T>(b, k, column);
        }
      }
    emulator_warp_barrier();
  });
}
