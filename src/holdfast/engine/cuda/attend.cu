// Attention of one token of each row over an fp8 cache, whose new keys and values are already written.
//
// A block has a part of the keys that one group of heads sees in one row. Its warps take tiles of 16 keys by turns; each
// streams its own tiles through a ring in shared memory, so that warps do not wait for each other. Keys and values are
// the left factors on the tensor cores, because there are more of them than heads. The last block of a row and group to
// finish adds up the parts.
//
// HEADS and KV_HEADS are macros; fp8_attention.py defines them. A head has 128 elements, which are 128 bytes of the cache.

#include "numbers.cuh"

struct Attention {
  const u16* query;       // bfloat16 [rows, HEADS, DIM], rotated for recent keys
  const u16* sink_query;  // likewise, for sinks
  const byte* keys;       // [slabs, KV_HEADS, capacity, DIM]
  const byte* values;
  const u16* key_scales;  // bfloat16 [slabs, KV_HEADS, capacity]
  const u16* value_scales;
  const long long* positions;  // [rows]
  const long long* slots;
  const long long* sinks;
  float* mixed;  // [rows, KV_HEADS, parts, GROUP, DIM]
  float* tops;   // [rows, KV_HEADS, parts, GROUP]: the highest score of a part
  float* norms;  // likewise: the sum of its weights
  int* done;     // [rows, KV_HEADS]: zeros, and left so
  u16* out;      // bfloat16 [rows, HEADS, DIM]
  int capacity;
  int recent;
  float scale;   // of scores, for powers of two
};

constexpr int DIM = 128;
constexpr int GROUP = HEADS / KV_HEADS;
constexpr int WARPS = 4;
constexpr int TILE = 16;          // keys
constexpr int STAGES = 3;         // of a warp's ring
constexpr int TILE_BYTES = 2 * TILE * DIM;
constexpr float LOWEST = -1e30f;

// Sixteen bytes to shared memory; zeros where they are not live.
__device__ __forceinline__ void copy(byte* to, const byte* from, bool is_live) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"((u32)__cvta_generic_to_shared(to)), "l"(from),
               "r"(is_live ? 16 : 0)
               : "memory");
}

__device__ __forceinline__ u32 turned(u32 word) {  // a matrix of 8 x 8 in the lanes of a warp, transposed
  u32 out;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(word));
  return out;
}

// Where sixteen bytes of a tile's key or value lie, so that the lanes that read at once read from different banks.
__device__ __forceinline__ int key_at(int key, int chunk) { return key * DIM + (chunk ^ (key & 1) << 2) * 16; }
__device__ __forceinline__ int value_at(int key, int chunk) { return TILE * DIM + key * DIM + (chunk ^ (key & 6)) * 16; }

// The keys that a row sees, by number: sinks first, then recent ones.
struct Keys {
  int num_sink, num, sink, ring, begin;

  __device__ __forceinline__ Keys(const Attention& of, int row) {
    const long long position = of.positions[row];
    sink = (int)of.sinks[row], ring = of.capacity - sink;
    const long long first = max((long long)sink, position - of.recent + 1);
    num_sink = (int)min((long long)sink, position + 1);
    num = num_sink + (int)max(0ll, position + 1 - first);
    begin = (int)((first - sink) % ring);
  }

  __device__ __forceinline__ int cell(int number) const {
    if (number < num_sink) return number;
    const int at = begin + number - num_sink;
    return sink + (at < ring ? at : at - ring);
  }
};

// What one warp has seen: of heads 2q and 2q + 1, where q is the lane's number modulo 4. Of the lane's sixteen elements,
// element 2t and the next are in mixed[t]: those of the first head at 0 and 2, those of the second at 1 and 3.
struct Softmax {
  float top[2] = {LOWEST, LOWEST}, norm[2] = {0, 0};
  float mixed[8][4] = {};
  u32 nans = 0;  // marks of NaN among the keys and values that this lane has read

