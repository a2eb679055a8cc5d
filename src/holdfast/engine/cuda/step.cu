// One decoding step of one session in one launch: all layers and the head.
//
// There is one block on each multiprocessor. Its last warp streams all that the block will read in this step (rows of
// the weights, old keys and values) through a ring of stages in shared memory. It knows these addresses from the start,
// so the memory never idles while the other sixteen warps wait for results of other blocks. Those multiply on the tensor
// cores: weights are the left factor, sixteen rows at a time; the vector is the right one, split into two bfloat16 whose
// sum is it to seventeen bits. Each warp owns a sixteenth of the columns.
//
// Blocks hand vectors to each other in global memory as numbers with a stamp in their last eight bits. Who needs a number
// reads it until it has the stamp of this layer and step: there is no barrier and no flag, and a value takes one way
// through the cache. A number may be written anew when all blocks must have read it: each result of a layer depends on all
// blocks having finished what came before. So a reader meets the last number or the one before it, never an older one.
//
// The code of a layer is run once for each of them, so it is kept short: unrolled, it would not fit in the cache for
// instructions, and waiting for instructions would take longer than all the rest.
//
// Sizes are macros; fused.py defines them. Vectors are float32, weights and the cache bfloat16; the weights of layers may be
// fp8.

#include "numbers.cuh"

typedef u32 Stamped;  // the upper 24 bits of a float32, and a stamp

struct Layer {
  const byte* qkv;
  const float* bias;
  const float* query_norm;
  const float* key_norm;
  const byte* output;
  const byte* gate_up;
  const byte* down;
  const float* attention_norm;
  const float* mlp_norm;
  byte* keys;
  byte* values;
  const float* qkv_scales;  // of fp8 weights, one for each row
  const float* output_scales;
  const float* gate_up_scales;
  const float* down_scales;
};

struct Step {
  const Layer* layers;
  const byte* head;
  const float* norm;
  const float* rotations;     // [4, DIM / 2]: cosines and sines, then those of queries for sinks
  const long long* position;
  const long long* slot;
  const long long* sink;
  const float* x;             // [HIDDEN], the embedded token
  Stamped* residual;          // [HIDDEN]
  Stamped* qkv;
  Stamped* parts;             // [KV_HEADS, SPLITS, GROUP, DIM]
  Stamped* tops;              // [KV_HEADS, SPLITS, GROUP]: the highest score of a part
  Stamped* norms;             // likewise: the sum of its weights
  Stamped* mixed;             // [HEADS * DIM], the attention's result
  Stamped* gated;             // [MLP]
  float* logits;
  u32* epoch;                 // counts steps
  int capacity;
  int recent;
  float epsilon;
  float scale;                // of scores, for powers of two
};

constexpr int WARPS = 16;            // that multiply
constexpr int THREADS = 32 * WARPS;  // beside the warp that streams
constexpr int GROUP = HEADS / KV_HEADS;
constexpr int QUERIES = HEADS * DIM;
constexpr int QKV = (HEADS + 2 * KV_HEADS) * DIM;
constexpr int HALF = DIM / 2;
constexpr int PART = DIM / 32;               // elements of a head that a lane has
constexpr int TILE = 16;                     // rows, or keys, of one product
constexpr int ROW_BYTES = 2 * COLUMNS + 64;  // from one row of a stage to the next: two of them lie in different banks
constexpr int STAGE_BYTES = TILE * ROW_BYTES;  // a tile of rows and COLUMNS columns
constexpr int VALUE_BYTES = 2 * DIM + 16;    // from one value to the next: eight of them lie in different banks
constexpr int KEYS = STAGE_BYTES / (2 * DIM + VALUE_BYTES) / TILE * TILE;  // of a stage, followed by their values
constexpr int SHARE = GROUP * DIM / SPLITS;  // of a group's result, that one block adds up
constexpr int TILES = 3;                     // whose sums are completed at once
constexpr int MOST_STRETCHES = 64;           // fused.py admits no window that needs more
constexpr float LOWEST = -1e30f;
enum Kind { STORE, ADD, GATE, LOGITS };

// Keys that lie side by side.
struct Stretch {
  int cell, num;
  bool is_sink;
};

