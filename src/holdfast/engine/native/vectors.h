// Vectors of 16 floats in the compiler's vector types, and functions of them. One source for every instruction set.
// Where registers are shorter, compilers keep such vectors in memory, so innermost loops use vectors of a register's
// size.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>
#if defined(__F16C__)
#include <immintrin.h>
#endif

constexpr int LANES = 16;

#if defined(__AVX512F__)
constexpr int NATIVE = 16; // 32-bit lanes of a vector register
#elif defined(__AVX2__)
constexpr int NATIVE = 8;
#else
constexpr int NATIVE = 4;
#endif

typedef float NativeFloats __attribute__((vector_size(4 * NATIVE)));
typedef int32_t NativeInts __attribute__((vector_size(4 * NATIVE)));

typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32)));
typedef int16_t Words __attribute__((vector_size(32)));

template <class V> inline V load(const void *from) {
    V value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

inline void store(float *to, Floats value) { std::memcpy(to, &value, sizeof value); }

inline void store_native(float *to, NativeFloats value) { std::memcpy(to, &value, sizeof value); }

inline Floats splat(float value) { return Floats{} + value; }

inline int padded(int size) { return (size + LANES - 1) / LANES * LANES; }

inline Floats from_bfloat16(const void *from) {
#if defined(__AVX512F__)
    return (Floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from)), 16);
#else
    return (Floats)(__builtin_convertvector(load<Halves>(from), Ints) << 16);
#endif
}

inline uint16_t to_bfloat16(float value) { // rounds to nearest, ties to even
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline Floats from_half(const uint16_t *from) {
#if defined(__AVX512F__)
    return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from));
#elif defined(__F16C__)
    float out[LANES];
    _mm256_storeu_ps(out, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from)));
    _mm256_storeu_ps(out + 8, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(from + 8))));
    return load<Floats>(out);
#else
    Ints bits = __builtin_convertvector(load<Halves>(from), Ints);
    Floats size = (Floats)((bits & 0x7fff) << 13) * 5.192296858534828e33f; // 2^112 corrects the exponent
    return (Floats)((Ints)size | ((bits & 0x8000) << 16));
#endif
}

inline Floats chosen(Ints where, Floats yes, Floats no) { return (Floats)((where & (Ints)yes) | (~where & (Ints)no)); }

inline Floats larger(Floats a, Floats b) { return chosen(a > b, a, b); }

constexpr float WHOLE = 12582912.0f; // 1.5 * 2^23: a sum with it is a whole number, which is in the lowest bits

// e^x with an error of at most 2 units in the last place; exactly 0 below -87.
inline Floats exponential(Floats x) {
    const Floats low = splat(-87.0f), high = splat(88.0f);
    const Floats bounded = chosen(x > high, high, larger(x, low));
    const Floats shifted = bounded * 1.44269504f + WHOLE;
    const Floats whole = shifted - WHOLE;
    const Floats rest = (bounded - whole * 0.693359375f) + whole * 2.12194440e-4f; // ln 2, split into two parts
    Floats sum = splat(1.9875691500e-4f);
    for (float next : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
        sum = sum * rest + next;
    sum = sum * rest * rest + rest + 1.0f;
    return chosen(x < low, Floats{}, sum * (Floats)(((Ints)shifted << 23) + (127 << 23)));
}

inline float exponential(float x) { return exponential(splat(x))[0]; }

// The source of lane `lane` of a first half, in spans of 2 * W lanes: a lane of `a`, or LANES plus a lane of `b`.
template <int W> constexpr int first_half(int lane) {
    const int span = lane / (2 * W) * (2 * W), at = lane % (2 * W);
    return at < W ? span + at : LANES + span + at - W;
}

// In every span of 2 * W lanes: the sum of the two halves of `a`, then the sum of the two halves of `b`.
template <int W> inline Floats halved(Floats a, Floats b) {
    return [&]<int... L>(std::integer_sequence<int, L...>) {
#if defined(__clang__) || __GNUC__ >= 12
        return __builtin_shufflevector(a, b, first_half<W>(L)...) +
               __builtin_shufflevector(a, b, (first_half<W>(L) + W)...);
#else
        return __builtin_shuffle(a, b, Ints{first_half<W>(L)...}) +
               __builtin_shuffle(a, b, Ints{(first_half<W>(L) + W)...});
#endif
    }(std::make_integer_sequence<int, LANES>{});
}

inline float sum_of(Floats v) {
    v = halved<8>(v, v);
    v = halved<4>(v, v);
    v = halved<2>(v, v);
    return halved<1>(v, v)[0];
}

inline float largest_of(Floats v) {
    float best = v[0];
    for (int lane = 1; lane < LANES; lane++)
        best = std::max(best, (float)v[lane]);
    return best;
}

inline int32_t largest_of(Ints v) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_epi32((__m512i)v);
#else
    int32_t best = v[0];
    for (int lane = 1; lane < LANES; lane++)
        best = std::max(best, (int32_t)v[lane]);
    return best;
#endif
}

inline bool any(Ints v) {
#if defined(__AVX512F__)
    return _mm512_test_epi32_mask((__m512i)v, (__m512i)v);
#else
    int32_t found = 0;
    for (int lane = 0; lane < LANES; lane++)
        found |= v[lane];
    return found;
#endif
}

inline int32_t sum_of(Ints v) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_epi32((__m512i)v);
#else
    int32_t sum = 0;
    for (int lane = 0; lane < LANES; lane++)
        sum += v[lane];
    return sum;
#endif
}

// The lowest byte of every lane.
inline void store_bytes(void *to, Ints v) {
#if defined(__AVX512F__)
    _mm_storeu_si128((__m128i *)to, _mm512_cvtepi32_epi8((__m512i)v));
#else
    for (int lane = 0; lane < LANES; lane++)
        ((int8_t *)to)[lane] = (int8_t)v[lane];
#endif
}

// out = x / rms(x) * weight
inline void normalise(const float *x, const float *weight, int size, float epsilon, float *out) {
    Floats squares{};
    int i = 0;
    for (; i + LANES <= size; i += LANES)
        squares += load<Floats>(x + i) * load<Floats>(x + i);
    float sum = sum_of(squares);
    for (; i < size; i++)
        sum += x[i] * x[i];
    const float scale = 1.0f / std::sqrt(sum / size + epsilon);
    for (int j = 0; j < size; j++)
        out[j] = x[j] * scale * weight[j];
}
