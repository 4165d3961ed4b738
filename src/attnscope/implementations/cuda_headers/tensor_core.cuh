// Tensor-core products of 16 x 8 x 16 in bf16 or fp16 with fp32 sums, and how their operands reach registers (sm_80).
// Lane l holds, with g = l / 4 and c = 2 * (l % 4):
//   A (16 x 16): a[0] (g, c..c+1)  a[1] (g + 8, c..)  a[2] (g, c + 8..)  a[3] (g + 8, c + 8..)
//   B (16 x 8):  b[0] (c..c+1, g)  b[1] (c + 8.., g)
//   C (16 x 8):  c[0..1] (g, c..c+1)  c[2..3] (g + 8, c..c+1)
#pragma once
#include "device.cuh"

__device__ __forceinline__ void multiply_add(float* c, const unsigned* a, const unsigned* b, bf16) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
__device__ __forceinline__ void multiply_add(float* c, const unsigned* a, const unsigned* b, fp16) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Four 8 x 8 matrices of 16-bit numbers from shared memory: lane l names row l % 8 of matrix l / 8 (16 bytes), and gets
// of matrix m in r[m] elements (l / 4, 2 * (l % 4)) and its right neighbour; transposed, of the transpose.
__device__ __forceinline__ void load_matrices(unsigned* r, const void* row) {
  unsigned address = (unsigned)__cvta_generic_to_shared(row);
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address) : "memory");
}
__device__ __forceinline__ void load_matrices_transposed(unsigned* r, const void* row) {
  unsigned address = (unsigned)__cvta_generic_to_shared(row);
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address) : "memory");
}

// 16 bytes from global to shared memory without passing through registers; zeros where not `valid`. Asynchronous: a
// group is what was asked for since the last commit; waiting leaves at most `Left` groups in flight, of this thread's.
__device__ __forceinline__ void copy_async(void* to, const void* from, bool valid) {
  unsigned address = (unsigned)__cvta_generic_to_shared(to);
  int bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int Left> __device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(Left) : "memory");
}
