// Attention forward for Hopper: a warp that copies, warpgroups that multiply, and nobody who waits for a whole block.
//
// Grid: as many blocks as multiprocessors (or fewer); each walks over tiles of QUERIES rows of one head in an order that is
// fixed by its index, or that the host wrote into a table. Threads: a warpgroup of which one thread asks the copy engine for
// tiles, then GROUPS of 64 rows.
// Neighbouring blocks, CLUSTER of them, walk over the same keys: each asks for its share of a tile of keys and has it copied
// to all of them. They take neighbouring heads of one group, or neighbouring tiles of rows of one head; then they change
// places every turn, since under a causal mask the lower tile has less to do.
// A group's step: scores of a tile of keys are begun, then the values of the tile before are added; while both run, it
// waits for the scores alone and computes their weights; then it waits for the sums and brings them to the new maximum.
// Keys go from the last visible tile to the first: the tile that needs a mask for sure comes first, once.
//
// Compiled with T16; HEAD_DIM and VALUE_DIM, the head dims of queries and keys and of values, each rounded up to a multiple
// of 16; DIMS, the columns of out (a multiple of 8, of which VALUE_DIM is made); GROUPS; KEYS a tile (a multiple of 16);
// STAGES of keys and of values; CLUSTER, 1 or 2, and of those blocks CLUSTER_HEADS heads; REGISTERS_COPY and REGISTERS_GROUP
// a thread; and switches:
//   DIAGONAL   row i sees keys below i + reach        WINDOW  row i sees keys from i + lag on
//   PING_PONG  groups begin their products in turn    SNAKE   every other round of tiles goes backwards over the blocks
//   TABLE      tiles are walked over as `order` says; otherwise in turn, and nobody reads `order`
//   QUERY_SLOTS 2: the next tile's queries are copied while this one's are used
//   SPLIT      the tiles that are left after whole_turns full rounds are dealt to all blocks in pieces of their keys, which
//              `order` tells: three numbers a turn and cluster, the tile (-1: as without a table) and begin and end of its
//              tiles of keys (alike: no more), the first row for all full rounds, then one a turn. A piece's sums go to
//              `parts`, its maximum and sum of weights to `part_rows`; combine.cu puts the pieces of a tile together
//   ALTERNATE  groups take the block's rows from the first on, and every other turn from the last on: under a causal mask
//              the last ones have the most to do, and groups wait for one another only through slots and stages
//   EARLY      (no WINDOW, no SPLIT, each row sees a key) the next tile's first scores are computed beside this one's last
//              values
//   SLACK      sums are brought to a new maximum only where it rose by more than so many powers of two (0: always)
//   FIXED_MAX  (no EARLY, CLUSTER 1) a tile without a mask is computed with the maximum as it is; where sums then left the
//              range of numbers, the block computes those tiles of rows again after all others, by online softmax
// scale2 = scale * log2(e) > 0. Strides of out count elements, are 64-bit and multiples of 8. lse is (B * H, L). by_X is
// 2^62 / X, rounded up.
// Shared: 1024 + (QUERY_SLOTS * QUERIES * PANELS + STAGES * KEYS * (PANELS + VALUE_PANELS)) * 128 bytes, then the barriers.
#include "../cuda_headers/copy_engine.cuh"
#include "../cuda_headers/fragments.cuh"
#include "../cuda_headers/warpgroup.cuh"

#define QUERIES (64 * GROUPS)
#define THREADS (128 * GROUPS + 128)
#define CLUSTER_TILES (CLUSTER / CLUSTER_HEADS)  // of rows
#define PANELS ((HEAD_DIM + 63) / 64)
#define VALUE_PANELS ((VALUE_DIM + 63) / 64)
#define ROW_BYTES 128
#define QUERY_BYTES (QUERIES * ROW_BYTES * PANELS)
#define KEY_BYTES (KEYS * ROW_BYTES * PANELS)
#define VALUE_BYTES (KEYS * ROW_BYTES * VALUE_PANELS)
#define SCORE_TILES (KEYS / 8)
#define DIM_TILES (VALUE_DIM / 8)
#define FIRST_TURN 1  // of the block's barriers 0 to 15, the one of group 0
#define FIRST_REVIEW 8  // the one of group 0 where a group agrees on whether its sums are in doubt
#define MADE 15         // where groups wait for the barriers in shared memory
#define DOUBTS 256      // turns that are told apart; those beyond share a mark
#define GREATEST_SUM 1e18f
#if CLUSTER > 1
#define CLUSTERED __cluster_dims__(CLUSTER, 1, 1)
#else
#define CLUSTERED
#endif

