// Products of integers, on processors with AVX2 or more. The products of a group are summed exactly, so a row's bits
// depend neither on how many are multiplied with it nor on the instructions.

#pragma once

#include "activations.h"

#if defined(__AVX2__)

// --- Vectors with four inputs of WIDTH outputs. A block has COLUMNS of them side by side.

#if defined(__AVX512BW__)
constexpr int WIDTH = 16;
typedef __m512i Vector;
inline Vector load_vector(const uint8_t *from) { return _mm512_loadu_si512(from); }
inline Vector spread(uint32_t quad) { return _mm512_set1_epi32(quad); }
template <int BITS> inline Vector words_down(Vector v) { return _mm512_srli_epi16(v, BITS); }
inline Vector even_bytes(Vector v) { return _mm512_srai_epi16(_mm512_slli_epi16(v, 8), 8); }
inline Vector odd_bytes(Vector v) { return _mm512_srai_epi16(v, 8); }
inline Vector pairs_of_words(Vector a, Vector b) { return _mm512_madd_epi16(a, b); }
inline Vector pairs_of_bytes(Vector a, Vector b) { return _mm512_maddubs_epi16(a, b); }
inline __m512 wide_from_half(const uint16_t *from) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from)); }
#else
constexpr int WIDTH = 8;
typedef __m256i Vector;
inline Vector load_vector(const uint8_t *from) { return _mm256_loadu_si256((const __m256i *)from); }
inline Vector spread(uint32_t quad) { return _mm256_set1_epi32(quad); }
template <int BITS> inline Vector words_down(Vector v) { return _mm256_srli_epi16(v, BITS); }
inline Vector even_bytes(Vector v) { return _mm256_srai_epi16(_mm256_slli_epi16(v, 8), 8); }
inline Vector odd_bytes(Vector v) { return _mm256_srai_epi16(v, 8); }
inline Vector pairs_of_words(Vector a, Vector b) { return _mm256_madd_epi16(a, b); }
inline Vector pairs_of_bytes(Vector a, Vector b) { return _mm256_maddubs_epi16(a, b); }
inline __m256 wide_from_half(const uint16_t *from) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from)); }
#endif

constexpr int COLUMNS = LANES / WIDTH;
typedef float WideFloats __attribute__((vector_size(WIDTH * 4)));
typedef int32_t WideInts __attribute__((vector_size(WIDTH * 4)));

// Each lane's sum plus the products of its four bytes without a sign with four bytes with one.
inline WideInts add_bytes(WideInts sum, Vector unsigned_bytes, uint32_t bytes) {
#if defined(__AVX512VNNI__)
    return (WideInts)_mm512_dpbusd_epi32((__m512i)sum, unsigned_bytes, spread(bytes));
#elif defined(__AVXVNNI__)
    return (WideInts)_mm256_dpbusd_avx_epi32((__m256i)sum, unsigned_bytes, spread(bytes));
#else
    return sum + (WideInts)pairs_of_words(pairs_of_bytes(unsigned_bytes, spread(bytes)), (Vector)(WideInts{} + 0x10001));
#endif
}

// Each lane's sum plus the products of its two words with the two others.
inline WideInts add_words(WideInts sum, Vector weights, uint32_t words) {
#if defined(__AVX512VNNI__)
    return (WideInts)_mm512_dpwssd_epi32((__m512i)sum, weights, spread(words));
#elif defined(__AVXVNNI__)
    return (WideInts)_mm256_dpwssd_avx_epi32((__m256i)sum, weights, spread(words));
#else
    return sum + (WideInts)pairs_of_words(weights, spread(words));
#endif
}

// How weights of a kind are read and multiplied.
template <class W> struct Weights {
    Vector nibbles;

    Weights() = default;
    Weights(const uint8_t *group, int quad, int lane) {
        const Vector both = load_vector(group + W::HEAD + 4 * (quad % (QUADS / 2) * LANES + lane));
        nibbles = (quad < QUADS / 2 ? both : words_down<4>(both)) & (Vector)(WideInts{} + 0x0f0f0f0f);
    }

    WideInts add_to(WideInts sum, QuadOfBytes quad) const { return add_bytes(sum, nibbles, quad); }
};

template <> struct Weights<Int8> {
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
    Vector shifted; // by 128: the first factors of products of bytes have no sign

    Weights() = default;
    Weights(const uint8_t *group, int quad, int lane) {
        shifted = load_vector(group + Int8::HEAD + 4 * (quad * LANES + lane)) ^ (Vector)(WideInts{} + 0x80808080);
    }

    WideInts add_to(WideInts sum, QuadOfBytes quad) const { return add_bytes(sum, shifted, quad); }
#else
    Vector even, odd;

    Weights() = default;
    Weights(const uint8_t *group, int quad, int lane) {
        const Vector all = load_vector(group + Int8::HEAD + 4 * (quad * LANES + lane));
        even = even_bytes(all);
        odd = odd_bytes(all);
    }

    WideInts add_to(WideInts sum, QuadOfWords quad) const {
        return add_words(add_words(sum, even, quad.even), odd, quad.odd);
    }
#endif
};

