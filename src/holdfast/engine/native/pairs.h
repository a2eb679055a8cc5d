// Products of many rows with bfloat16 weights, on processors that multiply pairs of them. Activations are rounded, too, so a row's bits depend on whether it is multiplied with few or with many others.

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

// A stored block's weights in pairs of inputs.
struct Pairs {
    static constexpr size_t BYTES = Bfloat16::BYTES;
    static __m512i pair(const uint8_t *group) {
        Floats two[Bfloat16::STEP];
        Bfloat16::weights(group, 0, two);
        return _mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32((__m512i)two[0], 16), (__m512i)two[1]);
    }
};

// The same pairs, computed once, which many rows then read from the cache.
struct KeptPairs {
    static constexpr size_t BYTES = sizeof(Floats);
    static __m512i pair(const uint8_t *group) { return _mm512_loadu_si512(group); }

    static void fill(const uint8_t *block, int inputs, uint8_t *out) {
        for (int first = 0; first < inputs; first += 2, block += Pairs::BYTES, out += BYTES)
            _mm512_storeu_si512(out, Pairs::pair(block));
    }
};

template <class P, int N>
inline void multiply_pairs(const uint8_t *block, int inputs, const uint32_t *x, Floats (&out)[N]) {
    __m512 sums[N] = {};
    for (int first = 0; first < inputs; first += 2, block += P::BYTES, x += N) {
        __builtin_prefetch(block + AHEAD);
        const __m512bh pair = (__m512bh)P::pair(block);
#pragma GCC unroll 8
        for (int n = 0; n < N; n++)
            sums[n] = _mm512_dpbf16_ps(sums[n], pair, (__m512bh)_mm512_set1_epi32(x[n]));
    }
    for (int n = 0; n < N; n++)
        out[n] = (Floats)sums[n];
}

// Calls use(row, products) for `num` rows in interleaved pairs and one block.
template <class P, class Use>
inline void multiply_paired_rows(const uint8_t *block, int inputs, const uint32_t *x, int num, Use &&use) {
    in_tiles(num, [&]<int N>(int first) {
        Floats out[N];
        multiply_pairs<P, N>(block, inputs, x + (size_t)first * inputs / 2, out);
        for (int n = 0; n < N; n++)
            use(first + n, out[n]);
    });
}

#endif
