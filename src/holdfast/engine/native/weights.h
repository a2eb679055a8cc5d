// Matrices in blocks of 16 outputs: for every input, the 16 weights are side by side. A vector then holds 16 sums, and
// each sum runs over the inputs in the same order, however many rows are multiplied together.

#pragma once

#include <type_traits>

#include "vectors.h"

constexpr int ROWS = 8;     // rows that are multiplied while the weights are read once
constexpr int AHEAD = 4096; // how many bytes ahead the weights are prefetched

enum Kind : int32_t { FLOAT32 = 0, BFLOAT16 = 1, INT8 = 2, INT4 = 3, INT4_OFFSET = 4 };

struct Matrix {
    const uint8_t *blocks; // an even number of them; weights beyond the last output are zero
    int32_t num_blocks, inputs, kind, outputs;
};

constexpr int GROUP = 32; // inputs that share a scale, in int8 and in four bits

// Each kind stores SIZE inputs in BYTES; STEP of them at a time are converted to floats, one vector for each.

struct Float32 {
    static constexpr int SIZE = 2, STEP = 2;
    static constexpr bool IS_SCALED = false;
    static constexpr size_t BYTES = SIZE * LANES * sizeof(float);
    static void weights(const uint8_t *group, int, Floats (&out)[STEP]) {
        for (int i = 0; i < STEP; i++)
            out[i] = load<Floats>(group + i * LANES * sizeof(float));
    }
};

struct Bfloat16 {
    static constexpr int SIZE = 2, STEP = 2;
    static constexpr bool IS_SCALED = false;
    static constexpr size_t BYTES = SIZE * LANES * sizeof(uint16_t);
    static void weights(const uint8_t *group, int, Floats (&out)[STEP]) {
        for (int i = 0; i < STEP; i++)
            out[i] = from_bfloat16(group + i * LANES * sizeof(uint16_t));
    }
};

// 16 half-precision scales, then bytes in quads: of every four inputs, those of the first output, of the second, ...
struct Int8 {
    static constexpr int SIZE = GROUP, STEP = 4;
    static constexpr bool IS_SCALED = true;
    static constexpr size_t HEAD = LANES * sizeof(uint16_t);
    static constexpr size_t BYTES = HEAD + GROUP * LANES;
    static Floats scale(const uint8_t *group) { return from_half((const uint16_t *)group); }
    static void weights(const uint8_t *group, int i, Floats (&out)[STEP]) {
        const Ints four = load<Ints>(group + HEAD + i * LANES);
#pragma GCC unroll 4
        for (int j = 0; j < STEP; j++)
            out[j] = __builtin_convertvector((four << (24 - 8 * j)) >> 24, Floats);
    }
};

// 16 half-precision scales and perhaps 16 offsets; then bytes in quads, each byte with two inputs: one of the first 16
// in its low half, and the one 16 further in its high half. A weight is scale * (nibble - 8), or scale * nibble + offset.
template <bool OFFSETS> struct Int4 {
    static constexpr int SIZE = GROUP, STEP = 4;
    static constexpr bool IS_SCALED = false;
    static constexpr size_t HEAD = LANES * sizeof(uint16_t) * (OFFSETS ? 2 : 1);
    static constexpr size_t BYTES = HEAD + GROUP / 2 * LANES;
    static void weights(const uint8_t *group, int i, Floats (&out)[STEP]) {
        const Floats scale = from_half((const uint16_t *)group);
        const Floats offset = OFFSETS ? from_half((const uint16_t *)group + LANES) : scale * -8.0f;
        const Ints eight = load<Ints>(group + HEAD + i % (GROUP / 2) * LANES) >> (i / (GROUP / 2) * 4);
#pragma GCC unroll 4
        for (int j = 0; j < STEP; j++)
            out[j] = __builtin_convertvector((eight >> (8 * j)) & 15, Floats) * scale + offset;
    }
};

template <class W> constexpr bool IS_INT4 = false;
template <bool OFFSETS> constexpr bool IS_INT4<Int4<OFFSETS>> = true;
template <class W> constexpr bool HAS_OFFSETS = std::is_same_v<W, Int4<true>>;
template <class W> constexpr bool IS_INTEGER = IS_INT4<W> || std::is_same_v<W, Int8>;

template <class Act> inline void with_kind(int kind, Act &&act) {
    switch (kind) {
    case FLOAT32: act(std::type_identity<Float32>{}); break;
    case BFLOAT16: act(std::type_identity<Bfloat16>{}); break;
    case INT8: act(std::type_identity<Int8>{}); break;
    case INT4: act(std::type_identity<Int4<false>>{}); break;
    case INT4_OFFSET: act(std::type_identity<Int4<true>>{}); break;
    }
}

