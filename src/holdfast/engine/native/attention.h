// Attention over a slab, in stretches of 256 cells whose results are combined in the order of the cells.
//
// Keys lie side by side in blocks of 16 cells: for every unit of 32 bits, which is one dimension in float32 and two in
// bfloat16, those of the 16 cells. So scores need no sum across lanes. The values of a cell lie together.

#pragma once

#include <limits>
#include <vector>

#include "weights.h"

constexpr int STRETCH = 256; // cells that are computed together
constexpr int QUERIES = 8;   // queries of one row that read a stretch together
constexpr float NEVER = -std::numeric_limits<float>::infinity();

struct Slabs { // keys: [layers, slabs, kv_heads, capacity / 16, units, 16]; values: [layers, slabs, kv_heads, capacity, dim]
    uint8_t *keys, *values;
    int32_t num_slabs, capacity, recent;
    int32_t kind; // FLOAT32 or BFLOAT16

    int item_bytes() const { return kind == FLOAT32 ? 4 : 2; }
};

struct Row {
    int64_t start; // the position of its first token
    int32_t count, slot, sink, num_logits;
};

// Which position each cell holds once a row is written: sinks have a cell each, later positions share the ring.
struct Layout {
    int64_t end; // one past the last position written
    int sink, ring;
    int64_t turn; // how many cells of the ring hold positions of the newest turn

    Layout(const Row &row, int capacity)
        : end(row.start + row.count), sink(row.sink), ring(capacity - row.sink),
          turn(end > sink ? (end - sink) % ring : 0) {}

    int64_t cell(int64_t position) const { return position < sink ? position : sink + (position - sink) % ring; }
};

enum Sight : uint8_t { UNSEEN, PARTLY, WHOLLY }; // by no query, by some, by all; a block with sinks is PARTLY seen

struct Block { // of 16 cells, of which at least one query sees one
    int first; // cell
    Sight sight;
};

typedef std::vector<Block> Stretch;

struct Tile { // some queries of one row, and the stretches that at least one of them sees
    const Row *row;
    int first, count; // in the tokens of all rows
    int64_t position; // of the first query
    std::vector<Stretch> stretches;
};

// The running softmax of one head of one query: the top score, the sum of the weights relative to e^top, and the
// values weighted by them.
struct Gathered {
    float top, mass;
    float *mixed;
};

inline void fold(Gathered &into, const Gathered &more, int width) {
    if (more.top == NEVER)
        return;
    const float top = std::max(into.top, more.top);
    const float old_share = into.top == NEVER ? 0.0f : exponential(into.top - top);
    const float new_share = exponential(more.top - top);
    into.top = top;
    into.mass = into.mass * old_share + more.mass * new_share;
    for (int d = 0; d < width; d += LANES)
        store(into.mixed + d,
              load<Floats>(into.mixed + d) * old_share + load<Floats>(more.mixed + d) * new_share);
}

struct AttentionScratch { // of one thread
    std::vector<float> values, scores, mixed;
};

// Which cells the queries of a tile see. Positions are relative to the first query.
struct View {
    const Slabs &slabs;
    const Tile &tile;
    const Layout layout;

    View(const Slabs &of, const Tile &for_tile) : slabs(of), tile(for_tile), layout(*for_tile.row, of.capacity) {}

    static Ints numbers(int first) {
        Ints found;
        for (int lane = 0; lane < LANES; lane++)
            found[lane] = first + lane;
        return found;
    }

    Ints is_sink(int cell) const { return numbers(cell) < layout.sink; }