// Between this and GREATEST_SUM sums of weights are as exact as any: rounding is relative, but fp16 ends at 6e-8. Where 0
// was put in for a maximum, a sum may be of so many weights that none of them is near 1.
__device__ __forceinline__ float least_sum(bf16, float, int) { return 1e-18f; }
__device__ __forceinline__ float least_sum(fp16, float top, int keys) {
  return top == 0.0f ? fmaxf(0.5f, (float)keys / 8192) : 0.5f;
}

struct Barriers {
  Barrier q_full[QUERY_SLOTS], q_empty[QUERY_SLOTS], k_full[STAGES], k_empty[STAGES], v_full[STAGES], v_empty[STAGES];
#if FIXED_MAX
  Barrier all_computed;
  volatile unsigned any_doubt;
  unsigned doubts[DOUBTS / 32];  // turns that some group wants to do again

  __device__ __forceinline__ void doubt(int turn) {
    atomicOr(&doubts[turn / 32 % (DOUBTS / 32)], 1u << turn % 32);
    any_doubt = 1;
  }
  __device__ __forceinline__ bool doubtful(int turn) const { return doubts[turn / 32 % (DOUBTS / 32)] >> turn % 32 & 1; }
#endif
};

// Place in a ring of buffers, and the parity of the round.
template <int Buffers> struct Ring {
  int stage = 0;
  unsigned phase = 0;
  __device__ __forceinline__ void next() {
    if (++stage == Buffers) stage = 0, phase ^= 1;
  }
};

// heads: those of a cluster count once. row_tiles: of CLUSTER_TILES * QUERIES rows.
struct Shape {
  int heads, H, L, S, row_tiles, section, reach, lag, whole_turns;
  u64 by_H, by_group, by_row_tiles, by_section, by_section_tiles;
};

// What is the same for a warp, so that the compiler knows it, too.
__device__ __forceinline__ bool alike(bool x) { return __all_sync(FULL_WARP, x); }

// n / X of a number below 2^30, as large as X may be: a division would take a hundred cycles, before anything is copied.
__device__ __forceinline__ int divide(int n, u64 by_x) { return (int)__umul64hi((u64)((unsigned)n * 4), by_x); }

// A tile of rows, and the tiles of keys, begin .. end - 1, that any row of the cluster sees. backwards: the first group
// has the last rows.
struct Work {
  int head, first, begin, end;  // head: of all batch entries
  bool backwards;
  __device__ __forceinline__ int batch(const Shape& shape) const { return divide(head, shape.by_H); }
};

__device__ __forceinline__ int tiles_of(int keys) { return (keys + KEYS - 1) / KEYS; }

// The cluster's tiles, one a turn. `order`: head * row_tiles + row tile of each cluster's turn, clusters side by side, and -1
// where one has no more; it is read a turn early. Without it: of a section of heads, the last rows of all heads come first.
struct Turns {
  const int* order;
  int turn = 0, ahead = 0, begin = 0, end = 0;
  __device__ __forceinline__ int clusters() const { return gridDim.x / CLUSTER; }
  __device__ __forceinline__ int cluster() const { return blockIdx.x / CLUSTER; }
  // What is read is known to be the same for a warp, which bounds of keys that are computed here would not be: then
  // descriptors would be moved to uniform registers again before each product.
  __device__ __forceinline__ void look_ahead(const Shape& shape) {
    int place = cluster(), all = clusters();
    if (FIXED_MAX) {  // else what is wanted in four places is kept in registers, and spilled
      hide(place);
      all = blocks_of_grid() / CLUSTER;
    }
    if (TABLE) ahead = order[turn * all + place];
    if (SPLIT) {
      const int* piece = order + 3 * (max(turn - shape.whole_turns + 1, 0) * all + place);
      ahead = piece[0], begin = piece[1], end = piece[2];
    }
  }
  __device__ __forceinline__ bool take(Work& work, const Shape& shape);
  // With FIXED_MAX: what is in doubt, after all tiles.
  __device__ __forceinline__ void start_again(const Shape& shape) {
    turn = 0;
    look_ahead(shape);
  }
};

