// Stands in for the ladder's copy_engine.cuh: tensor copies by PTX ISA 8.x, "cp.async.bulk.tensor" and its 128-byte swizzle,
// phases by "mbarrier". In orders 1 and 2 a copy lands at once, in order 0 only when no thread can go on without one, and
// then the last that was asked for lands first, so that a missing wait and a buffer overwritten too early are seen. A copy
// to several blocks lands in each for itself. Arrivals at another block's barriers are as late.
#pragma once
#include "device.cuh"
#include "warpgroup.cuh"

typedef unsigned long long Barrier;
struct TensorMap {  // as the emulator's encode_tensor_map writes it
  const char* address;
  unsigned long long sizes[4], strides[3];
  unsigned box[4];
};

inline unsigned shared_address(const void* place) { return (unsigned)__cvta_generic_to_shared(place); }

struct EmulatedBarrier {
  int arrivals = 0, missing = 0;
  long long bytes = 0;
  unsigned phase = 0;
};
static std::map<Barrier*, EmulatedBarrier> emulator_barriers;
static bool emulator_barriers_are_public[1024];  // of each block of the cluster

inline EmulatedBarrier& emulator_barrier(Barrier* barrier) {
  if ((unsigned long long)barrier % 8) emulator_fail("mbarrier: not aligned to 8 bytes");
  if (!emulator_barriers.count(barrier)) emulator_fail("mbarrier: used before it was made");
  return emulator_barriers[barrier];
}
inline void emulator_advance(EmulatedBarrier& barrier) {
  if (barrier.missing < 0) emulator_fail("mbarrier: more arrivals than it was made for");
  if (barrier.missing || barrier.bytes) return;
  barrier.phase ^= 1;
  barrier.missing = barrier.arrivals;
}
inline void make_barrier(Barrier* barrier, int arrivals) {
  EmulatedBarrier made;
  made.arrivals = made.missing = arrivals;
  emulator_barriers[barrier] = made;
  emulator_barriers_are_public[emulator_rank] = false;
}
inline void publish_barriers() { emulator_barriers_are_public[emulator_rank] = true; }
inline void emulator_reach(unsigned rank) {
  if (rank >= emulator_cluster) emulator_fail("there is no such block in the cluster");
  else if (rank != emulator_rank && !emulator_cluster_met) emulator_fail("another block is reached for before the cluster met");
  else if (emulator_has_left(rank)) emulator_fail("another block is reached for that has left");
  if (!emulator_barriers_are_public[rank]) emulator_fail("a barrier was made but not published");
}
inline void arrive(Barrier* barrier) {
  auto& found = emulator_barrier(barrier);
  found.missing--;
  emulator_advance(found);
}
inline void arrive_at(Barrier* barrier, int rank) {
  emulator_reach(rank);
  auto there = (Barrier*)emulator_place_in(rank, barrier);
  if (emulator_order || rank == (int)emulator_rank) return arrive(there);
  emulator_asked.push_back([=] {
    if (emulator_has_left(rank)) emulator_fail("an arrival reaches a block that has left");
    else arrive(there);
  });
}
inline void arrive_expecting(Barrier* barrier, int bytes) {
  emulator_barrier(barrier).bytes += bytes;
  arrive(barrier);
}
inline void wait_for(Barrier* barrier, unsigned phase) {
  if (phase > 1) emulator_fail("mbarrier: a parity is 0 or 1");
  emulator_barrier(barrier);
  emulator_wait_until([=] { return emulator_barriers[barrier].phase != phase; });
}

