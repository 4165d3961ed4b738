// Idea: Hopper's own tensor-core instruction: a warpgroup of 128 threads multiplies whole tiles that lie in shared memory,
//   asynchronously, so that the exponentials of one tile run while the products of its neighbours do.
// Grid: (B * H, ceil(T / rows a block)), the longest rows of all heads first; a warpgroup 64 rows.
// Memory: as V8, but in the hardware's swizzle instead of padded rows, and no fragment of keys or values passes through
//   registers.
// Bound: exponentials and tensor cores alike at D = 64; both wait for each other at the start and end of each block.
// Against the previous rung: while the scores of tile j are being computed, so are the values of tile j - 1; twice the
//   rate of mma.sync.
// Predicted: 1.6 times over V8; within 1.15 of cuDNN, which has a copy engine and specialised warps on top. Both held on
//   an H200: the table in README.md, from the record, has the times. Tiles of 128 keys lost: fewer blocks fit, and it is
//   the other blocks' products that hide a block's exponentials.
//
// Compiled with T16, HEAD_DIM (64 or 128), BLOCK_SIZE (128, 256 or 384), KEYS a tile (64 or 128), BLOCKS_A_SM that are to
// fit. Strides count elements, are 64-bit and multiples of 8; d has stride 1. scale >= 0. lse is (B * H, T).
// Shared: 1024 + (BLOCK_SIZE / 2 + 2 * STAGES * KEYS) * HEAD_DIM * 2 bytes.
#include "tiles.cuh"
#include "../cuda_headers/warpgroup.cuh"

#define QUERIES (BLOCK_SIZE / 2)
#define STAGES 3
#define ROW_BYTES 128
#define PANELS (HEAD_DIM / 64)
#define KV_BYTES (KEYS * HEAD_DIM * 2)
#define SCORE_TILES (KEYS / 8)

// Rows first .. first + Rows - 1 of a (T, HEAD_DIM) matrix into panels; rows beyond T become zeros. The caller commits.
template <int Rows, typename T16>
__device__ __forceinline__ void copy_panels(char* tile, const T16* matrix, i64 row_stride, int first, int T) {
  const int per_row = HEAD_DIM / 8, rows_a_step = BLOCK_SIZE / per_row;  // a multiple of 8: a thread's place in the
  int part = threadIdx.x % per_row, row = threadIdx.x / per_row;         // swizzle is the same at each step
  char* to = tile + part / 8 * Rows * ROW_BYTES + row * ROW_BYTES + (part % 8 ^ row % 8) * 16;
#pragma unroll
  for (int step = 0; step < Rows; step += rows_a_step) {
    if (step + rows_a_step > Rows && row + step >= Rows) break;
    int source = min(first + row + step, T - 1);  // an address that exists, though nothing is read from it beyond T
    copy_async(to + step * ROW_BYTES, matrix + source * row_stride + part * 8, first + row + step < T);
  }
}

// The two rows of scores that a lane holds: running maximum and sum, and what earlier sums and outputs are worth now.
struct Rows {
  float top[2], sum[2], rescale[2];
};

__device__ __forceinline__ void mask_tile(float (*s)[4], int key, int row) {
  int column = key + 2 * (threadIdx.x % 4);
#pragma unroll
  for (int n = 0; n < SCORE_TILES; n++) {
#pragma unroll
    for (int e = 0; e < 4; e++)
      if (column + n * 8 + e % 2 > row + e / 2 * 8) s[n][e] = negative_infinity();
  }
}

// Online softmax of one tile: s becomes weights.
template <bool First, bool Masked> __device__ __forceinline__ void softmax_tile(float (*s)[4], Rows& rows, float scale2) {
#pragma unroll
  for (int r = 0; r < 2; r++) {
    float new_top = First ? s[0][2 * r] : rows.top[r];
#pragma unroll
    for (int n = 0; n < SCORE_TILES; n++) new_top = fmaxf(new_top, fmaxf(s[n][2 * r], s[n][2 * r + 1]));
    new_top = quad_max(new_top);  // finite: each row sees key 0, and tile 0 comes first
    float shift = new_top * scale2, added = 0.0f;
    rows.rescale[r] = First ? 0.0f : exp2_fast((rows.top[r] - new_top) * scale2);
    rows.top[r] = new_top;
#pragma unroll
    for (int n = 0; n < SCORE_TILES; n++) {
#pragma unroll
      for (int e = 2 * r; e < 2 * r + 2; e++) {
        bool hidden = Masked && s[n][e] == negative_infinity();  // a scale of 0 would make NaN of it
        s[n][e] = hidden ? 0.0f : exp2_fast(s[n][e] * scale2 - shift);
        added += s[n][e];
      }
    }
    rows.sum[r] = First ? added : rows.sum[r] * rows.rescale[r] + added;
  }
}

// Issued, not waited for.
__device__ __forceinline__ void start_scores(float (*s)[4], const char* q_rows, const char* k_tile) {
#pragma unroll
  for (int d = 0; d < DIM_STEPS; d++) {
    int panel = d / 4, inside = d % 4 * 32;
    multiply_shared<KEYS, T16>(s, describe_operand(q_rows + panel * QUERIES * ROW_BYTES + inside, 0),
                               describe_operand(k_tile + panel * KEYS * ROW_BYTES + inside, 0), d > 0);
  }
  commit_products();
}
__device__ __forceinline__ void start_values(float (*acc)[4], unsigned (*weights)[4], const char* v_tile) {
#pragma unroll
  for (int step = 0; step < KEYS / 16; step++)
    add_product<HEAD_DIM, T16>(acc, weights[step], describe_operand(v_tile + step * 16 * ROW_BYTES, KEYS * ROW_BYTES));
  commit_products();
}

