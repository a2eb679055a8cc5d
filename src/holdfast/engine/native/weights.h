// Matrices in blocks of 16 outputs: for every input, the 16 weights are side by side. A vector then holds 16 sums, and
// each sum runs over the inputs in the same order, however many rows are multiplied together.

#pragma once

#include <type_traits>

#include "vectors.h"

constexpr int ROWS = 8;     // rows that are multiplied while the weights are read once
constexpr int AHEAD = 2048; // how many bytes ahead the weights are prefetched

enum Kind : int32_t { FLOAT32 = 0, BFLOAT16 = 1, INT8 = 2 };

struct Matrix {
    const uint8_t *blocks; // an even number of them; weights beyond the last output are zero
    int32_t num_blocks, inputs, kind, outputs;
};

// Each kind stores GROUP inputs in BYTES; they are converted to floats one input, that is one vector, at a time.

struct Float32 {
    static constexpr int GROUP = 2;
    static constexpr bool IS_SCALED = false;
    static constexpr size_t BYTES = GROUP * LANES * sizeof(float);
    static Floats weight(const uint8_t *group, int i) { return load<Floats>(group + i * LANES * sizeof(float)); }
};

struct Bfloat16 {
    static constexpr int GROUP = 2;
    static constexpr bool IS_SCALED = false;
    static constexpr size_t BYTES = GROUP * LANES * sizeof(uint16_t);
    static Floats weight(const uint8_t *group, int i) { return from_bfloat16(group + i * LANES * sizeof(uint16_t)); }
};

struct Int8 { // 16 half-precision scales, then 32 times 16 weights
    static constexpr int GROUP = 32;
    static constexpr bool IS_SCALED = true;
    static constexpr size_t HEAD = LANES * sizeof(uint16_t);
    static constexpr size_t BYTES = HEAD + GROUP * LANES;
    static Floats weight(const uint8_t *group, int i) { return from_int8(group + HEAD + i * LANES); }
    static Floats scale(const uint8_t *group) { return from_half((const uint16_t *)group); }
};

template <class Act> inline void with_kind(int kind, Act &&act) {
    if (kind == INT8)
        act(std::type_identity<Int8>{});
    else if (kind == BFLOAT16)
        act(std::type_identity<Bfloat16>{});
    else
        act(std::type_identity<Float32>{});
}

inline size_t block_bytes(int kind, int inputs) {
    size_t bytes = 0;
    with_kind(kind, [&](auto w) {
        using W = typename decltype(w)::type;
        bytes = (size_t)(inputs / W::GROUP) * W::BYTES;
    });
    return bytes;
}

// The same weights as floats, which many rows then read from the cache: the scales of the outputs, then their group.
template <class W> struct Expanded {
    static constexpr int GROUP = W::GROUP;
    static constexpr bool IS_SCALED = W::IS_SCALED;
    static constexpr size_t HEAD = IS_SCALED ? sizeof(Floats) : 0;
    static constexpr size_t BYTES = HEAD + GROUP * sizeof(Floats);
    static Floats weight(const uint8_t *group, int i) { return load<Floats>(group + HEAD + i * sizeof(Floats)); }
    static Floats scale(const uint8_t *group) { return load<Floats>(group); }

    static void fill(const uint8_t *block, int inputs, uint8_t *out) {
        for (int first = 0; first < inputs; first += GROUP, block += W::BYTES, out += BYTES) {
            if constexpr (IS_SCALED)
                store((float *)out, W::scale(block));
            for (int i = 0; i < GROUP; i++)
                store((float *)(out + HEAD) + i * LANES, W::weight(block, i));
        }
    }
};

// One row of the matrix as floats.
inline void read_output(const Matrix &m, int output, float *out) {
    const uint8_t *block = m.blocks + output / LANES * block_bytes(m.kind, m.inputs);
    const int lane = output % LANES;
    with_kind(m.kind, [&](auto w) {
        using W = typename decltype(w)::type;
        for (int first = 0; first < m.inputs; first += W::GROUP, block += W::BYTES)
            for (int i = 0; i < W::GROUP; i++) {
                out[first + i] = W::weight(block, i)[lane];
                if constexpr (W::IS_SCALED)
                    out[first + i] *= W::scale(block)[lane];
            }
    });
}

// Transpose a tile: for every input, the values of the rows side by side.
inline void interleave(const float *x, int num, int inputs, float *out) {
    for (int n = 0; n < num; n++)
        for (int i = 0; i < inputs; i++)
            out[(size_t)i * num + n] = x[(size_t)n * inputs + i];
}

// Calls act<rows in the tile>(first row) for every tile.
template <class Act> inline void in_tiles(int num, Act &&act) {
    int first = 0;
    for (; num - first >= ROWS; first += ROWS)
        act.template operator()<ROWS>(first);
    switch (num - first) {
    case 1: act.template operator()<1>(first); break;
    case 2: act.template operator()<2>(first); break;
    case 3: act.template operator()<3>(first); break;
    case 4: act.template operator()<4>(first); break;
    case 5: act.template operator()<5>(first); break;
    case 6: act.template operator()<6>(first); break;
    case 7: act.template operator()<7>(first); break;
    }
}

// The N rows of the tile `x` times one block. Even and odd inputs are summed separately; scales apply to each group.
template <class W, int N> inline void multiply(const uint8_t *block, int inputs, const float *x, Floats (&out)[N]) {
    Floats even[N] = {}, odd[N] = {}, sums[N] = {};
    for (int first = 0; first < inputs; first += W::GROUP, block += W::BYTES, x += W::GROUP * N) {
#pragma GCC unroll 16
        for (size_t ahead = 0; ahead < W::BYTES; ahead += 64)
            __builtin_prefetch(block + AHEAD + ahead);
        for (int i = 0; i < W::GROUP; i += 2) {
            const Floats one = W::weight(block, i), other = W::weight(block, i + 1);
#pragma GCC unroll 8
            for (int n = 0; n < N; n++)
                even[n] += one * x[i * N + n];
#pragma GCC unroll 8
            for (int n = 0; n < N; n++)
                odd[n] += other * x[(i + 1) * N + n];
        }
        if constexpr (W::IS_SCALED) {
            const Floats scale = W::scale(block);
#pragma GCC unroll 8
            for (int n = 0; n < N; n++) {
                sums[n] += (even[n] + odd[n]) * scale;
                even[n] = odd[n] = Floats{};
            }
        }
    }
    for (int n = 0; n < N; n++)
        out[n] = W::IS_SCALED ? sums[n] : even[n] + odd[n];
}

// Calls use(row, products) for `num` interleaved rows and one block.
template <class W, class Use>
inline void multiply_rows(const uint8_t *block, int inputs, const float *x, int num, Use &&use) {
    in_tiles(num, [&]<int N>(int first) {
        Floats out[N];
        multiply<W, N>(block, inputs, x + (size_t)first * inputs, out);
        for (int n = 0; n < N; n++)
            use(first + n, out[n]);
    });
}