inline size_t block_bytes(int kind, int inputs) {
    size_t bytes = 0;
    with_kind(kind, [&](auto w) {
        using W = typename decltype(w)::type;
        bytes = (size_t)(inputs / W::SIZE) * W::BYTES;
    });
    return bytes;
}

// The same weights as floats, which many rows then read from the cache: the scales of the outputs, then their group.
template <class W> struct Expanded {
    static constexpr int SIZE = W::SIZE, STEP = W::STEP;
    static constexpr bool IS_SCALED = W::IS_SCALED;
    static constexpr size_t HEAD = IS_SCALED ? sizeof(Floats) : 0;
    static constexpr size_t BYTES = HEAD + SIZE * sizeof(Floats);
    static Floats scale(const uint8_t *group) { return load<Floats>(group); }
    static void weights(const uint8_t *group, int i, Floats (&out)[STEP]) {
        for (int j = 0; j < STEP; j++)
            out[j] = load<Floats>(group + HEAD + (i + j) * sizeof(Floats));
    }

    static void fill(const uint8_t *block, int inputs, uint8_t *out) {
        for (int first = 0; first < inputs; first += SIZE, block += W::BYTES, out += BYTES) {
            if constexpr (IS_SCALED)
                store((float *)out, W::scale(block));
            for (int i = 0; i < SIZE; i += STEP) {
                Floats some[STEP];
                W::weights(block, i, some);
                for (int j = 0; j < STEP; j++)
                    store((float *)(out + HEAD) + (i + j) * LANES, some[j]);
            }
        }
    }
};

// One row of the matrix as floats.
inline void read_output(const Matrix &m, int output, float *out) {
    const uint8_t *block = m.blocks + output / LANES * block_bytes(m.kind, m.inputs);
    const int lane = output % LANES;
    with_kind(m.kind, [&](auto w) {
        using W = typename decltype(w)::type;
        for (int first = 0; first < m.inputs; first += W::SIZE, block += W::BYTES)
            for (int i = 0; i < W::SIZE; i += W::STEP) {
                Floats some[W::STEP];
                W::weights(block, i, some);
                for (int j = 0; j < W::STEP; j++)
                    out[first + i + j] = some[j][lane];
                if constexpr (W::IS_SCALED)
                    for (int j = 0; j < W::STEP; j++)
                        out[first + i + j] *= W::scale(block)[lane];
            }
    });
}

// Transpose a tile: for every input, the values of the rows side by side.
inline void interleave(const float *x, int num, int inputs, float *out) {
    for (int n = 0; n < num; n++)
        for (int i = 0; i < inputs; i++)
            out[(size_t)i * num + n] = x[(size_t)n * inputs + i];
}

// Calls act<rows in the tile>(first row) for every tile of up to MOST rows.
template <int MOST = ROWS, class Act> inline void in_tiles(int num, Act &&act) {
    int first = 0;
    for (; num - first >= MOST; first += MOST)
        act.template operator()<MOST>(first);
    const auto rest = [&]<int... N>(std::integer_sequence<int, N...>) {
        ((num - first == N + 1 ? act.template operator()<N + 1>(first) : void()), ...);
    };
    if (first < num)
        rest(std::make_integer_sequence<int, MOST - 1>{});
}

// The N rows of the tile `x` times one block. Even and odd inputs are summed separately; scales apply to each group.
template <class W, int N> inline void multiply(const uint8_t *block, int inputs, const float *x, Floats (&out)[N]) {
    Floats even[N] = {}, odd[N] = {}, sums[N] = {};
    for (int first = 0; first < inputs; first += W::SIZE, block += W::BYTES, x += W::SIZE * N) {
#pragma GCC unroll 16
        for (size_t ahead = 0; ahead < W::BYTES; ahead += 64)
            __builtin_prefetch(block + AHEAD + ahead);
        for (int i = 0; i < W::SIZE; i += W::STEP) {
            Floats some[W::STEP];
            W::weights(block, i, some);
#pragma GCC unroll 2
            for (int j = 0; j < W::STEP; j += 2) {
#pragma GCC unroll 8
                for (int n = 0; n < N; n++)
                    even[n] += some[j] * x[(i + j) * N + n];
#pragma GCC unroll 8
                for (int n = 0; n < N; n++)
                    odd[n] += some[j + 1] * x[(i + j + 1) * N + n];
            }
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