struct Shared {
  u64 full[STAGES];
  u64 empty[STAGES];
  float sums[TILES][TILE][WARPS + 4];  // of rows, by warp
  float squares[WARPS];
  union {
    byte x[2][2 * LONGEST + 64];         // the two parts of the vector that is multiplied
    float mixed[WARPS + 1][GROUP][DIM];  // the attention's result by warp, and that of the new token
  };
  u16 queries[2][GROUP][DIM];              // bfloat16, rotated for recent keys and for sinks
  float tops[WARPS + 1][GROUP];
  float norms[WARPS + 1][GROUP];
  float key[DIM];
  float value[DIM];
  float rotations[4 * HALF];
  float residual[HIDDEN / BLOCKS + 2];     // of this block's rows
  Stretch stretches[MOST_STRETCHES];       // the old keys that this block attends to, a stage each
  int num_stretches;
  Layer layers[NUM_LAYERS];
};

static_assert(STAGES * STAGE_BYTES + sizeof(Shared) <= SHARED_BYTES, "the shared memory of a block is too small");
static_assert(!FP8 || FP8_COLUMNS % (64 * WARPS) == 0, "a warp reads 64 bytes of a row at a time");
static_assert(COLUMNS % (32 * WARPS) == 0, "a warp reads 64 bytes of a row at a time");
static_assert(GROUP * DIM % SPLITS == 0 && SPLITS * KV_HEADS <= BLOCKS, "every part of every group of heads has a block");
static_assert(HIDDEN >= BLOCKS && MLP >= BLOCKS && QKV >= BLOCKS, "every block computes a part of every vector");

// --- memory ---

__device__ __forceinline__ u32 shared_address(const void* at) { return (u32)__cvta_generic_to_shared(at); }

