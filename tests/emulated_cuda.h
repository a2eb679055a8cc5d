// What a kernel in CUDA C++ needs of a GPU, on the CPU: one block after the other, each thread of a block a coroutine.
//
// Threads that could go on take turns at random, and a copy to shared memory is there no sooner than a thread has waited
// for it. The order of memory accesses is not emulated: a thread sees at once what another one has written.

#include <ucontext.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <vector>

using std::max;
using std::min;

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)

struct uint2 {
  unsigned x, y;
};
struct uint4 {
  unsigned x, y, z, w;
};
struct Place {
  unsigned x, y, z;
};
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }

alignas(128) unsigned char memory[232448];  // shared by the threads of a block

namespace emulated {

constexpr unsigned LANES = 32;
constexpr size_t STACK_BYTES = 256 << 10;

struct Copy {
  void* to;
  const void* from;
  unsigned num_bytes;
};

struct Thread {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  Place index;
  std::vector<std::vector<Copy>> copies{{}};  // in groups, of which the last one is open
  bool is_done = false;
};

// Threads that wait for each other, and what they show each other: in two places by turns, so that one that goes on
// does not overwrite what a slower one has yet to read.
struct Meeting {
  unsigned size;
  std::vector<Thread*> here{};
  unsigned turn = 0;
  uint32_t words[2][LANES][6] = {};
};

std::mt19937 random_order;
std::vector<Thread> threads;
std::vector<Thread*> ready;
std::vector<Meeting> warps;
Meeting block{0};
Thread* running;
ucontext_t scheduler;

void meet(Meeting& meeting) {
  if (meeting.here.size() + 1 == meeting.size) {
    ready.insert(ready.end(), meeting.here.begin(), meeting.here.end());
    meeting.here.clear();
    meeting.turn++;
    return;
  }
  Thread* self = running;
  meeting.here.push_back(self);
  swapcontext(&self->context, &scheduler);
}

inline unsigned lane() { return running->index.x % LANES; }
inline Meeting& warp() { return warps[running->index.x / LANES]; }

using Words = uint32_t[LANES][6];

// What all lanes of the warp show each other.
template <typename... Values>
const Words& shown(Values... values) {
  Meeting& own = warp();
  Words& words = own.words[own.turn % 2];
  const uint32_t mine[] = {std::bit_cast<uint32_t>(values)...};
  std::copy(std::begin(mine), std::end(mine), words[lane()]);
  meet(own);
  return words;
}

inline float widened(uint32_t bfloat16) { return std::bit_cast<float>(bfloat16 << 16); }
inline float half(uint32_t word, unsigned which) { return widened(which ? word >> 16 : word & 0xffff); }

inline uint32_t rounded(float value) {  // to bfloat16, and to even
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  return std::isnan(value) ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

std::function<void()> body;

void run_thread() {
  body();
  running->is_done = true;
  swapcontext(&running->context, &scheduler);
}

// Whether all threads came to their end; if not, some wait for others that never come.
bool run_block(unsigned num_threads) {
  threads = std::vector<Thread>(num_threads);
  warps.assign(num_threads / LANES, Meeting{LANES});
  block = Meeting{num_threads};
  for (unsigned i = 0; i < num_threads; i++) {
    Thread& thread = threads[i];
    thread.index = {i, 0, 0};
    thread.stack.reset(new char[STACK_BYTES]);
    getcontext(&thread.context);
    thread.context.uc_stack.ss_sp = thread.stack.get();
    thread.context.uc_stack.ss_size = STACK_BYTES;
    makecontext(&thread.context, run_thread, 0);
    ready.push_back(&thread);
  }
  while (!ready.empty()) {
    std::swap(ready[random_order() % ready.size()], ready.back());
    running = ready.back();
    ready.pop_back();
    swapcontext(&scheduler, &running->context);
  }
  return std::all_of(threads.begin(), threads.end(), [](const Thread& thread) { return thread.is_done; });
}

}  // namespace emulated

Place blockIdx, gridDim;
#define threadIdx (emulated::running->index)

inline void __syncthreads() { emulated::meet(emulated::block); }
inline void __syncwarp() { emulated::meet(emulated::warp()); }
inline void __threadfence() {}

template <typename T>
T __shfl_sync(unsigned, T value, unsigned lane) {
  return std::bit_cast<T>(emulated::shown(value)[lane % emulated::LANES][0]);
}
template <typename T>
T __shfl_xor_sync(unsigned, T value, unsigned distance) {
  const unsigned lane = emulated::lane() ^ distance;
  return std::bit_cast<T>(emulated::shown(value)[lane][0]);
}
inline bool __any_sync(unsigned, bool value) {
  const emulated::Words& all = emulated::shown((uint32_t)value);
  return std::any_of(std::begin(all), std::end(all), [](const auto& words) { return words[0] != 0; });
}

inline int atomicAdd(int* at, int more) { return (*at += more) - more; }
template <typename T>
T __ldcg(const T* at) {
  return *at;
}
inline float __uint_as_float(unsigned bits) { return std::bit_cast<float>(bits); }
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
  const uint64_t bytes = (uint64_t)high << 32 | low;
  unsigned out = 0;
  for (unsigned i = 0; i < 4; i++) out |= (unsigned)(bytes >> (selector >> 4 * i & 7) * 8 & 0xff) << 8 * i;
  return out;
}
inline unsigned __cvta_generic_to_shared(const void* at) { return (unsigned)((const unsigned char*)at - memory); }