__device__ __forceinline__ bool Turns::take(Work& work, const Shape& shape) {
  int head, row_tile;
  if (TABLE) {
    if (ahead < 0) return false;
    head = divide(ahead, shape.by_row_tiles);
    row_tile = ahead - head * shape.row_tiles;
  } else {
    int place = SNAKE && turn % 2 ? clusters() - 1 - cluster() : cluster(), tile = turn * clusters() + place;
    if (SPLIT && ahead >= 0) tile = ahead;
    if (SPLIT && begin >= end) return false;
    if (tile >= shape.heads * shape.row_tiles) return false;
    int section = divide(tile, shape.by_section_tiles), inside = tile - section * shape.section * shape.row_tiles;
    int heads = min(shape.section, shape.heads - section * shape.section);
    int from_last = heads == shape.section ? divide(inside, shape.by_section) : inside / heads;
    head = section * shape.section + inside - from_last * heads;
    row_tile = shape.row_tiles - 1 - from_last;
  }
  work.head = head * CLUSTER_HEADS + blockIdx.x % CLUSTER_HEADS;
  int first = row_tile * CLUSTER_TILES * QUERIES;
  work.first = first + (blockIdx.x + turn) % CLUSTER_TILES * QUERIES;
  int high = DIAGONAL ? min(shape.S, min(first + CLUSTER_TILES * QUERIES, shape.L) - 1 + shape.reach) : shape.S;
  work.end = SPLIT ? end : tiles_of(max(high, 0));
  work.backwards = ALTERNATE && turn % 2;
  work.begin = SPLIT ? begin : WINDOW ? min(max(first + shape.lag, 0) / KEYS, work.end) : 0;
  turn++;
  return true;
}

// --- the copying thread ---------------------------------------------------------------------------------------------

struct Copies {
  const TensorMap *q, *k, *v;
  char *queries, *keys, *values;
  Barriers* barriers;
  Ring<QUERY_SLOTS> query_ring;
  Ring<STAGES> key_ring, value_ring;

  // `Blocks` share the tile: each asks for a part of the rows, and all get it.
  template <int Blocks, int Panels>
  __device__ __forceinline__ void fill(char* to, const TensorMap& map, Barrier* full, int rows, int row, int head, int batch) {
    int part = blockIdx.x % Blocks * (rows / Blocks);
    arrive_expecting(full, rows * ROW_BYTES * Panels);
#pragma unroll
    for (int panel = 0; panel < Panels; panel++)
      copy_box_to<Blocks>(to + (panel * rows + part) * ROW_BYTES, map, full, panel * 64, row + part, head, batch);
  }
  __device__ __forceinline__ void fill_keys(int tile, int head, int batch) {
    wait_for(&barriers->k_empty[key_ring.stage], key_ring.phase ^ 1);
    fill<CLUSTER, PANELS>(keys + key_ring.stage * KEY_BYTES, *k, &barriers->k_full[key_ring.stage], KEYS, tile * KEYS, head,
                          batch);
    key_ring.next();
  }
  __device__ __forceinline__ void fill_values(int tile, int head, int batch) {
    wait_for(&barriers->v_empty[value_ring.stage], value_ring.phase ^ 1);
    fill<CLUSTER, VALUE_PANELS>(values + value_ring.stage * VALUE_BYTES, *v, &barriers->v_full[value_ring.stage], KEYS,
                                tile * KEYS, head, batch);
    value_ring.next();
  }
  __device__ __forceinline__ void fill_queries(const Work& work, int head, int batch) {
    wait_for(&barriers->q_empty[query_ring.stage], query_ring.phase ^ 1);
    fill<1, PANELS>(queries + query_ring.stage * QUERY_BYTES, *q, &barriers->q_full[query_ring.stage], QUERIES, work.first,
                    head, batch);
    query_ring.next();
  }
  // A second slot for queries is free long before this tile's first keys can be copied, an only one is free after them.
  // Values are needed a tile later than keys, so they are asked for a tile later.
  __device__ __forceinline__ void serve(const Work& work, const Shape& shape) {
    if (work.begin >= work.end) return;
    int batch = work.batch(shape), query_head = work.head - batch * shape.H, head = divide(query_head, shape.by_group);
    if (QUERY_SLOTS > 1) fill_queries(work, query_head, batch);
    fill_keys(work.end - 1, head, batch);
    if (QUERY_SLOTS == 1) fill_queries(work, query_head, batch);
#pragma unroll 1
    for (int tile = work.end - 2; tile >= work.begin; tile--) {
      fill_keys(tile, head, batch);
      fill_values(tile + 1, head, batch);
    }
    fill_values(work.begin, head, batch);
  }
  // Until no other block will arrive at this one's barriers: before, this one may not leave.
  __device__ __forceinline__ void see_all_released() {
    for (int stage = 0; stage < STAGES; stage++) {
      wait_for(&barriers->k_empty[key_ring.stage], key_ring.phase ^ 1);
      wait_for(&barriers->v_empty[value_ring.stage], value_ring.phase ^ 1);
      key_ring.next();
      value_ring.next();
    }
  }
};