    // Of 16 cells. Those that hold nothing are in the future.
    Ints positions(int cell) const {
        const auto bounded = [](int64_t n) { return (int32_t)std::clamp<int64_t>(n, INT32_MIN / 2, INT32_MAX / 2); };
        const Ints cells = numbers(cell), at = cells - layout.sink, is_old = at >= (int32_t)layout.turn;
        const Ints newest = cells + bounded(layout.end - layout.turn - layout.sink - tile.position);
        const Ints in_ring = newest - (is_old & layout.ring);
        const Ints is_never = (at >= 0) & (in_ring < bounded(layout.sink - tile.position));
        const Ints found = chosen_ints(at < 0, cells + bounded(-tile.position), in_ring);
        return chosen_ints(is_never, Ints{} + INT32_MAX, found);
    }

    // Which of 16 cells a query sees.
    Ints sees(Ints positions, Ints is_sink, int query) const {
        return (positions <= query) & (is_sink | (positions > query - slabs.recent));
    }

    Sight sight(int cell) const {
        const Ints at = positions(cell), sinks = is_sink(cell);
        if (!any((at < tile.count) & (sinks | (at > -slabs.recent))))
            return UNSEEN;
        return any(sinks | ~(sees(at, sinks, 0) & sees(at, sinks, tile.count - 1))) ? PARTLY : WHOLLY;
    }

  private:
    static Ints chosen_ints(Ints where, Ints yes, Ints no) { return (where & yes) | (~where & no); }
};

#if defined(__AVX512F__)
constexpr int SCORED = 8, MIXED = 4; // heads that are computed together: as many as fit the registers
#else
constexpr int SCORED = 6, MIXED = 2;
#endif

// Pair number `pair` of dimensions of 16 keys; from lane `lane` on.
template <int KIND> inline std::pair<NativeFloats, NativeFloats> two_dimensions(const uint8_t *keys, int pair, int lane) {
    if constexpr (KIND == FLOAT32) {
        const uint8_t *at = keys + (2 * pair * LANES + lane) * 4;
        return {load<NativeFloats>(at), load<NativeFloats>(at + LANES * 4)};
    }
    const auto both = load<NativeInts>(keys + (pair * LANES + lane) * 4);
    return {(NativeFloats)(both << 16), (NativeFloats)(both & (int32_t)0xffff0000)};
}

// The dot products of N queries with B blocks of 16 keys. Even and odd dimensions are summed separately.
template <int KIND, int N, int B>
inline void score(const float *const (&queries)[N], const uint8_t *keys, int dim, size_t block_bytes, Floats (&out)[N][B]) {
    for (int lane = 0; lane < LANES; lane += NATIVE) {
        NativeFloats even[N][B] = {}, odd[N][B] = {};
        for (int pair = 0; pair < dim / 2; pair++)
#pragma GCC unroll 2
            for (int b = 0; b < B; b++) {
                if constexpr (B > 1) // few queries: reading takes longer than multiplying
                    __builtin_prefetch(keys + b * block_bytes + pair * LANES * 4 + AHEAD);
                const auto [one, other] = two_dimensions<KIND>(keys + b * block_bytes, pair, lane);
#pragma GCC unroll 8
                for (int n = 0; n < N; n++) {
                    even[n][b] += one * queries[n][2 * pair];
                    odd[n][b] += other * queries[n][2 * pair + 1];
                }
            }
#pragma GCC unroll 8
        for (int n = 0; n < N; n++)
#pragma GCC unroll 2
            for (int b = 0; b < B; b++)
                store_native((float *)&out[n][b] + lane, even[n][b] + odd[n][b]);
    }
}

// Values as floats, from number `at` of them on.
template <int KIND> inline NativeFloats some_values(const uint8_t *values, size_t at) {
    if constexpr (KIND == FLOAT32)
        return load<NativeFloats>(values + at * 4);
#if defined(__AVX512F__)
    return (NativeFloats)from_bfloat16(values + at * 2);
#elif defined(__AVX2__)
    return (NativeFloats)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(values + at * 2))), 16);
#else
    NativeInts bits;
    for (int lane = 0; lane < NATIVE; lane++)
        bits[lane] = load<uint16_t>(values + (at + lane) * 2);
    return (NativeFloats)(bits << 16);
#endif
}

