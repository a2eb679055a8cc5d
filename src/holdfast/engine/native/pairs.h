// Products of many rows with bfloat16 weights in half the time, on processors that multiply pairs of bfloat16.
// Activations are rounded to bfloat16, so a row's bits depend on whether it is multiplied with few or with many others.

#pragma once

#include "weights.h"

#if defined(__AVX512BF16__)
constexpr bool HAS_PAIRS = true;
#else
constexpr bool HAS_PAIRS = false;
#endif

constexpr int FEW = 4; // up to this many rows, reading the weights costs more than multiplying them

// A tile of `num` rows in bfloat16: for every two inputs, the pairs of the rows side by side.
inline void interleave_pairs(const float *x, int num, int inputs, uint32_t *out) {
    for (int n = 0; n < num; n++)
        for (int i = 0; i < inputs; i += 2) {
            const float *at = x + (size_t)n * inputs + i;
            out[(size_t)i / 2 * num + n] = to_bfloat16(at[0]) | (uint32_t)to_bfloat16(at[1]) << 16;
        }
}

#if defined(__AVX512BF16__)

// The weights of two inputs in pairs.
inline __m512bh weight_pairs(const uint8_t *weights) {
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5,
                                           20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return (__m512bh)_mm512_permutexvar_epi16(order, _mm512_loadu_si512(weights));
}

// The N rows of the tile `x` times C blocks, each `stride` bytes after the one before.
template <int N, int C>
inline void multiply_pairs(const uint8_t *blocks, size_t stride, int inputs, const uint32_t *x, Floats (&out)[N][C]) {
    __m512 sums[N][C] = {};
    for (int i = 0; i < inputs; i += 2, blocks += Bfloat16::BYTES, x += N) {
        __m512bh weights[C];
#pragma GCC unroll 2
        for (int c = 0; c < C; c++) {
            __builtin_prefetch(blocks + c * stride + AHEAD);
            weights[c] = weight_pairs(blocks + c * stride);
        }
#pragma GCC unroll 8
        for (int n = 0; n < N; n++)
#pragma GCC unroll 2
            for (int c = 0; c < C; c++)
                sums[n][c] = _mm512_dpbf16_ps(sums[n][c], weights[c], (__m512bh)_mm512_set1_epi32(x[n]));
    }
    for (int n = 0; n < N; n++)
        for (int c = 0; c < C; c++)
            out[n][c] = (Floats)sums[n][c];
}

// Calls use(row, block, products) for `num` rows in interleaved pairs and C blocks, from number `number` on.
template <int C, class Use>
inline void multiply_paired_rows(const uint8_t *blocks, size_t stride, int number, int inputs, const uint32_t *x, int num,
                                 Use &&use) {
    in_tiles(num, [&]<int N>(int first) {
        Floats out[N][C];
        multiply_pairs<N, C>(blocks, stride, inputs, x + (size_t)first * inputs / 2, out);
        for (int n = 0; n < N; n++)
            for (int c = 0; c < C; c++)
                use(first + n, number + c, out[n][c]);
    });
}

#endif