// Add the products of a group: those of NUM of the N rows, from FIRST on, with C columns.
template <class W, int N, int C, int FIRST, int NUM>
inline void add_quads(const uint8_t *const (&at)[C], int column, const Quad<W> *quads, WideInts (&parts)[N][C]) {
#pragma GCC unroll 8
    for (int quad = 0; quad < QUADS; quad++) {
        Weights<W> weights[C];
#pragma GCC unroll 2
        for (int c = 0; c < C; c++)
            weights[c] = Weights<W>(at[c], quad, (column + c) % COLUMNS * WIDTH);
#pragma GCC unroll 8
        for (int n = FIRST; n < FIRST + NUM; n++)
#pragma GCC unroll 2
            for (int c = 0; c < C; c++)
                parts[n][c] = weights[c].add_to(parts[n][c], quads[quad * N + n]);
    }
}

// Add the products of the low bytes, for each part that has them.
template <class W, int N, int C, int FIRST = 0>
inline void add_low(const uint8_t *const (&at)[C], int column, TileGroup<W> rows, WideInts (&parts)[N][C]) {
    constexpr int NUM = std::min(PART, N - FIRST);
    if (rows.has_low()[FIRST]) {
#pragma GCC unroll 8
        for (int n = FIRST; n < FIRST + NUM; n++)
#pragma GCC unroll 2
            for (int c = 0; c < C; c++)
                parts[n][c] = (parts[n][c] << 8) + rows.low_starts()[n];
        add_quads<W, N, C, FIRST, NUM>(at, column, rows.low(), parts);
    }
    if constexpr (FIRST + NUM < N)
        add_low<W, N, C, FIRST + NUM>(at, column, rows, parts);
}

// Whether the sums of a group do not start at 0: weights are multiplied plus 8 or 128.
template <class W> constexpr bool HAS_STARTS = IS_SPLIT<W> || (IS_INT4<W> && !HAS_OFFSETS<W>);

// N rows times C columns from `block` on: [row][column] vectors of WIDTH products.
template <class W, int N, int C>
inline void multiply_columns(const uint8_t *block, size_t stride, int column, int inputs, const uint8_t *x,
                             WideFloats (&out)[N][C]) {
    const uint8_t *at[C];
    for (int c = 0; c < C; c++)
        at[c] = block + (column + c) / COLUMNS * stride;
    WideFloats sums[N][C] = {};
    for (int first = 0; first < inputs; first += GROUP, x += TileGroup<W>::bytes(N)) {
        const TileGroup<W> rows{(uint8_t *)x, N};
        WideInts parts[N][C] = {};
        if constexpr (HAS_STARTS<W>)
#pragma GCC unroll 8
            for (int n = 0; n < N; n++)
#pragma GCC unroll 2
                for (int c = 0; c < C; c++)
                    parts[n][c] = WideInts{} + rows.starts()[n];
        add_quads<W, N, C, 0, N>(at, column, rows.quads(), parts);
        if constexpr (IS_SPLIT<W>)
            add_low<W, N, C>(at, column, rows, parts);
#pragma GCC unroll 2
        for (int c = 0; c < C; c++) {
            const int lane = (column + c) % COLUMNS * WIDTH;
            const WideFloats scale = (WideFloats)wide_from_half((const uint16_t *)at[c] + lane);
#pragma GCC unroll 8
            for (int n = 0; n < N; n++)
                sums[n][c] += __builtin_convertvector(parts[n][c], WideFloats) * (scale * rows.scales()[n]);
            if constexpr (HAS_OFFSETS<W>) {
                const WideFloats offset = (WideFloats)wide_from_half((const uint16_t *)at[c] + LANES + lane);
#pragma GCC unroll 8
                for (int n = 0; n < N; n++)
                    sums[n][c] += offset * rows.totals()[n];
            }
#pragma GCC unroll 16
            for (size_t ahead = 0; ahead < W::BYTES; ahead += 64)
                __builtin_prefetch(at[c] + AHEAD + ahead, 0, 0);
            at[c] += W::BYTES;
        }
    }
    for (int n = 0; n < N; n++)
        for (int c = 0; c < C; c++)
            out[n][c] = sums[n][c];
}

// N rows times two blocks, of which C columns are read at a time: [row] the products of both.
template <class W, int N, int C>
inline void multiply_blocks(const uint8_t *blocks, size_t stride, int inputs, const uint8_t *x, Floats (&out)[N][2]) {
    for (int column = 0; column < 2 * COLUMNS; column += C) {
        WideFloats some[N][C];
        multiply_columns<W, N, C>(blocks, stride, column, inputs, x, some);
        for (int n = 0; n < N; n++)
            std::memcpy((WideFloats *)out[n] + column, some[n], sizeof some[n]);
    }
}

// Calls use(row, block, products) for `num` interleaved rows and the two blocks of a pair, from number `number` on. The
// first is used before the second.
template <class W, class Use>
inline void multiply_integers(const uint8_t *blocks, size_t stride, int number, int inputs, const uint8_t *x, int num,
                              Use &&use) {
    const auto multiply_tile = [&]<int N, int C>(int first) {
        Floats products[N][2];
        multiply_blocks<W, N, C>(blocks, stride, inputs, x + tile_bytes<W>(first, inputs), products);
        for (int n = 0; n < N; n++)
            for (int block = 0; block < 2; block++)
                use(first + n, number + block, products[n][block]);
    };
    if (num <= ALONE) // the weights come from memory, and in their order they come fastest
        in_tiles<ALONE>(num, [&]<int N>(int first) { multiply_tile.template operator()<N, COLUMNS>(first); });
    else
        in_tiles<TILE>(num, [&]<int N>(int first) { multiply_tile.template operator()<N, 2>(first); });
}

#endif