  // The keys from `first` to `end` (of 16) of a tile.
  __device__ __forceinline__ void absorb(const byte* tile, const u32 (&query)[16], u32 scales, int first, int end, float scale,
                                         int lane) {
    const int g = lane / 4, q = lane % 4;
    float score[4] = {0, 0, 0, 0};  // of keys g and g + 8
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const uint4 a = *(const uint4*)(tile + key_at(g, 4 * half + q)), b = *(const uint4*)(tile + key_at(g + 8, 4 * half + q));
      const u32* x = query + 8 * half;
      nans |= nan_marks(a) | nan_marks(b);
      tile_product(score, even_bytes(a.x), even_bytes(b.x), odd_bytes(a.x), odd_bytes(b.x), x[0], x[1]);
      tile_product(score, even_bytes(a.y), even_bytes(b.y), odd_bytes(a.y), odd_bytes(b.y), x[2], x[3]);
      tile_product(score, even_bytes(a.z), even_bytes(b.z), odd_bytes(a.z), odd_bytes(b.z), x[4], x[5]);
      tile_product(score, even_bytes(a.w), even_bytes(b.w), odd_bytes(a.w), odd_bytes(b.w), x[6], x[7]);
    }
    float highest[2] = {top[0], top[1]};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int key = g + i / 2 * 8;
      const float key_scale = low_of(__shfl_sync(~0u, scales, key)) * scale;
      score[i] = key >= first && key < end ? score[i] * key_scale * RESTORED : LOWEST;
      highest[i % 2] = fmaxf(highest[i % 2], score[i]);
    }
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
      for (int distance = 4; distance < 32; distance *= 2)
        highest[i] = fmaxf(highest[i], __shfl_xor_sync(~0u, highest[i], distance));
    if (__any_sync(~0u, highest[0] != top[0] || highest[1] != top[1])) {
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const float fade = power(top[i] - highest[i]);
        top[i] = highest[i], norm[i] *= fade;
#pragma unroll
        for (int t = 0; t < 8; t++) mixed[t][i] *= fade, mixed[t][i + 2] *= fade;
      }
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int key = g + i / 2 * 8;
      const float weight = key >= first && key < end ? power(score[i] - top[i % 2]) : 0;
      norm[i % 2] += weight;
      score[i] = weight * low_of(__shfl_sync(~0u, scales, 16 + key)) * RAISED;
    }
    const u32 early = turned(two(score[0], score[1])), late = turned(two(score[2], score[3]));
    uint4 v[4];  // of keys 2q, 2q + 1, 2q + 8 and 2q + 9
#pragma unroll
    for (int i = 0; i < 4; i++) {
      v[i] = *(const uint4*)(tile + value_at(2 * q + i % 2 + i / 2 * 8, g));
      nans |= nan_marks(v[i]);
    }
#pragma unroll
    for (int t = 0; t < 8; t++) {
      u32 a[4];
#pragma unroll
      for (int i = 0; i < 4; i++) {  // element 2t or the next, of two neighbouring keys
        const u32* here = (const u32*)&v[i / 2 * 2] + t / 2;
        const u32* there = (const u32*)&v[i / 2 * 2 + 1] + t / 2;
        const int at = t % 2 * 2 + i % 2;
        a[i] = odd_bytes(__byte_perm(*here, *there, at << 4 | (at + 4) << 12));
      }
      tile_product(mixed[t], a[0], a[1], a[2], a[3], early, late);
    }
  }
};

