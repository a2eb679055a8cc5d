// Products with activations rounded to int8, in groups of 32 with a scale each, on processors with AVX2 or more. The
// bytes of a group are summed as integers, exactly, so a row's bits do not depend on how many are multiplied with it.

#pragma once

#include "weights.h"

#if defined(__AVX2__)
constexpr bool HAS_BYTES = true;
#else
constexpr bool HAS_BYTES = false;
#endif

#if defined(__AVX512VNNI__)
constexpr int BYTE_ROWS = 8; // rows that are multiplied while the weights are read once
#else
constexpr int BYTE_ROWS = 4;
#endif

// --- Activations

constexpr int QUADS = GROUP / 4; // of the inputs of a group: four are multiplied at a time

// A tile of rows: for every group its quads, of each quad all rows side by side; then the scales of the rows, then the
// sums of their bytes.
inline size_t tile_bytes(int num, int inputs) { return (size_t)num * (inputs / GROUP) * (GROUP + 8); }

// The bytes of 32 values, their scale and their sum. Where a value is not finite, the scale is not either.
inline void round_group(const float *x, int8_t (&bytes)[GROUP], float &scale, int32_t &sum) {
    constexpr float SHIFT = 12582912.0f; // 1.5 * 2^23: a value that is added to it is rounded to a whole number
    const Floats first = load<Floats>(x), second = load<Floats>(x + LANES);
    const Ints one = (Ints)first & 0x7fffffff, other = (Ints)second & 0x7fffffff; // sizes: ordered like integers
    const int32_t most = largest_of((one & (one > other)) | (other & ~(one > other)));
    float largest;
    std::memcpy(&largest, &most, sizeof largest);
    scale = largest / 127.0f;
    const float inverse = largest > 1e-30f ? 127.0f / largest : 0.0f;
    const Ints low = (Ints)(first * inverse + SHIFT), high = (Ints)(second * inverse + SHIFT);
    store_bytes(bytes, low);
    store_bytes(bytes + LANES, high);
    sum = sum_of((low << 24 >> 24) + (high << 24 >> 24));
}

inline void interleave_bytes(const float *x, int num, int inputs, uint8_t *out) {
    for (int first = 0; first < inputs; first += GROUP, out += (size_t)num * (GROUP + 8)) {
        uint32_t *quads = (uint32_t *)out;
        float *scales = (float *)(quads + QUADS * num);
        int32_t *sums = (int32_t *)(scales + num);
        for (int n = 0; n < num; n++) {
            int8_t bytes[GROUP];
            round_group(x + (size_t)n * inputs + first, bytes, scales[n], sums[n]);
            for (int quad = 0; quad < QUADS; quad++)
                quads[quad * num + n] = load<uint32_t>(bytes + quad * 4);
        }
    }
}

#if defined(__AVX2__)

// --- Weights: a vector has four inputs of WIDTH outputs. A block has COLUMNS of them side by side.

#if defined(__AVX512BW__)
constexpr int WIDTH = 16;
typedef __m512i Weights;
inline Weights load_weights(const uint8_t *from) { return _mm512_loadu_si512(from); }
inline Weights low_nibbles(Weights w) { return _mm512_and_si512(w, _mm512_set1_epi8(15)); }
inline Weights high_nibbles(Weights w) { return low_nibbles(_mm512_srli_epi16(w, 4)); }
inline __m512 wide_from_half(const uint16_t *from) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from)); }
#else
constexpr int WIDTH = 8;
typedef __m256i Weights;
inline Weights load_weights(const uint8_t *from) { return _mm256_loadu_si256((const __m256i *)from); }
inline Weights low_nibbles(Weights w) { return _mm256_and_si256(w, _mm256_set1_epi8(15)); }
inline Weights high_nibbles(Weights w) { return low_nibbles(_mm256_srli_epi16(w, 4)); }
inline __m256 wide_from_half(const uint16_t *from) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from)); }
#endif

constexpr int COLUMNS = LANES / WIDTH;
typedef float WideFloats __attribute__((vector_size(WIDTH * 4)));
typedef int32_t WideInts __attribute__((vector_size(WIDTH * 4)));

// The instructions multiply unsigned bytes by signed ones. Where they cannot overflow, 128 is added to int8 weights and
// 128 times the sum of the activations taken off again; else the activations get the sign of the weights.
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
constexpr bool IS_SHIFTED = true;
#else
constexpr bool IS_SHIFTED = false;
#endif

// Each lane's sum plus the products of its four weights, 0 to 255, with the four activations.
inline WideInts dot(WideInts sum, Weights weights, uint32_t quad) {
#if defined(__AVX512VNNI__)
    return (WideInts)_mm512_dpbusd_epi32((__m512i)sum, weights, _mm512_set1_epi32(quad));
#elif defined(__AVXVNNI__)
    return (WideInts)_mm256_dpbusd_avx_epi32((__m256i)sum, weights, _mm256_set1_epi32(quad));
#elif defined(__AVX512BW__)
    const __m512i pairs = _mm512_maddubs_epi16(weights, _mm512_set1_epi32(quad));
    return sum + (WideInts)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
#else
    const __m256i pairs = _mm256_maddubs_epi16(weights, _mm256_set1_epi32(quad));
    return sum + (WideInts)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#endif
}