inline void emulator_land(char* to, const TensorMap& map, Barrier* barrier, const long long* from, unsigned rank) {
  if (emulator_has_left(rank)) return emulator_fail("a copy lands in a block that has left");
  const char* base = (const char*)((unsigned long long)emulator_dynamic_shared() / 1024 * 1024);
  for (unsigned row = 0; row < map.box[1]; row++)
    for (unsigned x = 0; x < map.box[0]; x++) {
      long long at[4] = {from[0] + x, from[1] + row, from[2], from[3]};
      bool inside = true;
      unsigned long long offset = at[0] * 2;
      for (int axis = 0; axis < 4; axis++) {
        inside = inside && at[axis] >= 0 && at[axis] < (long long)map.sizes[axis];
        if (axis) offset += at[axis] * map.strides[axis - 1];
      }
      unsigned long long place = to - base + row * 128 + x * 2;
      place ^= (place >> 7 & 7) << 4;
      if (inside) memcpy((char*)base + place, map.address + offset, 2);
      else memset((char*)base + place, 0, 2);
    }
  auto& found = emulator_barrier(barrier);
  found.bytes -= map.box[0] * map.box[1] * 2;
  emulator_advance(found);
}
inline void emulator_check_place(const char* to, unsigned bytes) {
  const char *begin = (const char*)emulator_dynamic_shared(), *end = begin + emulator_shared_bytes;
  auto barrier = emulator_barriers.lower_bound((Barrier*)to);
  if (to < begin || to + bytes > end) emulator_fail("a box leaves the block's shared memory");
  else if (barrier != emulator_barriers.end() && (const char*)barrier->first < to + bytes) emulator_fail("a box covers a barrier");
}
inline void emulator_ask(void* to, const TensorMap& map, Barrier* barrier, int x, int row, int head, int batch,
                         unsigned first, unsigned last) {
  if (shared_address(to) % 1024) emulator_fail("a swizzled box does not begin at a multiple of 1024 bytes");
  if (map.box[0] != 64 || map.box[1] > 256 || map.box[2] != 1 || map.box[3] != 1) emulator_fail("a box of another shape");
  emulator_check_place((const char*)to, map.box[1] * 128);
  if (emulator_error) return;
  std::vector<long long> from = {x, row, head, batch};
  TensorMap kept = map;
  for (unsigned rank = first; rank < last; rank++) {
    emulator_reach(rank);
    auto there = (char*)emulator_place_in(rank, to);
    auto barrier_there = (Barrier*)emulator_place_in(rank, barrier);
    auto land = [=] { emulator_land(there, kept, barrier_there, from.data(), rank); };
    if (emulator_order) land();
    else emulator_asked.push_back(land);
  }
}
inline void copy_box(void* to, const TensorMap& map, Barrier* barrier, int x, int row, int head, int batch) {
  emulator_ask(to, map, barrier, x, row, head, batch, emulator_rank, emulator_rank + 1);
}
template <int Blocks>
inline void copy_box_to(void* to, const TensorMap& map, Barrier* barrier, int x, int row, int head, int batch) {
  if (Blocks == 1) copy_box(to, map, barrier, x, row, head, batch);
  else emulator_ask(to, map, barrier, x, row, head, batch, 0, Blocks);
}
inline void fetch_map(const TensorMap&) {}

struct EmulatedMeeting {
  int came = 0, generation = 0;
};
static EmulatedMeeting emulator_meetings[8][16];  // of each block of a cluster
static const bool emulator_forgets = (emulator_forget.push_back([] {
  emulator_barriers.clear();
  for (auto& meetings : emulator_meetings)
    for (auto& meeting : meetings) meeting = EmulatedMeeting();
}), true);
template <int Threads> inline void pass(int id) {
  if (id < 1 || id > 15) emulator_fail("a block's barrier has a number from 1 to 15");
  auto& meeting = emulator_meetings[emulator_rank][id];
  if (++meeting.came == Threads) meeting.came = 0, meeting.generation++;
}
template <int Threads> inline void meet_at(int id) {
  auto& meeting = emulator_meetings[emulator_rank][id];
  int generation = meeting.generation;
  pass<Threads>(id);
  emulator_wait_until([&meeting, generation] { return meeting.generation != generation; });
}

template <int Threads> inline bool any_of(int id, bool x) {
  static bool any[8][16][2];
  auto& meeting = emulator_meetings[emulator_rank][id];
  bool& found = any[emulator_rank][id][meeting.generation % 2];
  if (!meeting.came) found = false;
  found = found || x;
  meet_at<Threads>(id);
  return found;
}

template <int Registers> inline void shrink_to() { static_assert(Registers % 8 == 0 && Registers >= 24, "setmaxnreg"); }
template <int Registers> inline void grow_to() { static_assert(Registers % 8 == 0 && Registers <= 256, "setmaxnreg"); }