// --- a multiplying group --------------------------------------------------------------------------------------------

// The two rows of scores that a lane holds: maximum, sum of this lane's weights, what earlier sums are worth now, and the
// keys that they see.
struct Rows {
  float top[2], sum[2], rescale[2];
  int low[2], high[2];
};

__device__ __forceinline__ void mask_tile(float (*s)[4], const Rows& rows, int key) {
  int column = key + 2 * (threadIdx.x % 4);
#pragma unroll
  for (int r = 0; r < 2; r++) {
    int high = rows.high[r] - column, low = rows.low[r] - column;
#pragma unroll
    for (int n = 0; n < SCORE_TILES; n++) {
#pragma unroll
      for (int e = 0; e < 2; e++)
        if (n * 8 + e >= high || (WINDOW && n * 8 + e < low)) s[n][2 * r + e] = negative_infinity();
    }
  }
}

// Online softmax of one tile: s becomes weights; with the maximum as it is where that is `Fixed`.
template <bool First, bool Masked, bool Fixed>
__device__ __forceinline__ void softmax_tile(float (*s)[4], Rows& rows, float scale2) {
#pragma unroll
  for (int r = 0; r < 2; r++) {
    float top = First ? fmaxf(s[0][2 * r], s[0][2 * r + 1]) : rows.top[r];
    if (!Fixed) {
#pragma unroll
      for (int n = First; n < SCORE_TILES; n++) top = fmaxf(top, fmaxf(s[n][2 * r], s[n][2 * r + 1]));
      top = quad_max(top);
    }
    if (SLACK && !First && (top - rows.top[r]) * scale2 <= (float)SLACK) top = rows.top[r];
    float shift = Masked && top == negative_infinity() ? 0.0f : top * scale2;  // a row may have seen no key yet
    rows.rescale[r] = First ? 0.0f : Fixed ? 1.0f : exp2_fast(rows.top[r] * scale2 - shift);
    rows.top[r] = top;
    float even = 0.0f, odd = 0.0f;  // two sums: one would be a chain of additions longer than the exponentials take
#pragma unroll
    for (int n = 0; n < SCORE_TILES; n++) {
      s[n][2 * r] = exp2_fast(s[n][2 * r] * scale2 - shift);
      s[n][2 * r + 1] = exp2_fast(s[n][2 * r + 1] * scale2 - shift);
      even += s[n][2 * r];
      odd += s[n][2 * r + 1];
    }
    rows.sum[r] = First ? even + odd : rows.sum[r] * rows.rescale[r] + (even + odd);
  }
}

struct Results {
  T16* out;
  float* lse;
  i64 batch_stride, head_stride, row_stride;
  float scale;
  float* parts;
  float2* part_rows;
};

// What a warpgroup holds of its 64 rows.
struct Group {
  float s[SCORE_TILES][4], acc[DIM_TILES][4];
  unsigned weights[KEYS / 16][4];
  Rows rows;
  Ring<QUERY_SLOTS> queries;
  Ring<STAGES> keys, values;
  Barriers* barriers;
  u64 query_operand, key_operand, value_operand;
  float scale2;
  int index, place;  // of the group in its block, and of its rows where groups ALTERNATE
  bool online = false;  // with FIXED_MAX: each tile's maximum counts after all

  __device__ __forceinline__ void release(Barrier* empty) const {
    if (threadIdx.x % 32 == 0) arrive(empty);  // each warp for itself: products of another may still be reading
  }
  // To all blocks that will copy there.
  __device__ __forceinline__ void release_shared(Barrier* empty) const {
    if (CLUSTER == 1) release(empty);
    else if (threadIdx.x % 32 < CLUSTER) arrive_at(empty, threadIdx.x % 32);
  }
  __device__ __forceinline__ void take_turn() const {
    if (PING_PONG) meet_at<256>(FIRST_TURN + index);
  }
  __device__ __forceinline__ void end_turn() const {
    if (PING_PONG) pass<256>(FIRST_TURN + (index + 1 == GROUPS ? 0 : index + 1));
  }

