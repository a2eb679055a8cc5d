// Attention over a slab, in stretches of 256 cells whose results are combined in the order of the cells.

#pragma once

#include <limits>
#include <vector>

#include "weights.h"

constexpr int STRETCH = 256; // cells that are computed together
constexpr int QUERIES = 8;   // queries of one row that read a stretch together
constexpr float NEVER = -std::numeric_limits<float>::infinity();

struct Slabs { // [layers, slabs, kv_heads, capacity, dim] each
    uint8_t *keys, *values;
    int32_t num_slabs, capacity, recent;
    int32_t kind; // FLOAT32 or BFLOAT16
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

    int64_t position(int cell) const { // below `sink` for a ring cell that is not written yet
        if (cell < sink)
            return cell;
        const int64_t at = cell - sink;
        return end - turn + at - (at < turn ? 0 : ring);
    }
};

struct Tile { // some queries of one row, and the stretches that at least one of them sees
    const Row *row;
    int first, count; // in the tokens of all rows
    int64_t position; // of the first query
    std::vector<int> stretches;
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
    std::vector<float> tile, scores, mixed;
    int32_t positions[STRETCH];
};

// Keys or values of one layer, slab and head. As floats, a cell takes V vectors.
template <int V> struct Cells {
    const uint8_t *at;
    int dim, kind;

    // Read 16 cells from `first` on as floats; those from `limit` on are not written to `out`.
    void read(int first, int limit, float *out) const {
        const int num = std::min(LANES, limit - first);
        if (!is_packed())
            for (int c = 0; c < num; c++)
                read_one((size_t)(first + c) * dim, out + c * V * LANES);
        else
            for (int c = 0; c < num; c++) {
                const uint8_t *from = at + (size_t)(first + c) * dim * 2;
#pragma GCC unroll 16
                for (int v = 0; v < V; v++) {
                    __builtin_prefetch(from + AHEAD + v * LANES * 2);
                    store(out + (c * V + v) * LANES, from_bfloat16(from + v * LANES * 2));
                }
            }
    }

    // The same cells side by side: for every dimension a vector of 16. Those from `limit` on have any values.
    void read_across(int first, int limit, float *out) const {
        const uint8_t *rows[LANES];
        Ints some[LANES];
        if (!is_packed()) {
            float all[LANES * V * LANES] = {};
            read(first, limit, all);
            for (int v = 0; v < V; v++, out += LANES * LANES) {
                for (int c = 0; c < LANES; c++)
                    rows[c] = (const uint8_t *)(all + (c * V + v) * LANES);
                transpose(rows, some);
                std::memcpy(out, some, sizeof some);
            }
            return;
        }
        for (int v = 0; v < V; v += 2, out += 2 * LANES * LANES) { // two dimensions in a lane
            for (int c = 0; c < LANES; c++) {
                rows[c] = at + ((size_t)std::min(first + c, limit - 1) * dim + v * LANES) * 2;
                __builtin_prefetch(rows[c] + AHEAD);
            }
            transpose(rows, some);
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++) {
                store(out + 2 * i * LANES, (Floats)(some[i] << 16));
                store(out + (2 * i + 1) * LANES, (Floats)(some[i] & (int32_t)0xffff0000));
            }
        }
    }

  private:
    bool is_packed() const { return kind == BFLOAT16 && dim == V * LANES && V % 2 == 0; }

    void read_one(size_t from, float *out) const {
        if (kind == FLOAT32) {
            std::memcpy(out, at + 4 * from, 4 * (size_t)dim);
            return;
        }
        for (int d = 0; d < dim; d++) {
            const uint32_t bits = (uint32_t)load<uint16_t>(at + 2 * (from + d)) << 16;
            std::memcpy(out + d, &bits, 4);
        }
    }
};

#if defined(__AVX512F__)
constexpr int SCORED = 8, MIXED = 4; // heads that are computed together: as many as fit the registers
#else
constexpr int SCORED = 6, MIXED = 2;
#endif

// The dot products of N queries with 16 keys, which are side by side. Even and odd dimensions are summed separately.
template <int V, int N> inline void score(const float *const (&queries)[N], const float *keys, Floats (&out)[N]) {
    for (int part = 0; part < LANES; part += NATIVE) {
        NativeFloats even[N] = {}, odd[N] = {};
        for (int d = 0; d < V * LANES; d += 2) {
            const auto one = load<NativeFloats>(keys + d * LANES + part);
            const auto other = load<NativeFloats>(keys + (d + 1) * LANES + part);
#pragma GCC unroll 8
            for (int n = 0; n < N; n++) {
                even[n] += one * queries[n][d];
                odd[n] += other * queries[n][d + 1];
            }
        }
        for (int n = 0; n < N; n++)
            store_native((float *)&out[n] + part, even[n] + odd[n]);
    }
}