// The same with weights from -127 to 127.
inline WideInts signed_dot(WideInts sum, Weights weights, uint32_t quad) {
#if defined(__AVX512BW__)
    if constexpr (IS_SHIFTED)
        return dot(sum, _mm512_xor_si512(weights, _mm512_set1_epi8((char)128)), quad);
    const __m512i all = _mm512_set1_epi32(quad);
    const __m512i pairs = _mm512_maddubs_epi16(
        _mm512_abs_epi8(weights), _mm512_mask_sub_epi8(all, _mm512_movepi8_mask(weights), _mm512_setzero_si512(), all));
    return sum + (WideInts)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
#else
    if constexpr (IS_SHIFTED)
        return dot(sum, _mm256_xor_si256(weights, _mm256_set1_epi8((char)128)), quad);
    const __m256i pairs =
        _mm256_maddubs_epi16(_mm256_abs_epi8(weights), _mm256_sign_epi8(_mm256_set1_epi32(quad), weights));
    return sum + (WideInts)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#endif
}

template <class W> constexpr bool IS_OFFSET = std::is_same_v<W, Int4<true>>;

// A vector of one quad of a group.
template <class W> inline Weights weights_of(const uint8_t *group, int quad, int lane) {
    const uint8_t *from = group + W::HEAD + 4 * lane;
    if constexpr (!IS_INT4<W>)
        return load_weights(from + quad * 4 * LANES);
    else if (quad < QUADS / 2)
        return low_nibbles(load_weights(from + quad * 4 * LANES));
    else
        return high_nibbles(load_weights(from + (quad - QUADS / 2) * 4 * LANES));
}

// N rows times C columns from `block` on: [row][column] vectors of WIDTH products.
template <class W, int N, int C>
inline void multiply_columns(const uint8_t *block, size_t stride, int column, int inputs, const uint8_t *x,
                             WideFloats (&out)[N][C]) {
    constexpr int START = IS_OFFSET<W> ? 0 : IS_INT4<W> ? -8 : IS_SHIFTED ? -128 : 0;
    const uint8_t *at[C];
    for (int c = 0; c < C; c++)
        at[c] = block + (column + c) / COLUMNS * stride;
    WideFloats sums[N][C] = {};
    for (int first = 0; first < inputs; first += GROUP, x += (size_t)N * (GROUP + 8)) {
        const uint32_t *quads = (const uint32_t *)x;
        const float *scales = (const float *)(quads + QUADS * N);
        const int32_t *totals = (const int32_t *)(scales + N);
        WideInts parts[N][C];
#pragma GCC unroll 8
        for (int n = 0; n < N; n++)
#pragma GCC unroll 2
            for (int c = 0; c < C; c++)
                parts[n][c] = WideInts{} + START * totals[n];
#pragma GCC unroll 8
        for (int quad = 0; quad < QUADS; quad++) {
            Weights weights[C];
#pragma GCC unroll 2
            for (int c = 0; c < C; c++)
                weights[c] = weights_of<W>(at[c], quad, (column + c) % COLUMNS * WIDTH);
#pragma GCC unroll 8
            for (int n = 0; n < N; n++)
#pragma GCC unroll 2
                for (int c = 0; c < C; c++)
                    parts[n][c] = IS_INT4<W> ? dot(parts[n][c], weights[c], quads[quad * N + n])
                                             : signed_dot(parts[n][c], weights[c], quads[quad * N + n]);
        }
#pragma GCC unroll 2
        for (int c = 0; c < C; c++) {
            const int lane = (column + c) % COLUMNS * WIDTH;
            const WideFloats scale = (WideFloats)wide_from_half((const uint16_t *)at[c] + lane);
#pragma GCC unroll 8
            for (int n = 0; n < N; n++)
                sums[n][c] += __builtin_convertvector(parts[n][c], WideFloats) * (scale * scales[n]);
            if constexpr (IS_OFFSET<W>) {
                const WideFloats offset = (WideFloats)wide_from_half((const uint16_t *)at[c] + LANES + lane);
#pragma GCC unroll 8
                for (int n = 0; n < N; n++)
                    sums[n][c] += offset * (scales[n] * (float)totals[n]);
            }
#pragma GCC unroll 16
            for (size_t ahead = 0; ahead < W::BYTES; ahead += 64)
                __builtin_prefetch(at[c] + AHEAD + ahead);
            at[c] += W::BYTES;
        }
    }
    for (int n = 0; n < N; n++)
        for (int c = 0; c < C; c++)
            out[n][c] = sums[n][c];
}

// Calls use(row, block, products) for `num` interleaved rows and the two blocks of a pair, from number `number` on. The
// first is used before the second.
template <class W, class Use>
inline void multiply_bytes(const uint8_t *blocks, size_t stride, int number, int inputs, const uint8_t *x, int num,
                           Use &&use) {
    in_tiles<BYTE_ROWS>(num, [&]<int N>(int first) {
        constexpr int TOGETHER = N == 1 ? COLUMNS : 2; // one row reads one block after the other
        union {
            WideFloats columns[2 * COLUMNS];
            Floats blocks[2];
        } products[N];
        for (int column = 0; column < 2 * COLUMNS; column += TOGETHER) {
            WideFloats out[N][TOGETHER];
            multiply_columns<W, N, TOGETHER>(blocks, stride, column, inputs, x + tile_bytes(first, inputs), out);
            for (int n = 0; n < N; n++)
                for (int c = 0; c < TOGETHER; c++)
                    products[n].columns[column + c] = out[n][c];
        }
        for (int n = 0; n < N; n++)
            for (int block = 0; block < 2; block++)
                use(first + n, number + block, products[n].blocks[block]);
    });
}

#endif