  // Begun, not waited for.
  __device__ __forceinline__ void start_scores() {
    u64 q = query_operand + queries.stage * (QUERY_BYTES >> 4), k = key_operand + keys.stage * (KEY_BYTES >> 4);
    if (ALTERNATE) q += place * (64 * ROW_BYTES >> 4);
    settle<SCORE_TILES>(s);
    begin_products();
#pragma unroll
    for (int d = 0; d < HEAD_DIM / 16; d++) {
      int panel = d / 4, inside = d % 4 * 32;
      multiply_shared<KEYS, T16>(s, q + ((panel * QUERIES * ROW_BYTES + inside) >> 4),
                                 k + ((panel * KEYS * ROW_BYTES + inside) >> 4), d > 0);
    }
    commit_products();
  }
  __device__ __forceinline__ void start_values() {
    u64 v = value_operand + values.stage * (VALUE_BYTES >> 4);
    settle<DIM_TILES>(acc);
    settle_operands<KEYS / 16>(weights);
    begin_products();
#pragma unroll
    for (int step = 0; step < KEYS / 16; step++)
      add_product<VALUE_DIM, T16>(acc, weights[step], v + (step * 16 * ROW_BYTES >> 4));
    commit_products();
  }
  __device__ __forceinline__ void await_values() { wait_for(&barriers->v_full[values.stage], values.phase); }
  __device__ __forceinline__ void end_values() {
    wait_for_products<0>();
    settle<DIM_TILES>(acc);
    release_shared(&barriers->v_empty[values.stage]);
    values.next();
  }
  __device__ __forceinline__ void rescale_sums() {
    bool same = rows.rescale[0] == 1.0f && rows.rescale[1] == 1.0f;
    if (SLACK && __all_sync(FULL_WARP, same)) return;
#pragma unroll
    for (int n = 0; n < DIM_TILES; n++) {
#pragma unroll
      for (int e = 0; e < 4; e++) acc[n][e] *= rows.rescale[e / 2];
    }
  }

  // A tile of keys; `last`: no tile after this one needs the queries.
  template <bool First, bool Masked, bool Fixed = false> __device__ __forceinline__ void attend(int tile, bool last) {
    if (!EARLY || !First) {
      wait_for(&barriers->k_full[keys.stage], keys.phase);
      take_turn();
      start_scores();
      if (!First) {
        await_values();
        start_values();
      }
      end_turn();
    }
    wait_for_products<First ? 0 : 1>();
    settle<SCORE_TILES>(s);
    release_shared(&barriers->k_empty[keys.stage]);
    keys.next();
    if (last) release(&barriers->q_empty[queries.stage]);
    if (Masked) mask_tile(s, rows, tile * KEYS);
    softmax_tile<First, Masked, Fixed>(s, rows, scale2);
    if (!First) {
      compute_before_waiting(rows.sum[0] + rows.sum[1], barriers);
      end_values();
      if (!Fixed) rescale_sums();
    }
#pragma unroll
    for (int step = 0; step < KEYS / 16; step++) results_to_a<T16>(weights[step], s, step);
  }
  // A tile that other groups see and this one does not.
  __device__ __forceinline__ void skip() {
    wait_for(&barriers->k_full[keys.stage], keys.phase);
    take_turn();
    end_turn();
    release_shared(&barriers->k_empty[keys.stage]);
    keys.next();
    await_values();
    release_shared(&barriers->v_empty[values.stage]);
    values.next();
  }

  __device__ __forceinline__ int place_in(const Work& work) const { return work.backwards ? GROUPS - 1 - index : index; }
  // Of 64.
  __device__ __forceinline__ int first_row(const Work& work) const { return work.first + 64 * place_in(work); }
  // The tile of keys after the last one that a group's 64 rows see.
  __device__ __forceinline__ int end_of(int first, const Work& work, const Shape& shape) const {
    int end = DIAGONAL ? min(tiles_of(max(min(first + 64, shape.L) - 1 + shape.reach, 0)), work.end) : work.end;
    if (first >= shape.L) end = work.begin;
    return end;
  }
  __device__ __forceinline__ void begin_rows(int first, const Shape& shape) {
    int row = first + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
#pragma unroll
    for (int r = 0; r < 2; r++) {
      rows.top[r] = negative_infinity();
      rows.sum[r] = 0.0f;
      rows.high[r] = DIAGONAL ? min(shape.S, row + 8 * r + shape.reach) : shape.S;
      rows.low[r] = row + 8 * r + shape.lag;
    }
#pragma unroll
    for (int n = 0; n < DIM_TILES; n++) acc[n][0] = acc[n][1] = acc[n][2] = acc[n][3] = 0.0f;
  }

