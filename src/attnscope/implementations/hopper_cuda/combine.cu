// Puts together what hopper_cuda_forward computed of rows whose keys it dealt in pieces.
//
// Grid: 16 rows a block, of each tile of rows of each block of a cluster, for each tile that was cut. Threads: 128, of which
// 8 share a row, 8 neighbouring columns each at a time.
// Compiled with T16, DIMS, VALUE_DIM, CLUSTER and CLUSTER_HEADS as forward.cu, and QUERIES, the rows of a tile.
// `parts`: of each piece, block of its cluster and row, VALUE_DIM sums; `part_rows`: their maximum score and the sum of their
// weights. `tiles`: tile, number of its first piece in `pieces`, how many. `scale` and strides as forward.cu takes them.
#include "../cuda_headers/device.cuh"

#define LANES 8  // that share a row
#define ROWS (128 / LANES)

// What a piece's numbers are worth under the maximum `top` of all pieces; nothing where it saw no key.
__device__ __forceinline__ float worth(float2 part_row, float top, float scale2) {
  return part_row.x == negative_infinity() ? 0.0f : exp2_fast((part_row.x - top) * scale2);
}

extern "C" __global__ void __launch_bounds__(128)
    hopper_cuda_combine(const float* parts, const float2* part_rows, const int* tiles, const int* pieces, T16* out,
                        float* lse, i64 ob, i64 oh, i64 ot, float scale, int H, int L, int row_tiles) {
  int blocks = CLUSTER * (QUERIES / ROWS), entry = blockIdx.x / blocks, inside = blockIdx.x % blocks;
  int place = inside / (QUERIES / ROWS), local = inside % (QUERIES / ROWS) * ROWS + threadIdx.x / LANES;
  int tile = tiles[3 * entry], count = tiles[3 * entry + 2], head = tile / row_tiles;
  int row_tile = row_tiles - 1 - tile % row_tiles;  // a head's last rows come first
  if (CLUSTER_HEADS > 1) head = head * CLUSTER_HEADS + place;
  else row_tile = row_tile * CLUSTER + place;
  int row = row_tile * QUERIES + local;
  if (row >= L) return;
  pieces += tiles[3 * entry + 1];
  int in_piece = place * QUERIES + local, piece_rows = CLUSTER * QUERIES;

  float top = negative_infinity(), total = 0.0f, scale2 = scale * LOG2_E;
  for (int i = 0; i < count; i++) top = fmaxf(top, part_rows[pieces[i] * piece_rows + in_piece].x);
  for (int i = 0; i < count; i++) {
    float2 part_row = part_rows[pieces[i] * piece_rows + in_piece];
    total += part_row.y * worth(part_row, top, scale2);
  }
  float factor = total > 0.0f ? 1.0f / total : 0.0f;
  if (threadIdx.x % LANES == 0)
    lse[(i64)head * L + row] = total > 0.0f ? add_log(top * scale, total) : negative_infinity();
  T16* to = out + head / H * ob + head % H * oh + row * ot;
  for (int column = threadIdx.x % LANES * 8; column < DIMS; column += LANES * 8) {
    float sum[8] = {};
    for (int i = 0; i < count; i++) {
      int part = pieces[i] * piece_rows + in_piece;
      float weight = factor * worth(part_rows[part], top, scale2);
      const float4* from = (const float4*)(parts + (i64)part * VALUE_DIM + column);
      float4 left = from[0], right = from[1];
      sum[0] += weight * left.x;
      sum[1] += weight * left.y;
      sum[2] += weight * left.z;
      sum[3] += weight * left.w;
      sum[4] += weight * right.x;
      sum[5] += weight * right.y;
      sum[6] += weight * right.z;
      sum[7] += weight * right.w;
    }
    *(uint4*)(to + column) = make_uint4(pack2<T16>(sum[0], sum[1]), pack2<T16>(sum[2], sum[3]),
                                        pack2<T16>(sum[4], sum[5]), pack2<T16>(sum[6], sum[7]));
  }
}