// Add the values of 16 cells, of V vectors each, to each of N `mixed`, weighted. Four vectors of a head at a time stay in
// registers.
template <int KIND, int V, int N>
inline void mix(const uint8_t *values, const float *const (&weights)[N], float *const (&mixed)[N]) {
    constexpr int VECTORS = V * LANES / NATIVE;
    constexpr int STEP = VECTORS % 4 == 0 ? 4 : VECTORS % 3 == 0 ? 3 : VECTORS % 2 == 0 ? 2 : 1;
    for (int first = 0; first < VECTORS * NATIVE; first += STEP * NATIVE) {
        NativeFloats sums[N][STEP];
#pragma GCC unroll 4
        for (int n = 0; n < N; n++)
#pragma GCC unroll 4
            for (int i = 0; i < STEP; i++)
                sums[n][i] = load<NativeFloats>(mixed[n] + first + i * NATIVE);
#pragma GCC unroll 4
        for (int c = 0; c < LANES; c++) {
            NativeFloats some[STEP];
#pragma GCC unroll 4
            for (int i = 0; i < STEP; i++) {
                const size_t at = (size_t)c * V * LANES + first + i * NATIVE;
                if constexpr (KIND == BFLOAT16)
                    __builtin_prefetch(values + at * 2 + AHEAD);
                some[i] = some_values<KIND>(values, at);
            }
#pragma GCC unroll 4
            for (int n = 0; n < N; n++)
#pragma GCC unroll 4
                for (int i = 0; i < STEP; i++)
                    sums[n][i] += some[i] * weights[n][c];
        }
#pragma GCC unroll 4
        for (int n = 0; n < N; n++)
#pragma GCC unroll 4
            for (int i = 0; i < STEP; i++)
                store_native(mixed[n] + first + i * NATIVE, sums[n][i]);
    }
}