  // From here on they stay, also of a row that saw no key yet.
  __device__ __forceinline__ void keep_maxima() {
#pragma unroll
    for (int r = 0; r < 2; r++)
      if (rows.top[r] == negative_infinity()) rows.top[r] = 0.0f;
  }
  // Whether sums left the range where they are exact, in any of the group's rows. Then the group goes on online: what the
  // data did once it does again. `total`: of weights.
  __device__ __forceinline__ bool in_doubt(const float* total, int row, const Shape& shape) {
    if (!FIXED_MAX || online) return false;
    float zero = 0.0f;
#pragma unroll
    for (int n = 0; n < DIM_TILES; n++) {
#pragma unroll
      for (int e = 0; e < 4; e++) zero = fmaf(acc[n][e], 0.0f, zero);
    }
    bool fine = zero == 0.0f;
#pragma unroll
    for (int r = 0; r < 2; r++) {
      int at = row + 8 * r, low = WINDOW ? max(at + shape.lag, 0) : 0;
      bool sees = at < shape.L && low < (DIAGONAL ? min(at + shape.reach, shape.S) : shape.S);
      fine = fine && (!sees || (total[r] >= least_sum(T16(), rows.top[r], shape.S) && total[r] <= GREATEST_SUM));
    }
    online = alike(any_of<128>(FIRST_REVIEW + index, !fine));
    return online;
  }

  // A tile of rows; where EARLY, without what comes before its first scores and after its last ones.
  template <bool Again> __device__ __forceinline__ void walk(const Work& work, const Shape& shape) {
    int first = first_row(work);
    place = place_in(work);
    begin_rows(first, shape);
    int end = end_of(first, work, shape), tile = (EARLY ? end : work.end) - 1;
    int begin = WINDOW ? max(max(first + shape.lag, 0) / KEYS, work.begin) : work.begin;
#pragma unroll 1
    for (; !EARLY && tile >= end; tile--) skip();
    if (!EARLY && tile < begin) {
      if (work.begin < work.end) release(&barriers->q_empty[queries.stage]);
    } else {
      attend<true, true>(tile, tile == begin);
      tile--;
      if (WINDOW) {
#pragma unroll 1
        for (; tile >= begin; tile--) {
          bool all_seen = (!DIAGONAL || (tile + 1) * KEYS <= first + shape.reach) && tile * KEYS >= first + 63 + shape.lag;
          if (!Again && all_seen && !online) {
            if (FIXED_MAX) keep_maxima();
            attend<false, false, FIXED_MAX>(tile, tile == begin);
          } else attend<false, true>(tile, tile == begin);
        }
      } else {
        if (DIAGONAL || FIXED_MAX)
#pragma unroll 1
          for (; tile >= begin && (Again || online || (DIAGONAL && (tile + 1) * KEYS > first + shape.reach)); tile--)
            attend<false, true>(tile, tile == begin);
        if (FIXED_MAX && !Again) keep_maxima();
#pragma unroll 1
        for (; !Again && tile >= begin; tile--) attend<false, false, FIXED_MAX>(tile, tile == begin);
      }
      if (!EARLY) {
        await_values();
        start_values();
        end_values();
      }
    }
#pragma unroll 1
    for (; !EARLY && tile >= work.begin; tile--) skip();
  }

  // EARLY: the tile `next`, as `work`, whose first scores are there if `begun`; then what follows it becomes `next`, whose
  // first scores are computed beside the last values. Not where it has keys to skip: their values would wait for these.
  // Scores wait for the values, too: products that go on into the next round of a loop are made serial by the compiler.
  __device__ __forceinline__ bool walk_on(Turns& turns, Work& work, Work& next, bool& begun, const Shape& shape) {
    work = next;
    place = place_in(work);
    int end = end_of(first_row(work), work, shape);
    bool any = alike(work.begin < end);
    if (alike(!begun)) {
      wait_for(&barriers->q_full[queries.stage], queries.phase);
#pragma unroll 1
      for (int tile = work.end - 1; tile >= end; tile--) skip();
      if (any) compute_first(false);
    }
    if (any) walk<false>(work, shape);
    else release(&barriers->q_empty[queries.stage]);
    queries.next();
    bool more = turns.take(next, shape);
    if (more) turns.look_ahead(shape);
    end = end_of(first_row(next), next, shape);
    place = place_in(next);
    begun = alike(more && any && next.begin < end && end == next.end);
    if (begun) {
      wait_for(&barriers->q_full[queries.stage], queries.phase);
      compute_first(true);
    } else if (any) {
      await_values();
      start_values();
      end_values();
    }
    return more;
  }
  // A tile's first scores, `beside` the last values of the tile before.
  __device__ __forceinline__ void compute_first(bool beside) {
    wait_for(&barriers->k_full[keys.stage], keys.phase);
    take_turn();
    start_scores();
    if (beside) {
      await_values();
      start_values();
    }
    end_turn();
    if (beside) end_values();
    else wait_for_products<0>();
    settle<SCORE_TILES>(s);
  }

