// Idea: the first FlashAttention's order: a tile of keys and values stays in shared memory while the tiles of queries
//   pass by, and a running maximum and sum per row make the softmax exact without ever holding the scores.
// Grid: (B, H), one warp each: thread r owns row r of a tile of 32 queries. 96 warps on a card that holds thousands.
// Memory: shared, three 32 x D tiles and 32 x 32 scores. Rows of D floats start in the same bank, so each read of Q is
//   a 32-way conflict. The output row, its maximum and its sum go to global memory and back for every pair of tiles.
// Bound: latency. One warp on most multiprocessors can hide none of it.
// Against the previous rung: no T x T matrix, and yet slower than V1, because it gave up the parallelism. Fewer bytes
//   do not help where no memory system is busy. Tiles wholly above the diagonal, which the published program computes
//   and cancels, are skipped here, and any T is taken.
//
// Compiled with HEAD_DIM. q, k, v, out are (B * H, T, D) contiguous; top and total are (B * H, T).
// Shared: (3 * 32 * D + 32 * 32) floats.
#include "../cuda_headers/device.cuh"

#define TILE 32

extern "C" __global__ void __launch_bounds__(32)
    flash_one_warp_a_head(float* out, float* top, float* total, const float* q, const float* k, const float* v, int T,
                          float scale) {
  extern __shared__ float shared[];
  float *q_tile = shared, *k_tile = q_tile + TILE * HEAD_DIM, *v_tile = k_tile + TILE * HEAD_DIM,
        *s = v_tile + TILE * HEAD_DIM;
  int r = threadIdx.x, head = blockIdx.x * gridDim.y + blockIdx.y, tiles = (T + TILE - 1) / TILE;
  i64 base = (i64)head * T;
  for (int j = 0; j < tiles; j++) {
    int key = j * TILE + r, keys = min(TILE, T - j * TILE);
    for (int d = 0; d < HEAD_DIM; d++) {
      k_tile[r * HEAD_DIM + d] = key < T ? k[(base + key) * HEAD_DIM + d] : 0.0f;
      v_tile[r * HEAD_DIM + d] = key < T ? v[(base + key) * HEAD_DIM + d] : 0.0f;
    }
    __syncwarp();
    for (int i = j; i < tiles; i++) {
      int query = i * TILE + r;
      if (query < T) {  // no lane needs another's row: what is shared is the tile of keys and values
        for (int d = 0; d < HEAD_DIM; d++) q_tile[r * HEAD_DIM + d] = q[(base + query) * HEAD_DIM + d];
        float old_top = j == 0 ? negative_infinity() : top[base + query], old_total = j == 0 ? 0.0f : total[base + query];
        int seen = min(keys, query - j * TILE + 1);  // at least one: the first key of the tile
        float new_top = old_top;
        for (int c = 0; c < seen; c++) {
          float sum = 0.0f;
          for (int d = 0; d < HEAD_DIM; d++) sum += q_tile[r * HEAD_DIM + d] * k_tile[c * HEAD_DIM + d];
          s[r * TILE + c] = sum * scale;
          new_top = fmaxf(new_top, sum * scale);
        }
        float sum = 0.0f;
        for (int c = 0; c < seen; c++) {
          float e = exp_fast(s[r * TILE + c] - new_top);
          s[r * TILE + c] = e;
          sum += e;
        }
        float rescale = exp_fast(old_top - new_top), new_total = rescale * old_total + sum;
        float* row = out + (base + query) * HEAD_DIM;
        for (int d = 0; d < HEAD_DIM; d++) {
          float mixed = 0.0f;
          for (int c = 0; c < seen; c++) mixed += s[r * TILE + c] * v_tile[c * HEAD_DIM + d];
          float before = j == 0 ? 0.0f : row[d] * old_total * rescale;
          row[d] = (before + mixed) / new_total;
        }
        top[base + query] = new_top;
        total[base + query] = new_total;
      }
    }
    __syncwarp();
  }
}