__device__ __forceinline__ void prepare(u64* barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void arrive(u64* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

__device__ __forceinline__ void expect(u64* barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void wait(u64* barrier, u32 parity) {
  u32 done;
  do {
    asm volatile(
        "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
        : "=r"(done)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
  } while (!done);
}

__device__ __forceinline__ void copy(void* to, const byte* from, u32 bytes, u64* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(to)),
               "l"(from), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
}

__device__ __forceinline__ void together() { asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory"); }

// --- stamped numbers ---

__device__ __forceinline__ void hand_over(Stamped* to, float value, u32 stamp) {
  const u32 bits = __float_as_uint(value);
  // Rounded to nearest; NaN and infinity stay what they are.
  const u32 kept = (bits & 0x7f800000u) == 0x7f800000u ? bits | (bits & 0xffu) << 8 : bits + 0x80u;
  asm volatile("st.relaxed.gpu.global.b32 [%0], %1;" ::"l"(to), "r"((kept & ~0xffu) | (stamp & 0xffu)) : "memory");
}

__device__ __forceinline__ bool unpack(u32 bits, float& value, u32 stamp) {
  value = __uint_as_float(bits & ~0xffu);
  return ((bits ^ stamp) & 0xffu) == 0;
}

__device__ __forceinline__ bool read(const Stamped* from, float& value, u32 stamp) {
  u32 bits;
  asm volatile("ld.relaxed.gpu.global.b32 %0, [%1];" : "=r"(bits) : "l"(from) : "memory");
  return unpack(bits, value, stamp);
}

__device__ __forceinline__ bool read_four(const Stamped* from, float (&v)[4], u32 stamp) {
  u32 bits[4];
  asm volatile("ld.relaxed.gpu.global.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(bits[0]), "=r"(bits[1]), "=r"(bits[2]), "=r"(bits[3])
               : "l"(from)
               : "memory");
  bool are_there = true;
#pragma unroll
  for (int i = 0; i < 4; i++) are_there &= unpack(bits[i], v[i], stamp);
  return are_there;
}

// Which stage of the ring comes next.
struct Ring {
  u32 stage = 0, parity = 0;
  __device__ __forceinline__ void next() {
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
};

// The rows of a matrix that belong to this block.
struct Rows {
  int first, end;
  __device__ __forceinline__ explicit Rows(int num)
      : first((int)((long long)num * blockIdx.x / BLOCKS)), end((int)((long long)num * (blockIdx.x + 1) / BLOCKS)) {}
};

// Finds the old keys that a split attends to; one thread does.
__device__ __forceinline__ void find_keys(Shared& shared, const Step& step, int split) {
  const int position = (int)*step.position, sink = (int)*step.sink, ring = step.capacity - sink;
  const int num_sink = min(sink, position), begin = max(sink, position - step.recent + 1);
  const int num = *step.slot < 0 ? 0 : num_sink + max(0, position - begin);  // that are visible, sinks first
  const int end = (int)((long long)num * (split + 1) / SPLITS);
  int count = 0;
  for (int at = (int)((long long)num * split / SPLITS); at < end; count++) {
    const bool is_sink = at < num_sink;
    const int cell = is_sink ? at : sink + (begin - sink + at - num_sink) % ring;
    const int beside = is_sink ? num_sink - at : sink + ring - cell;
    const int taken = min(min(end - at, KEYS), beside);
    shared.stretches[count] = {cell, taken, is_sink};
    at += taken;
  }
  shared.num_stretches = count;
}

// --- the warp that streams ---

struct Stream {
  byte* stages;
  Shared& shared;
  int lane;
  Ring ring, arriving;  // the oldest stage that is under way
  int num_taken;

  // The next stage, when it is free. Few are under way at once: behind more, other reads would wait in a queue.
  __device__ __forceinline__ byte* take(u32 bytes) {
    wait(&shared.empty[ring.stage], ring.parity ^ 1);
    if (++num_taken > IN_FLIGHT) {
      wait(&shared.full[arriving.stage], arriving.parity);
      arriving.next();
    }
    if (lane == 0) expect(&shared.full[ring.stage], bytes);
    __syncwarp();
    return stages + ring.stage * STAGE_BYTES;
  }

  // Rows of a matrix; or, where its first half gates the second, rows of both.
  __device__ __forceinline__ void rows(const byte* matrix, int columns, int num, bool is_gated, bool is_fp8) {
    const int row_bytes = is_fp8 ? columns : 2 * columns, most = is_fp8 ? FP8_COLUMNS : 2 * COLUMNS;
    const int stride = is_gated ? TILE / 2 : TILE;
    const Rows mine(num);
    for (int row = mine.first; row < mine.end; row += stride) {
      const int count = min(stride, mine.end - row);
      const int second = is_gated && lane >= TILE / 2, at = second ? lane - TILE / 2 : lane;
      const byte* from = matrix + (long long)(second * num + row + at) * row_bytes;
      for (int done = 0; done < row_bytes; done += most) {
        byte* to = take(most * (is_gated ? 2 * count : count));
        if (at < count && lane < TILE) copy(to + lane * ROW_BYTES, from + done, most, &shared.full[ring.stage]);
        ring.next();
      }
    }
  }

  __device__ __forceinline__ void cache(const Layer& layer, long long slab) {
    for (int index = 0; index < shared.num_stretches; index++) {
      const auto [cell, num, is_sink] = shared.stretches[index];
      const u32 bytes = num * DIM * 2;
      const long long from = (slab + cell) * DIM * 2;
      byte* to = take(2 * bytes);
      u64* full = &shared.full[ring.stage];
      if (lane == 0) copy(to, layer.keys + from, bytes, full);
      for (int key = lane; key < num; key += 32)
        copy(to + KEYS * DIM * 2 + key * VALUE_BYTES, layer.values + from + key * DIM * 2, DIM * 2, full);
      ring.next();
    }
  }
};

// --- the warps that multiply ---

// Four tiles of 8 x 8 from shared memory, transposed; the lanes give the addresses of their rows.
__device__ __forceinline__ void transposed(u32 (&v)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
               : "r"(shared_address(row))
               : "memory");
}

// matrix @ x for this block's rows: stored, added to the residual, or as silu(gate) * up. With `norm`, x is
// RMS-normalised first. Without `from`, x is the embedded token.
struct Product {
  Kind kind;
  const float* scales;  // null: weights are bfloat16
  const Stamped* from;
  u32 from_stamp;
  const float* norm;
  Stamped* out;
  u32 stamp;
  int columns, num;
};

struct Multiply {
  const byte* stages;
  Shared& shared;
  const Step& step;
  Ring ring;
  int warp, lane;

  // A vector into shared memory when it is there, as two parts. With `norm`: times that, and the sum of its squares.
  // For fp8, raised, and of each four elements the first and the third beside each other, as their weights will be.
  __device__ __forceinline__ void read_vector(const Stamped* from, u32 stamp, const float* norm, int columns, bool is_fp8) {
    constexpr int WIDE = 4 * THREADS, DEEP = (LONGEST + WIDE - 1) / WIDE, NORM_DEEP = (HIDDEN + WIDE - 1) / WIDE;
    const int start = 4 * threadIdx.x;
    float4 factors[NORM_DEEP];
#pragma unroll
    for (int i = 0; i < NORM_DEEP; i++) {
      const int column = start + i * WIDE;
      factors[i] = norm != nullptr && column < columns ? *(const float4*)(norm + column) : make_float4(1, 1, 1, 1);
    }
    float v[DEEP][4];
    u32 missing = 0;  // of a thread's reads, which are all under way at once
#pragma unroll
    for (int i = 0; i < DEEP; i++) missing |= (u32)(start + i * WIDE < columns) << i;
    const u32 wanted = missing;
    do {
#pragma unroll
      for (int i = 0; i < DEEP; i++) {
        const int column = start + i * WIDE;
        if (!(missing >> i & 1)) continue;
        if (from == nullptr) {
          const float4 x = *(const float4*)(step.x + column);
          v[i][0] = x.x, v[i][1] = x.y, v[i][2] = x.z, v[i][3] = x.w;
          missing &= ~(1u << i);
        } else if (read_four(from + column, v[i], stamp)) {
          missing &= ~(1u << i);
        }
      }
    } while (missing);
    float squares = 0;
#pragma unroll
    for (int i = 0; i < DEEP; i++) {
      if (!(wanted >> i & 1)) continue;
      if (i < NORM_DEEP) {
        const float4 factor = factors[i < NORM_DEEP ? i : 0];
#pragma unroll
        for (int j = 0; j < 4; j++) squares += v[i][j] * v[i][j];
        v[i][0] *= factor.x, v[i][1] *= factor.y, v[i][2] *= factor.z, v[i][3] *= factor.w;
      }
#pragma unroll
      for (int j = 0; j < 4; j++) v[i][j] *= is_fp8 ? RAISED : 1;
      const float second = is_fp8 ? v[i][2] : v[i][1], third = is_fp8 ? v[i][1] : v[i][2];
      const uint2 high = make_uint2(two(v[i][0], second), two(third, v[i][3]));
      const uint2 rest = make_uint2(two(v[i][0] - low_of(high.x), second - high_of(high.x)),
                                    two(third - low_of(high.y), v[i][3] - high_of(high.y)));
      *(uint2*)(shared.x[0] + 2 * (start + i * WIDE)) = high;
      *(uint2*)(shared.x[1] + 2 * (start + i * WIDE)) = rest;
    }
    if (norm != nullptr) {
#pragma unroll
      for (int distance = 16; distance > 0; distance /= 2) squares += __shfl_xor_sync(~0u, squares, distance);
      if (lane == 0) shared.squares[warp] = squares;
    }
    together();
  }

  // Adds a stage's products. The sum over columns does not depend on their order, so a lane takes 16 bytes of a row at a
  // time: what belongs to its four places in two tiles.
  __device__ __forceinline__ void multiply(float (&sums)[4], const byte* rows, int column) {
    constexpr int SHARE_BYTES = 2 * COLUMNS / WARPS;
    const int row = lane / 4, at = warp * SHARE_BYTES + lane % 4 * 16;
    const byte* x = shared.x[row % 2] + 2 * column + at;
    rows += row * ROW_BYTES + at;
#pragma unroll
    for (int offset = 0; offset < SHARE_BYTES; offset += 64) {
      const uint4 a = *(const uint4*)(rows + offset), b = *(const uint4*)(rows + 8 * ROW_BYTES + offset);
      uint4 v = make_uint4(0, 0, 0, 0);
      if (row < 2) v = *(const uint4*)(x + offset);  // two of the eight vectors are used
      tile_product(sums, a.x, b.x, a.y, b.y, v.x, v.y);
      tile_product(sums, a.z, b.z, a.w, b.w, v.z, v.w);
    }
  }

  // The same for a stage of fp8: what belongs to its four places in four tiles.
  __device__ __forceinline__ void multiply_fp8(float (&sums)[4], const byte* rows, int column) {
    constexpr int SHARE_BYTES = FP8_COLUMNS / WARPS;
    const int row = lane / 4, at = warp * SHARE_BYTES + lane % 4 * 16;
    const byte* x = shared.x[row % 2] + 2 * (column + at);
    rows += row * ROW_BYTES + at;
#pragma unroll
    for (int offset = 0; offset < SHARE_BYTES; offset += 64) {
      const uint4 a = *(const uint4*)(rows + offset), b = *(const uint4*)(rows + 8 * ROW_BYTES + offset);
      uint4 v = make_uint4(0, 0, 0, 0), w = v;
      if (row < 2) v = *(const uint4*)(x + 2 * offset), w = *(const uint4*)(x + 2 * offset + 16);
      tile_product(sums, even_bytes(a.x), even_bytes(b.x), odd_bytes(a.x), odd_bytes(b.x), v.x, v.y);
      tile_product(sums, even_bytes(a.y), even_bytes(b.y), odd_bytes(a.y), odd_bytes(b.y), v.z, v.w);
      tile_product(sums, even_bytes(a.z), even_bytes(b.z), odd_bytes(a.z), odd_bytes(b.z), w.x, w.y);
      tile_product(sums, even_bytes(a.w), even_bytes(b.w), odd_bytes(a.w), odd_bytes(b.w), w.z, w.w);
    }
  }

  __device__ __forceinline__ void run(const Product& product) {
    const auto [kind, scales, from, from_stamp, norm, out, stamp, columns, num] = product;
    const bool is_fp8 = FP8 && kind != LOGITS;
    read_vector(from, from_stamp, norm, columns, is_fp8);
    float scale = 1;
    if (norm != nullptr) {
      float squares = shared.squares[lane % WARPS];
#pragma unroll
      for (int distance = WARPS / 2; distance > 0; distance /= 2) squares += __shfl_xor_sync(~0u, squares, distance);
      scale = rsqrtf(squares / columns + step.epsilon);
    }
    const int stride = kind == GATE ? TILE / 2 : TILE;
    const Rows mine(num);
    for (int row = mine.first; row < mine.end;) {
      int tiles = 0;
#pragma unroll 1
      for (; tiles < TILES && row + tiles * stride < mine.end; tiles++) {
        float sum[4] = {0, 0, 0, 0};
#pragma unroll 1
        for (int column = 0; column < columns; column += is_fp8 ? FP8_COLUMNS : COLUMNS) {
          wait(&shared.full[ring.stage], ring.parity);
          if (is_fp8)
            multiply_fp8(sum, stages + ring.stage * STAGE_BYTES, column);
          else
            multiply(sum, stages + ring.stage * STAGE_BYTES, column);
          __syncwarp();
          if (lane == 0) arrive(&shared.empty[ring.stage]);
          ring.next();
        }
        float(*sums)[WARPS + 4] = shared.sums[tiles];
        if (lane % 4 == 0) sums[lane / 4][warp] = sum[0] + sum[1], sums[lane / 4 + 8][warp] = sum[2] + sum[3];
      }
      together();
      const int at = row + warp * stride;
      const int count = min(stride, mine.end - at);
      if (warp < tiles) complete(kind, shared.sums[warp], is_fp8 ? scales : nullptr, at, count, mine.first, num, scale, out, stamp);
      row += tiles * stride;
      if (row < mine.end) together();
    }
  }

  // From the sums of a tile to results: two lanes a row.
  __device__ __forceinline__ void complete(Kind kind, const float (*sums)[WARPS + 4], const float* scales, int row, int count,
                                           int first, int num, float scale, Stamped* out, u32 stamp) {
    const int at = lane / 2, stride = kind == GATE ? TILE / 2 : TILE;
    if (scales != nullptr) {
      const int own = at < stride ? at : at - stride;
      scale *= own < count ? scales[(at < stride ? 0 : num) + row + own] * RESTORED : 0;
    }
    const float4 a = *(const float4*)&sums[at][lane % 2 * 8], b = *(const float4*)&sums[at][lane % 2 * 8 + 4];
    float y = (a.x + a.y + a.z + a.w) + (b.x + b.y + b.z + b.w);
    y = (y + __shfl_xor_sync(~0u, y, 1)) * scale;
    const float up = __shfl_sync(~0u, y, lane + 2 * stride);
    if (lane % 2 || at >= count) return;
    if (kind == LOGITS) {
      step.logits[row + at] = y;
      return;
    }
    if (kind == GATE) y = __fdividef(y, 1 + __expf(-y)) * up;
    if (kind == ADD) y = shared.residual[row - first + at] += y;
    hand_over(out + row + at, y, stamp);
  }

  // Elements lane, lane + 32, ... of a head of the qkv product: with its bias, and normalised.
  __device__ __forceinline__ void head(float (&v)[PART], int at, u32 stamp, const float* bias, const float* norm) {
    float factor[PART];
#pragma unroll
    for (int i = 0; i < PART; i++) factor[i] = norm == nullptr ? 1 : norm[lane + 32 * i];
    bool is_there;
    do {
      is_there = true;
#pragma unroll
      for (int i = 0; i < PART; i++) is_there &= read(step.qkv + at + lane + 32 * i, v[i], stamp);
    } while (!is_there);
    float squares = 0;
#pragma unroll
    for (int i = 0; i < PART; i++) {
      if (HAS_BIAS) v[i] += bias[at + lane + 32 * i];
      squares += v[i] * v[i];
    }
    if (norm == nullptr) return;
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) squares += __shfl_xor_sync(~0u, squares, distance);
    float scale = rsqrtf(squares / DIM + step.epsilon);
#pragma unroll
    for (int i = 0; i < PART; i++) v[i] *= scale * factor[i];
  }

  __device__ __forceinline__ void turned(const float (&v)[PART], const float* table, float (&out)[PART]) {
#pragma unroll
    for (int i = 0; i < PART / 2; i++) {
      float cos = table[lane + 32 * i], sin = table[HALF + lane + 32 * i];
      out[i] = v[i] * cos - v[i + PART / 2] * sin;
      out[i + PART / 2] = v[i + PART / 2] * cos + v[i] * sin;
    }
  }

  // Queries into shared memory; the last split of a group of heads also writes the new key and value.
  __device__ __forceinline__ void turn_heads(const Layer& layer, int group, u32 stamp, bool is_last, long long slab) {
    float v[PART], out[PART];
    if (warp < GROUP) {
      head(v, (group * GROUP + warp) * DIM, stamp, layer.bias, layer.query_norm);
#pragma unroll
      for (int kind = 0; kind < 2; kind++) {
        turned(v, shared.rotations + kind * DIM, out);
#pragma unroll
        for (int i = 0; i < PART; i++) shared.queries[kind][warp][lane + 32 * i] = two(out[i], 0);
      }
    }
    if (!is_last || warp < GROUP || warp > GROUP + 1) return;
    const bool is_key = warp == GROUP;
    const int position = (int)*step.position, sink = (int)*step.sink;
    const int cell = position < sink ? position : sink + (position - sink) % (step.capacity - sink);
    head(v, (HEADS + (is_key ? group : KV_HEADS + group)) * DIM, stamp, layer.bias, is_key ? layer.key_norm : nullptr);
    if (is_key) turned(v, shared.rotations, out);
#pragma unroll
    for (int i = 0; i < PART; i++) {
      const u32 kept = two(is_key ? out[i] : v[i], 0);
      (is_key ? shared.key : shared.value)[lane + 32 * i] = low_of(kept);
      if (*step.slot >= 0)
        ((u16*)(is_key ? layer.keys : layer.values))[(slab + cell) * DIM + lane + 32 * i] = kept;
    }
  }

  // One group of heads over a part of the keys; then this block's share of what all parts of the group add up to.
  __device__ __forceinline__ void attend(const Layer& layer, int group, int split, long long slab, u32 stamp) {
    const bool is_last = split == SPLITS - 1;
    if (threadIdx.x < (WARPS + 1) * GROUP) (&shared.tops[0][0])[threadIdx.x] = LOWEST, (&shared.norms[0][0])[threadIdx.x] = 0;
    turn_heads(layer, group, stamp, is_last, slab);
    together();
    int tiles = 0;
    for (int index = 0; index < shared.num_stretches; index++, ring.next()) {
      const auto [cell, num, is_sink] = shared.stretches[index];
      wait(&shared.full[ring.stage], ring.parity);  // all warps: an earlier arrival would count for what was there before
      for (int key = 0; key < num; key += TILE, tiles++)  // warps take tiles by turns
        if (warp == tiles % WARPS)
          absorb(stages + ring.stage * STAGE_BYTES, shared.queries[is_sink], key, num - key, tiles < WARPS);
      __syncwarp();
      if (lane == 0) arrive(&shared.empty[ring.stage]);
    }
    if (is_last && warp == WARPS - 1) absorb_new();
    together();
    const int at = (group * SPLITS + split) * GROUP;
    for (int index = threadIdx.x; index < GROUP * DIM; index += THREADS) {
      const int g = index / DIM, dim = index % DIM, used = min(tiles, WARPS);
      float top = shared.tops[WARPS][g], weights = shared.norms[WARPS][g];
      float sum = is_last ? shared.mixed[WARPS][g][dim] : 0;
#pragma unroll 4
      for (int w = 0; w < used; w++) {
        const float higher = fmaxf(top, shared.tops[w][g]);
        const float share = power(top - higher), other = power(shared.tops[w][g] - higher);
        top = higher, weights = weights * share + shared.norms[w][g] * other;
        sum = sum * share + shared.mixed[w][g][dim] * other;
      }
      hand_over(step.parts + at * DIM + index, sum, stamp);
      if (dim == 0) hand_over(step.tops + at + g, top, stamp), hand_over(step.norms + at + g, weights, stamp);
    }
    add_up(group, split, stamp);
    together();
  }

  // A tile of keys and values: the first `num` of 16, from `key` on. The results of a warp's first tile are new.
  __device__ __forceinline__ void absorb(const byte* stage, const u16 (*queries)[DIM], int key, int num, bool is_new) {
    const byte* keys = stage + key * DIM * 2;
    const byte* values = stage + KEYS * DIM * 2 + key * VALUE_BYTES;
    const int row = lane / 4, at = lane % 4;
    float score[2][4] = {{0, 0, 0, 0}, {0, 0, 0, 0}};  // [keys 0 to 7 and 8 to 15]: of head `row`, keys 2 * at and the next
#pragma unroll
    for (int offset = 0; offset < 2 * DIM; offset += 64) {
      uint4 q = make_uint4(0, 0, 0, 0);
      if (row < GROUP) q = *(const uint4*)((const byte*)queries[row] + offset + at * 16);
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const uint4 k = *(const uint4*)(keys + (half * 8 + row) * DIM * 2 + offset + at * 16);
        tile_product(score[half], q.x, 0, q.y, 0, k.x, k.y);
        tile_product(score[half], q.z, 0, q.w, 0, k.z, k.w);
      }
    }
    float top = LOWEST, norm = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {  // what lies beyond the last key may be anything, NaN too
      float& s = score[i / 2][i % 2];
      s = i / 2 * 8 + 2 * at + i % 2 < num ? s * step.scale : LOWEST;
      top = fmaxf(top, s);
    }
    const float before = row < GROUP && !is_new ? shared.tops[warp][row] : LOWEST;
    top = fmaxf(fmaxf(top, __shfl_xor_sync(~0u, top, 1)), before);
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
#pragma unroll
    for (int i = 0; i < 4; i++) {
      float& s = score[i / 2][i % 2];
      s = i / 2 * 8 + 2 * at + i % 2 < num ? power(s - top) : 0;
      norm += s;
    }
    norm += __shfl_xor_sync(~0u, norm, 1);
    norm += __shfl_xor_sync(~0u, norm, 2);
    const float share = power(before - top);
    if (row < GROUP && at == 0) {
      shared.norms[warp][row] = norm + (is_new ? 0 : shared.norms[warp][row] * share);
      shared.tops[warp][row] = top;
    }
    const u32 first = two(score[0][0], score[0][1]), second = two(score[1][0], score[1][1]);
    const int from = min(lane % 16, num - 1);  // weights of keys that are not there are 0, but NaN times 0 is NaN
#pragma unroll
    for (int dim = 0; dim < DIM; dim += 16) {
      u32 v[4];
      float low[4] = {0, 0, 0, 0}, high[4] = {0, 0, 0, 0};
      transposed(v, values + from * VALUE_BYTES + (dim + lane / 16 * 8) * 2);
      tile_product(low, first, 0, second, 0, v[0], v[1]);
      tile_product(high, first, 0, second, 0, v[2], v[3]);
      if (row < GROUP) {
        float2* out = (float2*)&shared.mixed[warp][row][dim + 2 * at];
        const float2 a = is_new ? make_float2(0, 0) : out[0], b = is_new ? make_float2(0, 0) : out[4];
        out[0] = make_float2(low[0] + a.x * share, low[1] + a.y * share);
        out[4] = make_float2(high[0] + b.x * share, high[1] + b.y * share);
      }
    }
    __syncwarp();
  }

  // The new token attends to itself.
  __device__ __forceinline__ void absorb_new() {
    for (int g = 0; g < GROUP; g++) {
      float score = 0;
#pragma unroll
      for (int i = 0; i < PART; i++) score += low_of(shared.queries[0][g][lane + 32 * i]) * shared.key[lane + 32 * i];
#pragma unroll
      for (int distance = 16; distance > 0; distance /= 2) score += __shfl_xor_sync(~0u, score, distance);
#pragma unroll
      for (int i = 0; i < PART; i++) shared.mixed[WARPS][g][lane + 32 * i] = shared.value[lane + 32 * i];
      if (lane == 0) shared.tops[WARPS][g] = score * step.scale, shared.norms[WARPS][g] = 1;
    }
  }

  // A share of a group's result: neighbouring lanes hold the parts of all splits.
  __device__ __forceinline__ void add_up(int group, int split, u32 stamp) {
    const int of = threadIdx.x % SPLITS;
    const int at = (group * SPLITS + of) * GROUP;
#pragma unroll
    for (int index = threadIdx.x / SPLITS; index < SHARE; index += THREADS / SPLITS) {
      const int element = split * SHARE + index, g = element / DIM;
      float top, norm, value;
      bool is_there;
      do {
        is_there = read(step.tops + at + g, top, stamp);
        is_there &= read(step.norms + at + g, norm, stamp);
        is_there &= read(step.parts + at * DIM + element, value, stamp);
      } while (!is_there);
      __syncwarp();
      float higher = top;
#pragma unroll
      for (int distance = SPLITS / 2; distance > 0; distance /= 2)
        higher = fmaxf(higher, __shfl_xor_sync(~0u, higher, distance));
      float share = power(top - higher);
      norm *= share, value *= share;
#pragma unroll
      for (int distance = SPLITS / 2; distance > 0; distance /= 2) {
        norm += __shfl_xor_sync(~0u, norm, distance);
        value += __shfl_xor_sync(~0u, value, distance);
      }
      if (of == 0) hand_over(step.mixed + group * GROUP * DIM + element, value / norm, stamp);
    }
  }
};

extern "C" __global__ void __launch_bounds__(THREADS + 32, 1) decode_step(const Step step) {
  extern __shared__ __align__(128) byte memory[];
  byte* stages = memory;
  Shared& shared = *(Shared*)(memory + STAGES * STAGE_BYTES);
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < STAGES; stage++) {
      prepare(&shared.full[stage], 1);
      prepare(&shared.empty[stage], WARPS);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }
  for (int index = threadIdx.x; index < (int)(sizeof(Layer) / 8) * NUM_LAYERS; index += THREADS + 32)
    ((u64*)shared.layers)[index] = ((const u64*)step.layers)[index];
  for (int index = threadIdx.x; index < 4 * HALF; index += THREADS + 32) shared.rotations[index] = step.rotations[index];
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;  // the warp's is uniform
  const Rows own(HIDDEN);
  for (int index = threadIdx.x; index < own.end - own.first; index += THREADS + 32)
    shared.residual[index] = step.x[own.first + index];
  const int group = blockIdx.x / SPLITS, split = blockIdx.x % SPLITS;
  const bool attends = group < KV_HEADS;
  const long long slot = *step.slot;
  const long long slab = ((slot < 0 ? 0 : slot) * KV_HEADS + group) * step.capacity;
  if (threadIdx.x == THREADS) find_keys(shared, step, split);
  const u32 epoch = *step.epoch;
  __syncthreads();
  if (warp == WARPS) {
    Stream stream{stages, shared, lane, Ring(), Ring(), 0};
    for (int index = 0; index < NUM_LAYERS; index++) {
      const Layer& layer = shared.layers[index];
      stream.rows(layer.qkv, HIDDEN, QKV, false, FP8);
      if (attends) stream.cache(layer, slab);
      stream.rows(layer.output, QUERIES, HIDDEN, false, FP8);
      stream.rows(layer.gate_up, HIDDEN, MLP, true, FP8);
      stream.rows(layer.down, MLP, HIDDEN, false, FP8);
    }
    stream.rows(step.head, HIDDEN, VOCAB, false, false);
    return;
  }
  Multiply multiply{stages, shared, step, Ring(), warp, lane};
  u32 stamp = epoch * (2 * NUM_LAYERS + 2) + 1;  // of the residual; it changes twice in a layer
#pragma unroll 1
  for (int index = 0, phase = 0; index <= NUM_LAYERS; phase = (phase + 1) % 4) {
    const Layer& layer = shared.layers[min(index, NUM_LAYERS - 1)];
    const Stamped* residual = index == 0 ? nullptr : step.residual;
    Product product{STORE, layer.qkv_scales, residual, stamp, layer.attention_norm, step.qkv, stamp, HIDDEN, QKV};
    if (index == NUM_LAYERS) product = {LOGITS, nullptr, residual, stamp, step.norm, nullptr, stamp, HIDDEN, VOCAB};
    if (phase == 1) product = {ADD, layer.output_scales, step.mixed, stamp, nullptr, step.residual, stamp + 1, QUERIES, HIDDEN};
    if (phase == 2)
      product = {GATE, layer.gate_up_scales, step.residual, stamp + 1, layer.mlp_norm, step.gated, stamp, HIDDEN, MLP};
    if (phase == 3) product = {ADD, layer.down_scales, step.gated, stamp, nullptr, step.residual, stamp + 2, MLP, HIDDEN};
    if (phase == 1 && attends) multiply.attend(layer, group, split, slab, stamp);
    multiply.run(product);
    if (phase == 3) index++, stamp += 2;
    if (index == NUM_LAYERS && phase == 0) break;
  }
  // All blocks have read the epoch: the last layer's residual is theirs.
  if (blockIdx.x == 0 && threadIdx.x == 0) *step.epoch = epoch + 1;
}
