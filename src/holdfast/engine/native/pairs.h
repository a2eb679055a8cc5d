// Products of many rows in half the time, on processors that multiply pairs of bfloat16. Activations are rounded to
// bfloat16, so a row's bits depend on whether it is multiplied with few or with many others.

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

// A stored block's weights in pairs of inputs. Eight bits fit a bfloat16 exactly; their scales are applied later.
template <class W> struct Pairs {
    static constexpr int SIZE = W::SIZE;
    static constexpr bool IS_SCALED = W::IS_SCALED;
    static constexpr size_t BYTES = W::BYTES;
    static Floats scale(const uint8_t *group) { return W::scale(group); }
    static __m512i pair(const uint8_t *group, int i) {
        Floats two[W::STEP];
        W::weights(group, i, two);
        return _mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32((__m512i)two[0], 16), (__m512i)two[1]);
    }
};

// The same pairs, computed once, which many rows then read from the cache.
template <class W> struct KeptPairs {
    static constexpr int SIZE = W::SIZE;
    static constexpr bool IS_SCALED = W::IS_SCALED;
    static constexpr size_t HEAD = IS_SCALED ? sizeof(Floats) : 0;
    static constexpr size_t BYTES = HEAD + SIZE / 2 * sizeof(Floats);
    static Floats scale(const uint8_t *group) { return load<Floats>(group); }
    static __m512i pair(const uint8_t *group, int i) {
        return _mm512_loadu_si512(group + HEAD + i / 2 * sizeof(Floats));
    }

    static void fill(const uint8_t *block, int inputs, uint8_t *out) {
        for (int first = 0; first < inputs; first += SIZE, block += W::BYTES, out += BYTES) {
            if constexpr (IS_SCALED)
                store((float *)out, W::scale(block));
            for (int i = 0; i < SIZE; i += 2)
                _mm512_storeu_si512(out + HEAD + i / 2 * sizeof(Floats), Pairs<W>::pair(block, i));
        }
    }
};

template <class P, int N>
inline void multiply_pairs(const uint8_t *block, int inputs, const uint32_t *x, Floats (&out)[N]) {
    __m512 parts[N] = {};
    Floats sums[N] = {};
    for (int first = 0; first < inputs; first += P::SIZE, block += P::BYTES, x += P::SIZE / 2 * N) {
#pragma GCC unroll 16
        for (size_t ahead = 0; ahead < P::BYTES; ahead += 64)
            __builtin_prefetch(block + AHEAD + ahead);
        for (int i = 0; i < P::SIZE; i += 2) {
            const __m512bh pair = (__m512bh)P::pair(block, i);
#pragma GCC unroll 8
            for (int n = 0; n < N; n++)
                parts[n] = _mm512_dpbf16_ps(parts[n], pair, (__m512bh)_mm512_set1_epi32(x[i / 2 * N + n]));
        }
        if constexpr (P::IS_SCALED)
#pragma GCC unroll 8
            for (int n = 0; n < N; n++) {
                sums[n] += (Floats)parts[n] * P::scale(block);
                parts[n] = __m512{};
            }
    }
    for (int n = 0; n < N; n++)
        out[n] = P::IS_SCALED ? sums[n] : (Floats)parts[n];
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
