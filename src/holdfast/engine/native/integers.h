// Products of integers, on processors with AVX2 or more. Activations are rounded in groups of 32 with a scale each: to
// 16 bits for weights of eight bits, to eight bits for weights of four. The products of a group are summed exactly, so
// a row's bits depend neither on how many are multiplied with it nor on the instructions.

#pragma once

#include "weights.h"

#if defined(__AVX2__)
constexpr bool HAS_INTEGERS = true;
#else
constexpr bool HAS_INTEGERS = false;
#endif

// --- Activations

constexpr int QUADS = GROUP / 4; // of the inputs of a group: four are multiplied at a time

// How the activations of four inputs are stored: as bytes; or as words, the first and the third, then the others.
typedef uint32_t QuadOfBytes;
struct QuadOfWords {
    uint32_t even, odd;
};

template <class W> using Quad = std::conditional_t<IS_INT4<W>, QuadOfBytes, QuadOfWords>;

template <class W> constexpr float MOST = IS_INT4<W> ? 127.0f : 32767.0f; // the largest rounded value

#if defined(__AVX512BW__)
constexpr int TILE = 8; // rows that are multiplied while the weights are read once
#else
constexpr int TILE = 4;
#endif

// A tile of rows: for every group its quads, of each quad all rows side by side; then the scales of the rows, then the
// sums of their values.
template <class W> inline size_t tile_bytes(int num, int inputs) {
    return (size_t)num * (inputs / GROUP) * (QUADS * sizeof(Quad<W>) + sizeof(float) + sizeof(int32_t));
}

// The quads of 32 values, their scale and their sum. Where a value is not finite, the scale is not either.
template <class W> inline void round_group(const float *x, Quad<W> (&quads)[QUADS], float &scale, int32_t &sum) {
    const Floats first = load<Floats>(x), second = load<Floats>(x + LANES);
    const Ints one = (Ints)first & 0x7fffffff, other = (Ints)second & 0x7fffffff; // sizes: ordered like integers
    const int32_t most = largest_of((one & (one > other)) | (other & ~(one > other)));
    float largest;
    std::memcpy(&largest, &most, sizeof largest);
    scale = largest / MOST<W>;
    const float inverse = largest > 1e-30f ? MOST<W> / largest : 0.0f;
    const Ints values[] = {(Ints)(first * inverse + WHOLE) << 16 >> 16, (Ints)(second * inverse + WHOLE) << 16 >> 16};
    sum = sum_of(values[0] + values[1]);
    if constexpr (IS_INT4<W>) {
        store_bytes(quads, values[0]);
        store_bytes(quads + QUADS / 2, values[1]);
    } else {
        for (int half = 0; half < 2; half++) {
            const Words words = __builtin_convertvector(values[half], Words);
#if defined(__clang__) || __GNUC__ >= 12
            const Words parted = __builtin_shufflevector(words, words, 0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15);
#else
            const Words parted = __builtin_shuffle(words, Words{0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15});
#endif
            std::memcpy(quads + half * QUADS / 2, &parted, sizeof parted);
        }
    }
}

template <class W> inline void interleave_integers(const float *x, int num, int inputs, uint8_t *out) {
    for (int first = 0; first < inputs; first += GROUP, out += tile_bytes<W>(num, GROUP)) {
        Quad<W> *quads = (Quad<W> *)out;
        float *scales = (float *)(quads + QUADS * num);
        int32_t *sums = (int32_t *)(scales + num);
        for (int n = 0; n < num; n++) {
            Quad<W> own[QUADS];
            round_group<W>(x + (size_t)n * inputs + first, own, scales[n], sums[n]);
            for (int quad = 0; quad < QUADS; quad++)
                quads[quad * num + n] = own[quad];
        }
    }
}

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