// A head's query as the right factor of a lane: of each four elements the first and the third beside each other, raised.
__device__ __forceinline__ void load_query(u32 (&query)[16], const u16* from, int lane) {
  const int head = lane / 4, q = lane % 4;
#pragma unroll
  for (int half = 0; half < 2; half++)
#pragma unroll
    for (int i = 0; i < 4; i++) {
      uint2 x = make_uint2(0, 0);
      if (head < GROUP) x = *(const uint2*)(from + head * DIM + half * 64 + q * 16 + 4 * i);
      query[half * 8 + 2 * i] = two(low_of(x.x) * RAISED, low_of(x.y) * RAISED);
      query[half * 8 + 2 * i + 1] = two(high_of(x.x) * RAISED, high_of(x.y) * RAISED);
    }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, 4) attend(const Attention of) {
  extern __shared__ __align__(128) byte memory[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int part = blockIdx.x, head = blockIdx.y, row = blockIdx.z;
  const long long slot = of.slots[row];
  const Keys keys(of, row);
  const int share = ((keys.num + gridDim.x - 1) / gridDim.x + TILE - 1) / TILE * TILE;
  const int first = part * share, end = min(keys.num, first + share), num_parts = (keys.num + share - 1) / share;
  if (slot < 0 || first >= end) return;
  const long long slab = (slot * KV_HEADS + head) * of.capacity;
  byte* ring = memory + warp * STAGES * TILE_BYTES;

  // The new key is the last one. What is older may be read before the kernel before this one has ended.
  bool has_waited = false;
  const auto wait_for = [&](int number) {
    if (!has_waited && number >= keys.num) {
      asm volatile("griddepcontrol.wait;" ::: "memory");
      has_waited = true;
    }
  };
  const auto fetch = [&](int tile, int stage) {
    byte* to = ring + stage * TILE_BYTES;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int key = lane / 8 + 4 * i, chunk = lane % 8, number = tile + key;
      const bool is_live = number < end;
      const long long at = (slab + (is_live ? keys.cell(number) : 0)) * DIM + chunk * 16;
      copy(to + key_at(key, chunk), of.keys + at, is_live);
      copy(to + value_at(key, chunk), of.values + at, is_live);
    }
  };
  const auto fetch_scales = [&](int tile) -> u32 {  // of keys in the first half of the lanes, of values in the second
    const int number = tile + lane % 16;
    if (number >= end) return 0;
    return (lane < 16 ? of.key_scales : of.value_scales)[slab + keys.cell(number)];
  };

  const int stride = WARPS * TILE;
  int tile = first + warp * TILE, next = tile;
#pragma unroll
  for (int stage = 0; stage < STAGES - 1; stage++, next += stride) {
    wait_for(next + TILE);
    if (next < end) fetch(next, stage);
    asm volatile("cp.async.commit_group;" ::: "memory");
  }
  wait_for(keys.num);
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  u32 query[16], scales = fetch_scales(tile);
  const u16* queries = of.query + (row * HEADS + head * GROUP) * DIM;
  load_query(query, tile < keys.num_sink ? of.sink_query + (queries - of.query) : queries, lane);
  Softmax softmax;
  for (int stage = 0; tile < end; tile += stride, next += stride, stage = stage + 1 == STAGES ? 0 : stage + 1) {
    asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
    __syncwarp();
    if (next < end) fetch(next, stage == 0 ? STAGES - 1 : stage - 1);
    asm volatile("cp.async.commit_group;" ::: "memory");
    const u32 own = scales;
    scales = fetch_scales(tile + stride);
    const byte* from = ring + stage * TILE_BYTES;
    const int count = min(TILE, end - tile), num_sink = min(max(keys.num_sink - tile, 0), count);
    if (num_sink > 0) {
      softmax.absorb(from, query, own, 0, num_sink, of.scale, lane);
      if (tile + stride >= keys.num_sink || num_sink < count) load_query(query, queries, lane);
    }
    if (num_sink < count) softmax.absorb(from, query, own, num_sink, count, of.scale, lane);
  }
  asm volatile("cp.async.wait_group 0;" ::: "memory");
  // A NaN that a head has read makes all that it gets from this row NaN, as every result is divided by the norm.
  if (__any_sync(~0u, softmax.nans & NAN_MARKS)) softmax.norm[0] = softmax.norm[1] = __uint_as_float(0x7fffffffu);
#pragma unroll
  for (int i = 0; i < 2; i++)
#pragma unroll
    for (int distance = 4; distance < 32; distance *= 2) softmax.norm[i] += __shfl_xor_sync(~0u, softmax.norm[i], distance);

  // The warps' results lie where their rings were.
  struct Result {
    float mixed[GROUP][DIM], top[GROUP], norm[GROUP];
  };
  static_assert(sizeof(Result) <= STAGES * TILE_BYTES, "a warp's result takes the place of its ring");
  Result& own = *(Result*)ring;
  __syncwarp();
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int member = 2 * (lane % 4) + i;
    if (member >= GROUP) continue;
#pragma unroll
    for (int t = 0; t < 8; t++) {
      own.mixed[member][lane / 4 * 16 + 2 * t] = softmax.mixed[t][i] * RESTORED;
      own.mixed[member][lane / 4 * 16 + 2 * t + 1] = softmax.mixed[t][i + 2] * RESTORED;
    }
    if (lane < 4) own.top[member] = softmax.top[i], own.norm[member] = softmax.norm[i];
  }
  __syncthreads();
  const int group = row * KV_HEADS + head, place = (group * gridDim.x + part) * GROUP;
  u16* out = of.out + group * GROUP * DIM;
  for (int member = 0; member < GROUP; member++) {
    float top = LOWEST, norm = 0, sum = 0;
    for (int w = 0; w < WARPS; w++) top = fmaxf(top, ((Result*)(memory + w * STAGES * TILE_BYTES))->top[member]);
    for (int w = 0; w < WARPS; w++) {
      const Result& result = *(Result*)(memory + w * STAGES * TILE_BYTES);
      const float weight = power(result.top[member] - top);
      norm += result.norm[member] * weight;
      sum += result.mixed[member][threadIdx.x] * weight;
    }
    if (num_parts == 1) {
      out[member * DIM + threadIdx.x] = two(sum / norm, 0);
    } else {
      of.mixed[(place + member) * DIM + threadIdx.x] = sum;
      if (threadIdx.x == 0) of.tops[place + member] = top, of.norms[place + member] = norm;
    }
  }
  if (num_parts == 1) return;
  __shared__ bool is_last;
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    is_last = atomicAdd(of.done + group, 1) == num_parts - 1;
    if (is_last) of.done[group] = 0;
    __threadfence();
  }
  __syncthreads();
  if (!is_last) return;
  float* weights = (float*)memory;  // [GROUP, parts]
  for (int member = warp; member < GROUP; member += WARPS) {
    const int begin = group * gridDim.x * GROUP + member;
    float top = LOWEST, norm = 0;
    for (int p = lane; p < num_parts; p += 32) top = fmaxf(top, weights[member * num_parts + p] = __ldcg(of.tops + begin + p * GROUP));
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, distance));
    for (int p = lane; p < num_parts; p += 32) {
      const float weight = power(weights[member * num_parts + p] - top);
      norm += weight * __ldcg(of.norms + begin + p * GROUP);
      weights[member * num_parts + p] = weight;
    }
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) norm += __shfl_xor_sync(~0u, norm, distance);
    for (int p = lane; p < num_parts; p += 32) weights[member * num_parts + p] /= norm;
  }
  __syncthreads();
  float sums[GROUP] = {};
  const float* mixed = of.mixed + (long long)group * gridDim.x * GROUP * DIM + threadIdx.x;
#pragma unroll 4
  for (int p = 0; p < num_parts; p++)
#pragma unroll
    for (int member = 0; member < GROUP; member++)
      sums[member] += weights[member * num_parts + p] * __ldcg(mixed + (p * GROUP + member) * DIM);
#pragma unroll
  for (int member = 0; member < GROUP; member++) out[member * DIM + threadIdx.x] = two(sums[member], 0);
}