// All queries of a tile that share one key head, for heads of V vectors. `queries` and `sink_queries` are
// [count, group, width], with `stride` floats from one token to the next.
template <int V, int KIND> struct Stretches {
    View view;
    const uint8_t *keys, *values; // of the head
    const float *queries, *sink_queries;
    size_t stride;
    int dim, group; // heads that share the key head
    float scale;

    int num_heads() const { return view.tile.count * group; }

    // Compute gathered[query * group + head] over one stretch.
    void gather(const Stretch &stretch, Gathered *gathered, AttentionScratch &scratch) const {
        const int num = stretch.size();
        const Block *blocks = stretch.data();
        scratch.scores.resize((size_t)num_heads() * STRETCH);
        float *scores = scratch.scores.data();
        for (int i = 0; i < num;) {
            const bool is_pair = num_heads() <= SCORED / 2 && i + 1 < num && blocks[i + 1].first == blocks[i].first + LANES;
            if (is_pair)
                score_blocks<SCORED / 2, 2>(blocks + i, scores + i * LANES);
            else
                score_blocks<SCORED, 1>(blocks + i, scores + i * LANES);
            i += is_pair ? 2 : 1;
        }
        for (int head = 0; head < num_heads(); head++)
            weigh(scores + (size_t)head * STRETCH, num, gathered[head]);
        for (int i = 0; i < num; i++)
            mix_block(blocks[i].first, scores + i * LANES, scratch.values, gathered);
    }

  private:
    const float *query_at(const float *all, int head) const {
        return all + head / group * stride + (size_t)(head % group) * V * LANES;
    }

    // The scores of B blocks one after the other, for all heads, up to MOST at a time. `scores` has STRETCH for each head.
    template <int MOST, int B> void score_blocks(const Block *blocks, float *scores) const {
        const size_t block_bytes = (size_t)LANES * dim * view.slabs.item_bytes();
        const int cell = blocks->first, sink = view.layout.sink;
        const uint8_t *from = keys + cell / LANES * block_bytes;
        const bool has_sinks = cell < sink, has_recent = cell + B * LANES > sink;
        in_tiles<MOST>(num_heads(), [&]<int N>(int first) {
            const float *recent_queries[N], *early_queries[N];
            for (int n = 0; n < N; n++) {
                recent_queries[n] = query_at(queries, first + n);
                early_queries[n] = query_at(sink_queries, first + n);
            }
            Floats recent[N][B] = {}, early[N][B] = {};
            if (has_recent)
                score<KIND, N, B>(recent_queries, from, dim, block_bytes, recent);
            if (has_sinks)
                score<KIND, N, B>(early_queries, from, dim, block_bytes, early);
            for (int b = 0; b < B; b++) {
                float *to = scores + (size_t)first * STRETCH + b * LANES;
                if (blocks[b].sight == WHOLLY) {
                    for (int n = 0; n < N; n++)
                        store(to + n * STRETCH, recent[n][b] * scale);
                    continue;
                }
                const Ints positions = view.positions(blocks[b].first), is_sink = view.is_sink(blocks[b].first);
                for (int n = 0; n < N; n++) {
                    const Floats found = chosen(is_sink, early[n][b], recent[n][b]) * scale;
                    const Ints sees = view.sees(positions, is_sink, (first + n) / group);
                    store(to + n * STRETCH, chosen(sees, found, splat(NEVER)));
                }
            }
        });
    }

    // Replace the scores of one head by weights.
    static void weigh(float *scores, int num_blocks, Gathered &gathered) {
        Floats tops = splat(NEVER), mass{};
        for (int at = 0; at < num_blocks * LANES; at += LANES)
            tops = larger(tops, load<Floats>(scores + at));
        gathered.top = largest_of(tops);
        const float top = gathered.top == NEVER ? 0.0f : gathered.top; // then all weights are 0
        for (int at = 0; at < num_blocks * LANES; at += LANES) {
            const Floats weights = exponential(load<Floats>(scores + at) - top);
            store(scores + at, weights);
            mass += weights;
        }
        gathered.mass = sum_of(mass);
    }

    void mix_block(int cell, const float *scores, std::vector<float> &as_floats, Gathered *gathered) const {
        const size_t cell_bytes = (size_t)dim * view.slabs.item_bytes();
        const uint8_t *from = values + cell * cell_bytes;
        const auto mix_all = [&]<int HELD>(const uint8_t *some) {
            in_tiles<MIXED>(num_heads(), [&]<int N>(int first) {
                const float *weights[N];
                float *mixed[N];
                for (int n = 0; n < N; n++) {
                    weights[n] = scores + (size_t)(first + n) * STRETCH;
                    mixed[n] = gathered[first + n].mixed;
                }
                mix<HELD, V, N>(some, weights, mixed);
            });
        };
        const bool is_whole = dim == V * LANES;
        if (is_whole && (KIND == FLOAT32 || num_heads() <= MIXED))
            return mix_all.template operator()<KIND>(from);
        as_floats.resize(LANES * V * LANES);
        for (int c = 0; c < LANES; c++)
            read_cell(from + c * cell_bytes, &as_floats[c * V * LANES]);
        mix_all.template operator()<FLOAT32>((const uint8_t *)as_floats.data());
    }

    // In whole vectors; what the head does not have is 0.
    void read_cell(const uint8_t *from, float *to) const {
        if (dim == V * LANES) {
            __builtin_prefetch(from + AHEAD);
#pragma GCC unroll 16
            for (int d = 0; d < V * LANES; d += NATIVE)
                store_native(to + d, some_values<KIND>(from, d));
            return;
        }
        for (int d = 0; d < V * LANES; d++) {
            uint32_t bits = 0;
            if (d < dim)
                bits = KIND == FLOAT32 ? load<uint32_t>(from + 4 * d) : (uint32_t)load<uint16_t>(from + 2 * d) << 16;
            std::memcpy(to + d, &bits, 4);
        }
    }
};