// Each lane's sum plus the products of its four nibbles with the four bytes.
inline WideInts add_bytes(WideInts sum, Vector nibbles, uint32_t bytes) {
#if defined(__AVX512VNNI__)
    return (WideInts)_mm512_dpbusd_epi32((__m512i)sum, nibbles, spread(bytes));
#elif defined(__AVXVNNI__)
    return (WideInts)_mm256_dpbusd_avx_epi32((__m256i)sum, nibbles, spread(bytes));
#else
    return sum + (WideInts)pairs_of_words(pairs_of_bytes(nibbles, spread(bytes)), (Vector)(WideInts{} + 0x10001));
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

// How weights of a kind are read and multiplied. `start` is the sum of a group in which all weights are stored as 0.
template <class W> struct Weights {
    Vector nibbles;

    Weights() = default;
    Weights(const uint8_t *group, int quad, int lane) {
        const Vector both = load_vector(group + W::HEAD + 4 * (quad % (QUADS / 2) * LANES + lane));
        nibbles = (quad < QUADS / 2 ? both : words_down<4>(both)) & (Vector)(WideInts{} + 0x0f0f0f0f);
    }

    static WideInts start(int32_t total) { return WideInts{} + (HAS_OFFSETS<W> ? 0 : -8) * total; }

    WideInts add_to(WideInts sum, QuadOfBytes quad) const { return add_bytes(sum, nibbles, quad); }
};

template <> struct Weights<Int8> {
    Vector even, odd;

    Weights() = default;
    Weights(const uint8_t *group, int quad, int lane) {
        const Vector all = load_vector(group + Int8::HEAD + 4 * (quad * LANES + lane));
        even = even_bytes(all);
        odd = odd_bytes(all);
    }

    static WideInts start(int32_t) { return WideInts{}; }

    WideInts add_to(WideInts sum, QuadOfWords quad) const {
        return add_words(add_words(sum, even, quad.even), odd, quad.odd);
    }
};

// N rows times C columns from `block` on: [row][column] vectors of WIDTH products.
template <class W, int N, int C>
inline void multiply_columns(const uint8_t *block, size_t stride, int column, int inputs, const uint8_t *x,
                             WideFloats (&out)[N][C]) {
    const uint8_t *at[C];
    for (int c = 0; c < C; c++)
        at[c] = block + (column + c) / COLUMNS * stride;
    WideFloats sums[N][C] = {};
    for (int first = 0; first < inputs; first += GROUP, x += tile_bytes<W>(N, GROUP)) {
        const Quad<W> *quads = (const Quad<W> *)x;
        const float *scales = (const float *)(quads + QUADS * N);
        const int32_t *totals = (const int32_t *)(scales + N);
        WideInts parts[N][C];
#pragma GCC unroll 8
        for (int n = 0; n < N; n++)
#pragma GCC unroll 2
            for (int c = 0; c < C; c++)
                parts[n][c] = Weights<W>::start(totals[n]);
#pragma GCC unroll 8
        for (int quad = 0; quad < QUADS; quad++) {
            Weights<W> weights[C];
#pragma GCC unroll 2
            for (int c = 0; c < C; c++)
                weights[c] = Weights<W>(at[c], quad, (column + c) % COLUMNS * WIDTH);
#pragma GCC unroll 8
            for (int n = 0; n < N; n++)
#pragma GCC unroll 2
                for (int c = 0; c < C; c++)
                    parts[n][c] = weights[c].add_to(parts[n][c], quads[quad * N + n]);
        }
#pragma GCC unroll 2
        for (int c = 0; c < C; c++) {
            const int lane = (column + c) % COLUMNS * WIDTH;
            const WideFloats scale = (WideFloats)wide_from_half((const uint16_t *)at[c] + lane);
#pragma GCC unroll 8
            for (int n = 0; n < N; n++)
                sums[n][c] += __builtin_convertvector(parts[n][c], WideFloats) * (scale * scales[n]);
            if constexpr (HAS_OFFSETS<W>) {
                const WideFloats offset = (WideFloats)wide_from_half((const uint16_t *)at[c] + LANES + lane);
#pragma GCC unroll 8
                for (int n = 0; n < N; n++)
                    sums[n][c] += offset * (scales[n] * (float)totals[n]);
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
    in_tiles<TILE>(num, [&]<int N>(int first) {
        const uint8_t *rows = x + tile_bytes<W>(first, inputs);
        Floats products[N][2];
        if (num <= TILE) // the weights come from memory, and in their order they come fastest
            multiply_blocks<W, N, COLUMNS>(blocks, stride, inputs, rows, products);
        else
            multiply_blocks<W, N, 2>(blocks, stride, inputs, rows, products);
        for (int n = 0; n < N; n++)
            for (int block = 0; block < 2; block++)
                use(first + n, number + block, products[n][block]);
    });
}

#endif