  // A tile of rows, but for what finish does.
  template <bool Again> __device__ __forceinline__ void compute(Turns& turns, const Work& work, const Shape& shape) {
    if (work.begin < work.end) wait_for(&barriers->q_full[queries.stage], queries.phase);
    walk<Again>(work, shape);
    if (work.begin < work.end) queries.next();
    turns.look_ahead(shape);  // here, where registers are free and there is the result to store meanwhile
  }
  // Its results; with FIXED_MAX, unless this is done `Again`, marks it where it is in doubt.
  template <bool Again>
  __device__ __forceinline__ void finish(const Turns& turns, const Work& work, const Shape& shape, const Results& results) {
    int row = first_row(work) + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
    // In `parts`: of a piece, what the cluster's blocks have, heads one after the other, or tiles of rows.
    int piece = (turns.turn - 1 - shape.whole_turns) * turns.clusters() + turns.cluster();
    int in_cluster = CLUSTER_HEADS > 1 ? blockIdx.x % CLUSTER : work.first / QUERIES % CLUSTER;
    int part_row = (piece * CLUSTER + in_cluster) * QUERIES + row - work.first;
    bool part = SPLIT && alike(turns.turn > shape.whole_turns);  // now the compiler knows, too
    float total[2], factor[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
      total[r] = quad_sum(rows.sum[r]);
      factor[r] = total[r] > 0.0f ? 1.0f / total[r] : 0.0f;
      if (threadIdx.x % 4 == 0 && row + 8 * r < shape.L) {
        if (part) results.part_rows[part_row + 8 * r] = make_float2(rows.top[r], total[r]);
        else
          results.lse[(i64)work.head * shape.L + row + 8 * r] =
              total[r] > 0.0f ? add_log(rows.top[r] * results.scale, total[r]) : negative_infinity();
      }
    }
#if FIXED_MAX
    if (!Again && in_doubt(total, row, shape) && threadIdx.x % 128 == 0) barriers->doubt(turns.turn - 1);
#endif
    if (part) {
      store_part(results.parts + (i64)part_row * VALUE_DIM);
    } else {
      int batch = work.batch(shape);
      T16* out = results.out + batch * results.batch_stride + (work.head - batch * shape.H) * results.head_stride;
      store(out, results.row_stride, row, shape.L, factor);
    }
  }

  // Sums as they are, this lane's of two rows of `parts`.
  __device__ __forceinline__ void store_part(float* to) const {
    to += 2 * (threadIdx.x % 4);
#pragma unroll
    for (int n = 0; n < DIM_TILES; n++) {
#pragma unroll
      for (int r = 0; r < 2; r++)
        *(float2*)(to + 8 * r * VALUE_DIM + 8 * n) = make_float2(acc[n][2 * r], acc[n][2 * r + 1]);
    }
  }
  // Rows of `out`, 32 bytes of a row by four lanes: two tiles of columns, of which a lane holds two columns each, become
  // four columns of one.
  __device__ __forceinline__ void store(T16* out, i64 row_stride, int row, int L, const float* factor) const {
    int lane = threadIdx.x % 4, odd = lane % 2;
#pragma unroll
    for (int n = 0; n < DIM_TILES; n += 2) {
      int column = (n + odd) * 8 + lane / 2 * 4;
#pragma unroll
      for (int r = 0; r < 2; r++) {
        unsigned left = pack2<T16>(acc[n][2 * r] * factor[r], acc[n][2 * r + 1] * factor[r]);
        unsigned right = pack2<T16>(acc[n + 1][2 * r] * factor[r], acc[n + 1][2 * r + 1] * factor[r]);
        unsigned got = __shfl_xor_sync(FULL_WARP, odd ? left : right, 1);
        if (row + 8 * r < L && column < DIMS)
          *(uint2*)(out + (row + 8 * r) * row_stride + column) = odd ? make_uint2(got, right) : make_uint2(left, got);
      }
    }
  }
};