// Add 16 values of V vectors each to each of N `mixed`, weighted. Four vectors of a head at a time stay in registers.
template <int V, int N>
inline void mix(const float *values, const float *const (&weights)[N], float *const (&mixed)[N]) {
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
        for (int c = 0; c < LANES; c++)
#pragma GCC unroll 4
            for (int n = 0; n < N; n++) {
                const NativeFloats weight = NativeFloats{} + weights[n][c];
#pragma GCC unroll 4
                for (int i = 0; i < STEP; i++)
                    sums[n][i] += load<NativeFloats>(values + c * V * LANES + first + i * NATIVE) * weight;
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
template <int V> struct Stretches {
    const Slabs &slabs;
    const Tile &tile;
    Cells<V> keys, values;
    const float *queries, *sink_queries;
    size_t stride;
    int group;     // heads that share the key head
    float scale;

    int num_heads() const { return tile.count * group; }

    // Compute gathered[query * group + head] over stretch number `stretch`.
    void gather(int stretch, Gathered *gathered, AttentionScratch &scratch) const {
        const Layout layout(*tile.row, slabs.capacity);
        const int first = stretch * STRETCH, last = std::min(first + STRETCH, (int)slabs.capacity);
        const int size = padded(last - first);
        scratch.tile.resize(LANES * V * LANES);
        scratch.scores.resize((size_t)num_heads() * STRETCH);
        std::fill(scratch.tile.begin(), scratch.tile.end(), 0.0f);
        bool is_seen[STRETCH / LANES];
        for (int c = 0; c < size; c += LANES) {
            const Ints positions = relative(layout, first + c, last);
            std::memcpy(scratch.positions + c, &positions, sizeof positions);
            is_seen[c / LANES] = sees_any(layout, positions, first + c);
        }
        for (int c = 0; c < size; c += LANES)
            if (is_seen[c / LANES])
                score_cells(layout, first + c, last, scratch, c);
        for (int head = 0; head < num_heads(); head++)
            weigh(&scratch.scores[(size_t)head * STRETCH], size, is_seen, gathered[head]);
        for (int c = 0; c < size; c += LANES)
            if (is_seen[c / LANES])
                mix_cells(first + c, last, scratch, c, gathered);
    }

  private:
    static Ints from(int first) {
        Ints numbers;
        for (int lane = 0; lane < LANES; lane++)
            numbers[lane] = first + lane;
        return numbers;
    }

    // The positions of 16 cells relative to the first query. Cells that cannot be seen are in its future.
    Ints relative(const Layout &layout, int cell, int last) const {
        const auto bounded = [](int64_t n) { return (int32_t)std::clamp<int64_t>(n, INT32_MIN / 2, INT32_MAX / 2); };
        const Ints cells = from(cell);
        const Ints at = cells - layout.sink, is_sink = at < 0, is_old = at >= (int32_t)layout.turn;
        const Ints newest = cells + bounded(layout.end - layout.turn - layout.sink - tile.position);
        const Ints in_ring = newest - (is_old & layout.ring);
        const Ints is_never = (cells >= last) | (~is_sink & (in_ring < bounded(layout.sink - tile.position)));
        const Ints found = (is_sink & (cells + bounded(-tile.position))) | (~is_sink & in_ring);
        return (is_never & INT32_MAX) | (~is_never & found);
    }

    // Whether any query sees any of these 16 cells.
    bool sees_any(const Layout &layout, Ints positions, int cell) const {
        return any((positions < tile.count) & ((from(cell) < layout.sink) | (positions > -slabs.recent)));
    }

    const float *query_at(const float *all, int head) const {
        return all + head / group * stride + (size_t)(head % group) * V * LANES;
    }

    void score_cells(const Layout &layout, int cell, int last, AttentionScratch &scratch, int at) const {
        float *tile_of_keys = scratch.tile.data();
        keys.read_across(cell, last, tile_of_keys);
        const Ints positions = load<Ints>(scratch.positions + at), is_sink = from(cell) < layout.sink;
        const bool has_sinks = cell < layout.sink, has_recent = cell + LANES > layout.sink;
        in_tiles<SCORED>(num_heads(), [&]<int N>(int first) {
            const float *recent_queries[N], *early_queries[N];
            for (int n = 0; n < N; n++) {
                recent_queries[n] = query_at(queries, first + n);
                early_queries[n] = query_at(sink_queries, first + n);
            }
            Floats recent[N] = {}, early[N] = {};
            if (has_recent)
                score<V, N>(recent_queries, tile_of_keys, recent);
            if (has_sinks)
                score<V, N>(early_queries, tile_of_keys, early);
            for (int n = 0; n < N; n++) {
                const int query = (first + n) / group;
                const Ints sees = (positions <= query) & (is_sink | (positions > query - slabs.recent));
                const Floats scores = has_sinks ? chosen(is_sink, early[n], recent[n]) : recent[n];
                store(&scratch.scores[(size_t)(first + n) * STRETCH + at], chosen(sees, scores * scale, splat(NEVER)));
            }
        });
    }

    // Replace the scores of the cells that are seen by weights.
    static void weigh(float *scores, int size, const bool *is_seen, Gathered &gathered) {
        Floats tops = splat(NEVER);
        for (int c = 0; c < size; c += LANES)
            if (is_seen[c / LANES])
                tops = larger(tops, load<Floats>(scores + c));
        gathered.top = largest_of(tops);
        Floats mass{};
        for (int c = 0; c < size; c += LANES)
            if (is_seen[c / LANES]) {
                const Floats weights =
                    gathered.top == NEVER ? Floats{} : exponential(load<Floats>(scores + c) - gathered.top);
                store(scores + c, weights);
                mass += weights;
            }
        gathered.mass = sum_of(mass);
    }

    void mix_cells(int cell, int last, AttentionScratch &scratch, int at, Gathered *gathered) const {
        values.read(cell, last, scratch.tile.data());
        in_tiles<MIXED>(num_heads(), [&]<int N>(int first) {
            const float *weights[N];
            float *mixed[N];
            for (int n = 0; n < N; n++) {
                weights[n] = &scratch.scores[(size_t)(first + n) * STRETCH + at];
                mixed[n] = gathered[first + n].mixed;
            }
            mix<V, N>(scratch.tile.data(), weights, mixed);
        });
    }
};