// Instructions, under their names in PTX: results first, then operands.

inline void griddepcontrol_wait() {}
inline void griddepcontrol_launch_dependents() {}

inline void cp_async_cg_shared_global(unsigned to, const void* from, unsigned, unsigned num_bytes) {
  emulated::running->copies.back().push_back({memory + to, from, num_bytes});
}
inline void cp_async_commit_group() { emulated::running->copies.emplace_back(); }
inline void cp_async_wait_group(unsigned num_pending) {
  auto& groups = emulated::running->copies;
  while (groups.size() > num_pending + 1) {
    for (const auto& copy : groups.front()) {
      std::memset(copy.to, 0, 16);
      std::memcpy(copy.to, copy.from, copy.num_bytes);
    }
    groups.erase(groups.begin());
  }
}

inline void ex2_approx_ftz_f32(float& out, float value) { out = std::exp2(value); }
inline void cvt_rn_bf16x2_f32(unsigned& out, float high, float low) {
  out = emulated::rounded(high) << 16 | emulated::rounded(low);
}
inline void movmatrix_sync_aligned_m8n8_trans_b16(unsigned& out, unsigned word) {
  const emulated::Words& words = emulated::shown(word);
  const unsigned row = emulated::lane() / 4, column = emulated::lane() % 4 * 2;
  const auto element = [&](unsigned r, unsigned c) { return words[r * 4 + c / 2][0] >> c % 2 * 16 & 0xffff; };
  out = element(column + 1, row) << 16 | element(column, row);
}
inline void mma_sync_aligned_m16n8k16_row_col_f32_bf16_bf16_f32(float& d0, float& d1, float& d2, float& d3, unsigned a0,
                                                                unsigned a1, unsigned a2, unsigned a3, unsigned b0,
                                                                unsigned b1, float c0, float c1, float c2, float c3) {
  const emulated::Words& words = emulated::shown(a0, a1, a2, a3, b0, b1);
  const unsigned row = emulated::lane() / 4, column = emulated::lane() % 4 * 2;
  const auto left = [&](unsigned r, unsigned k) {
    return emulated::half(words[r % 8 * 4 + k % 8 / 2][k / 8 * 2 + r / 8], k % 2);
  };
  const auto right = [&](unsigned k, unsigned c) { return emulated::half(words[c * 4 + k % 8 / 2][4 + k / 8], k % 2); };
  float sums[] = {c0, c1, c2, c3};
  for (unsigned i = 0; i < 4; i++)
    for (unsigned k = 0; k < 16; k++) sums[i] += left(row + i / 2 * 8, k) * right(k, column + i % 2);
  d0 = sums[0], d1 = sums[1], d2 = sums[2], d3 = sums[3];
}

// Whether all blocks came to their end.
template <typename Kernel>
bool run_grid(const unsigned (&grid)[3], unsigned num_threads, unsigned seed, Kernel kernel) {
  emulated::random_order.seed(seed);
  emulated::body = kernel;
  gridDim = {grid[0], grid[1], grid[2]};
  std::vector<Place> blocks;
  for (unsigned z = 0; z < grid[2]; z++)
    for (unsigned y = 0; y < grid[1]; y++)
      for (unsigned x = 0; x < grid[0]; x++) blocks.push_back({x, y, z});
  std::shuffle(blocks.begin(), blocks.end(), emulated::random_order);
  return std::all_of(blocks.begin(), blocks.end(), [&](const Place& place) {
    blockIdx = place;
    std::memset(memory, 0xff, sizeof memory);  // of an earlier block
    return emulated::run_block(num_threads);
  });
}