extern "C" __global__ void CLUSTERED __launch_bounds__(THREADS, 1)
    hopper_cuda_forward(const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k,
                        const __grid_constant__ TensorMap v, T16* out, float* lse, const int* table, i64 ob, i64 oh,
                        i64 ot, float scale, int heads, int H, int L, int S, int row_tiles, int section, int reach,
                        int lag, i64 by_H, i64 by_group, i64 by_row_tiles, i64 by_section, i64 by_section_tiles,
                        float* parts, float2* part_rows, int whole_turns) {
  extern __shared__ char unaligned[];
  char* queries = unaligned + (1024 - (unsigned)__cvta_generic_to_shared(unaligned) % 1024) % 1024;
  char *keys = queries + QUERY_SLOTS * QUERY_BYTES, *values = keys + STAGES * KEY_BYTES;
  Barriers* barriers = (Barriers*)(values + STAGES * VALUE_BYTES);
  Shape shape = {heads, H, L, S, row_tiles, section, reach, lag, whole_turns, (u64)by_H, (u64)by_group,
                 (u64)by_row_tiles, (u64)by_section, (u64)by_section_tiles};
  Results results = {out, lse, ob, oh, ot, scale, parts, part_rows};
  Turns turns = {table};
  turns.look_ahead(shape);
  if (threadIdx.x == 0) {
    fetch_map(k);
    fetch_map(q);
    fetch_map(v);
    for (int slot = 0; slot < QUERY_SLOTS; slot++) {
      make_barrier(&barriers->q_full[slot], 1);
      make_barrier(&barriers->q_empty[slot], 4 * GROUPS);
    }
    for (int stage = 0; stage < STAGES; stage++) {
      make_barrier(&barriers->k_full[stage], 1);
      make_barrier(&barriers->v_full[stage], 1);
      make_barrier(&barriers->k_empty[stage], 4 * GROUPS * CLUSTER);
      make_barrier(&barriers->v_empty[stage], 4 * GROUPS * CLUSTER);
    }
#if FIXED_MAX
    make_barrier(&barriers->all_computed, GROUPS);
    for (int word = 0; word < DOUBTS / 32; word++) barriers->doubts[word] = 0;
    barriers->any_doubt = 0;
#endif
    publish_barriers();
  }
  if (CLUSTER > 1) meet_cluster();

  int warpgroup = __shfl_sync(FULL_WARP, threadIdx.x / 128, 0);  // the same for a warp, which the compiler then knows
  Work work;
  if (warpgroup == 0) {
    if (CLUSTER == 1) pass<THREADS>(MADE);  // who made the barriers need not wait for those who use them
    if (GROUPS > 1) shrink_to<REGISTERS_COPY>();
    if (threadIdx.x == 0) {
      Copies copies = {&q, &k, &v, queries, keys, values, barriers};
#pragma unroll 1
      while (turns.take(work, shape)) {
        turns.look_ahead(shape);
        copies.serve(work, shape);
      }
#if FIXED_MAX
      wait_for(&barriers->all_computed, 0);
      if (barriers->any_doubt) {
        turns.start_again(shape);
#pragma unroll 1
        while (turns.take(work, shape)) {
          turns.look_ahead(shape);
          if (barriers->doubtful(turns.turn - 1)) copies.serve(work, shape);
        }
      }
#endif
      if (CLUSTER > 1) copies.see_all_released();
    }
  } else {
    if (CLUSTER == 1) meet_at<THREADS>(MADE);
    if (GROUPS > 1) grow_to<REGISTERS_GROUP>();
    Group own;
    own.barriers = barriers;
    own.index = warpgroup - 1;
    own.query_operand = describe_operand(queries + (ALTERNATE ? 0 : own.index * 64 * ROW_BYTES), 0);
    own.key_operand = describe_operand(keys, 0);
    own.value_operand = describe_operand(values, KEYS * ROW_BYTES);
    own.scale2 = scale * LOG2_E;
    if (PING_PONG && own.index == 0) pass<256>(FIRST_TURN);
    Work next;
    bool more = EARLY && turns.take(next, shape), begun = false;
    if (more) turns.look_ahead(shape);
#pragma unroll 1
    while (EARLY ? more : turns.take(work, shape)) {
      if (EARLY) more = own.walk_on(turns, work, next, begun, shape);
      else own.compute<false>(turns, work, shape);
      own.finish<false>(turns, work, shape, results);
    }
#if FIXED_MAX
    if (threadIdx.x % 128 == 0) arrive(&barriers->all_computed);
    wait_for(&barriers->all_computed, 0);
    if (alike(barriers->any_doubt)) {
      turns.start_again(shape);
#pragma unroll 1
      while (turns.take(work, shape)) {
        if (alike(barriers->doubtful(turns.turn - 1))) {
          own.compute<true>(turns, work, shape);
          own.finish<true>(turns, work, shape, results);
        } else {
          turns.look_ahead(shape);
        }
      }
    }
#endif
  }
}
