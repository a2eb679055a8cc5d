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
        if (kind == BFLOAT16 && dim == V * LANES) {
            const uint8_t *from = at + (size_t)first * dim * 2;
            for (int c = 0; c < num; c++, from += V * LANES * 2, out += V * LANES)
#pragma GCC unroll 16
                for (int v = 0; v < V; v++) {
                    __builtin_prefetch(from + AHEAD + v * LANES * 2);
                    store(out + v * LANES, from_bfloat16(from + v * LANES * 2));
                }
            return;
        }
        for (int c = 0; c < num; c++)
            read_one((size_t)(first + c) * dim, out + c * V * LANES);
    }

  private:
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

// The dot products of one query with 16 keys of V vectors each.
template <int V> inline Floats score(const float *query, const float *keys) {
    Floats sums[LANES] = {};
#pragma GCC unroll 16
    for (int v = 0; v < V; v++) {
        const Floats part = load<Floats>(query + v * LANES);
#pragma GCC unroll 16
        for (int c = 0; c < LANES; c++)
            sums[c] += part * load<Floats>(keys + (c * V + v) * LANES);
    }
    return sums_of(sums);
}

// Add 16 values of V vectors each, weighted, to `mixed`. Up to four vectors at a time stay in registers.
template <int V> inline void mix(const float *values, const float *weights, float *mixed) {
    constexpr int STEP = V % 4 == 0 ? 4 : V % 3 == 0 ? 3 : V % 2 == 0 ? 2 : 1;
#pragma GCC unroll 16
    for (int v = 0; v < V; v += STEP) {
        Floats sums[STEP];
#pragma GCC unroll 4
        for (int i = 0; i < STEP; i++)
            sums[i] = load<Floats>(mixed + (v + i) * LANES);
#pragma GCC unroll 4
        for (int c = 0; c < LANES; c++)
#pragma GCC unroll 4
            for (int i = 0; i < STEP; i++)
                sums[i] += load<Floats>(values + (c * V + v + i) * LANES) * weights[c];
#pragma GCC unroll 4
        for (int i = 0; i < STEP; i++)
            store(mixed + (v + i) * LANES, sums[i]);
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
        for (int c = 0; c < size; c++) // relative to the first query; cells that cannot be seen are in its future
            scratch.positions[c] = first + c < last ? relative(layout, first + c) : INT32_MAX;
        for (int c = 0; c < size; c += LANES)
            if (is_seen(layout, scratch.positions + c, first + c))
                score_cells(layout, first + c, last, scratch, c);
            else
                for (int head = 0; head < num_heads(); head++)
                    store(&scratch.scores[(size_t)head * STRETCH + c], splat(NEVER));
        for (int head = 0; head < num_heads(); head++)
            weigh(&scratch.scores[(size_t)head * STRETCH], size, gathered[head]);
        for (int c = 0; c < size; c += LANES)
            if (is_seen(layout, scratch.positions + c, first + c))
                mix_cells(first + c, last, scratch, c, gathered);
    }

  private:
    int32_t relative(const Layout &layout, int cell) const {
        const int64_t position = layout.position(cell);
        if (cell >= layout.sink && position < layout.sink)
            return INT32_MAX;
        return (int32_t)std::max<int64_t>(position - tile.position, INT32_MIN / 2);
    }

    // Whether any query sees any of these 16 cells.
    bool is_seen(const Layout &layout, const int32_t *positions, int cell) const {
        for (int c = 0; c < LANES; c++)
            if (positions[c] < tile.count && (cell + c < layout.sink || positions[c] > -slabs.recent))
                return true;
        return false;
    }

    void score_cells(const Layout &layout, int cell, int last, AttentionScratch &scratch, int at) const {
        keys.read(cell, last, scratch.tile.data());
        const Ints positions = load<Ints>(scratch.positions + at);
        Ints cells{};
        for (int lane = 0; lane < LANES; lane++)
            cells[lane] = cell + lane;
        const Ints is_sink = cells < layout.sink;
        const bool has_sinks = cell < layout.sink, has_recent = cell + LANES > layout.sink;
        for (int query = 0; query < tile.count; query++) {
            const Ints sees = (positions <= query) & (is_sink | (positions > query - slabs.recent));
            for (int head = 0; head < group; head++) {
                const size_t from = query * stride + (size_t)head * V * LANES;
                Floats scores{};
                if (has_recent)
                    scores = score<V>(queries + from, scratch.tile.data());
                if (has_sinks)
                    scores = chosen(is_sink, score<V>(sink_queries + from, scratch.tile.data()), scores);
                store(&scratch.scores[(size_t)(query * group + head) * STRETCH + at],
                      chosen(sees, scores * scale, splat(NEVER)));
            }
        }
    }

    // Replace scores by weights.
    static void weigh(float *scores, int size, Gathered &gathered) {
        Floats tops = splat(NEVER);
        for (int c = 0; c < size; c += LANES)
            tops = larger(tops, load<Floats>(scores + c));
        gathered.top = largest_of(tops);
        Floats mass{};
        for (int c = 0; c < size && gathered.top != NEVER; c += LANES) {
            const Floats weights = exponential(load<Floats>(scores + c) - gathered.top);
            store(scores + c, weights);
            mass += weights;
        }
        gathered.mass = sum_of(mass);
    }

    void mix_cells(int cell, int last, AttentionScratch &scratch, int at, Gathered *gathered) const {
        values.read(cell, last, scratch.tile.data());
        for (int head = 0; head < num_heads(); head++)
            if (gathered[head].top != NEVER)
                mix<V>(scratch.tile.data(), &scratch.scores[(size_t)head * STRETCH + at], gathered[head].mixed);
    }
};