// Keys and values as they pass by in STAGES buffers, one tile of each a buffer.
struct KeysAndValues {
  const T16 *k, *v;
  i64 kt, vt;
  char* buffers;
  int T, tiles;

  __device__ __forceinline__ char* keys(int tile) const { return buffers + tile % STAGES * 2 * KV_BYTES; }
  __device__ __forceinline__ char* values(int tile) const { return keys(tile) + KV_BYTES; }
  __device__ __forceinline__ void start_copies(int tile) const {
    copy_panels<KEYS>(keys(tile), k, kt, tile * KEYS, T);
    copy_panels<KEYS>(values(tile), v, vt, tile * KEYS, T);
    commit_copies();
  }
  // Tile j has arrived, and all groups are done with tile j - 2, whose buffer tile j + 1 takes.
  __device__ __forceinline__ void enter(int tile) const {
    wait_for_copies<0>();
    publish_to_products();
    __syncthreads();
    if (tile + 1 < tiles) start_copies(tile + 1);
  }
};

// What a warpgroup holds of its 64 rows.
struct Group {
  float s[SCORE_TILES][4] = {}, acc[DIM_TILES][4] = {};
  unsigned weights[KEYS / 16][4];
  Rows rows;

  // Scores and weights of a tile that was entered, while the values of the tile before are still being added up.
  template <bool First, bool Masked>
  __device__ __forceinline__ void attend(const KeysAndValues& kv, const char* queries, int tile, int row, float scale2) {
    begin_products();
    start_scores(s, queries, kv.keys(tile));
    if (!First) start_values(acc, weights, kv.values(tile - 1));
    wait_for_products<First ? 0 : 1>();
    settle<SCORE_TILES>(s);
    if (Masked) mask_tile(s, tile * KEYS, row);
    softmax_tile<First, Masked>(s, rows, scale2);
    if (!First) {
      // Never true. A branch on what the exponentials add up to keeps the assembler from moving the wait before them.
      if (rows.sum[0] + rows.sum[1] < 0.0f) __trap();
      wait_for_products<0>();
      settle<DIM_TILES>(acc);
#pragma unroll
      for (int n = 0; n < DIM_TILES; n++) {
#pragma unroll
        for (int e = 0; e < 4; e++) acc[n][e] *= rows.rescale[e / 2];
      }
    }
#pragma unroll
    for (int step = 0; step < KEYS / 16; step++) results_to_a<T16>(weights[step], s, step);
  }
};

extern "C" __global__ void __launch_bounds__(BLOCK_SIZE, BLOCKS_A_SM)
    flash_warpgroups(T16* out, float* lse, const T16* q, const T16* k, const T16* v, int H, int T, float scale,
                     i64 ob, i64 oh, i64 ot, i64 qb, i64 qh, i64 qt, i64 kb, i64 kh, i64 kt, i64 vb, i64 vh, i64 vt) {
  extern __shared__ char unaligned[];
  char* q_tile = unaligned + (1024 - (unsigned)__cvta_generic_to_shared(unaligned) % 1024) % 1024;
  int b = blockIdx.x / H, h = blockIdx.x % H, lane = threadIdx.x % 32, group_row = threadIdx.x / 128 * 64;
  int first = (gridDim.y - 1 - blockIdx.y) * QUERIES, row = first + threadIdx.x / 32 * 16 + lane / 4;
  int own_tiles = (min(first + group_row + 64, T) - 1) / KEYS + 1;  // a group's first rows may see a tile less
  KeysAndValues kv = {k + b * kb + h * kh,        v + b * vb + h * vh, kt, vt, q_tile + QUERIES * HEAD_DIM * 2, T,
                      (min(first + QUERIES, T) - 1) / KEYS + 1};
  copy_panels<QUERIES>(q_tile, q + b * qb + h * qh, qt, first, T);
  kv.start_copies(0);

  Group group;
  const char* queries = q_tile + group_row * ROW_BYTES;
  float scale2 = scale * LOG2_E;
  // Of a group's tiles, only the last crosses the diagonal: 64 rows begin at a multiple of 64, a tile is 64 or 128 keys.
  // All groups enter each tile of the block at the same place of the program, those that are through with theirs, too.
  kv.enter(0);
  if (own_tiles == 1) group.attend<true, true>(kv, queries, 0, row, scale2);
  else group.attend<true, false>(kv, queries, 0, row, scale2);
  for (int tile = 1; tile < kv.tiles; tile++) {
    kv.enter(tile);
    if (tile < own_tiles - 1) group.attend<false, false>(kv, queries, tile, row, scale2);
    else if (tile < own_tiles) group.attend<false, true>(kv, queries, tile, row, scale2);
  }
  begin_products();
  start_values(group.acc, group.weights, kv.values(own_tiles - 1));
  wait_for_products<0>();
  settle<DIM_TILES>(group.acc);

  float total0 = quad_sum(group.rows.sum[0]), total1 = quad_sum(group.rows.sum[1]);
  store_rows(out + b * ob + h * oh, ot, row, T, group.acc, 1.0f / total0, 1.0f / total1);
  if (lane % 4 == 0) {
    i64 place = (i64)blockIdx.x * T + row;
    if (row < T) lse[place] = group.rows.top[0] * scale + __logf(total0);
    if (row + 8 < T) lse[place + 8] = group.rows.top[1] * scale + __logf(total1);
  }
}
