// Activations rounded to integers, in groups of 32 with a scale each. For weights of four bits they get eight bits. For
// weights of eight bits a group gets 16 bits if it is large beside the other groups of its row, and eight otherwise: the
// large groups make most of a product's error. How a row is rounded depends on that row alone.

#pragma once

#include "weights.h"

#if defined(__AVX2__)
constexpr bool HAS_INTEGERS = true;
#else
constexpr bool HAS_INTEGERS = false;
#endif

#if defined(__AVX512BW__)
constexpr int ALONE = 8; // so many rows are one tile at most; their weights come from memory, and are read once
constexpr int TILE = 6;  // rows of a tile where there are more: the sums of two blocks fit the registers
#else
constexpr int ALONE = 4;
constexpr int TILE = 3;
#endif
constexpr int PART = 3; // rows of a tile whose low bytes are multiplied together, or left out together

inline int tile_rows(int num) { return num <= ALONE ? ALONE : TILE; }

constexpr int QUADS = GROUP / 4; // of the inputs of a group: four are multiplied at a time

// How the activations of four inputs are stored: as bytes; or as words, the first and the third, then the others.
typedef uint32_t QuadOfBytes;
struct QuadOfWords {
    uint32_t even, odd;
};

// Words are multiplied as high and low bytes where processors have products of four bytes.
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
template <class W> constexpr bool IS_SPLIT = std::is_same_v<W, Int8>;
#else
template <class W> constexpr bool IS_SPLIT = false;
#endif

template <class W> using Quad = std::conditional_t<IS_INT4<W> || IS_SPLIT<W>, QuadOfBytes, QuadOfWords>;

constexpr float MOST_BYTE = 127.0f;
constexpr float MOST_WORD = 127.0f * 257.0f; // the high byte is 127 at most, and so is the low one
constexpr float LEAST = 1e-20f;              // a group without larger values is rounded to zeros

enum class Rounding {
    MIXED, // a group has 16 bits where the square of its largest value is above the mean of its row
    FINE,  // all groups have 16 bits
};

// One group of a tile of rows. Of each quad all rows are side by side.
template <class W> struct TileGroup {
    uint8_t *at;
    int num; // rows

    static size_t bytes(int num) {
        const size_t quads = QUADS * sizeof(Quad<W>), number = sizeof(float);
        return num * (IS_SPLIT<W> ? 2 * quads + 4 * number : quads + 2 * number);
    }

    Quad<W> *quads() const { return (Quad<W> *)at; } // of words that are split, the high bytes
    float *scales() const { return (float *)(quads() + QUADS * num); }
    float *totals() const { return scales() + num; }               // for offsets: the sums of the rounded values
    int32_t *starts() const { return (int32_t *)scales() + num; }  // otherwise: the sum to which products are added

    // Of words that are split. The first row of a part says whether the part has low bytes.
    int32_t *low_starts() const { return starts() + num; }
    int32_t *has_low() const { return low_starts() + num; }
    QuadOfBytes *low() const { return (QuadOfBytes *)(has_low() + num); }
};

template <class W> inline size_t tile_bytes(int num, int inputs) { return inputs / GROUP * TileGroup<W>::bytes(num); }

// The largest size of 32 values. NaN counts as larger than infinity.
inline float largest_size(const float *x) {
    const Ints one = load<Ints>(x) & 0x7fffffff, other = load<Ints>(x + LANES) & 0x7fffffff; // ordered like integers
    const int32_t most = largest_of((one & (one > other)) | (other & ~(one > other)));
    float largest;
    std::memcpy(&largest, &most, sizeof largest);
    return largest;
}

// The 32 values of a group as whole numbers, `most` at most.
struct Rounded {
    Ints values[2];

    Rounded(const float *x, float largest, float most) {
        const float inverse = largest > LEAST ? most / largest : 0.0f;
        for (int half = 0; half < 2; half++)
            values[half] = (Ints)(load<Floats>(x + half * LANES) * inverse + WHOLE) << 16 >> 16;
    }

    int32_t sum() const { return sum_of(values[0] + values[1]); }

    // Takes the low bytes away, -128 to 127, and returns them; what is left are the high bytes.
    Rounded split() {
        Rounded low = *this;
        for (int half = 0; half < 2; half++) {
            values[half] = (values[half] + 128) >> 8;
            low.values[half] -= values[half] << 8;
        }
        return low;
    }

    // Write the quads of row `n` of `num`.
    template <class Q> void write(Q *quads, int n, int num) const {
        Q own[QUADS];
        for (int half = 0; half < 2; half++)
            store_quads(own + half * QUADS / 2, values[half]);
        for (int quad = 0; quad < QUADS; quad++)
            quads[quad * num + n] = own[quad];
    }

  private:
    static void store_quads(QuadOfBytes *quads, Ints values) { store_bytes(quads, values); }

    static void store_quads(QuadOfWords *quads, Ints values) {
        const Words words = __builtin_convertvector(values, Words);
#if defined(__clang__) || __GNUC__ >= 12
        const Words parted = __builtin_shufflevector(words, words, 0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15);
#else
        const Words parted = __builtin_shuffle(words, Words{0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15});
#endif
        std::memcpy(quads, &parted, sizeof parted);
    }
};

// Row `n` of a group for weights of four bits.
template <class W> inline void write_bytes(const float *x, TileGroup<W> to, int n) {
    const float largest = largest_size(x), scale = largest / MOST_BYTE;
    const Rounded rounded(x, largest, MOST_BYTE);
    rounded.write(to.quads(), n, to.num);
    to.scales()[n] = scale;
    if constexpr (HAS_OFFSETS<W>)
        to.totals()[n] = scale * (float)rounded.sum();
    else
        to.starts()[n] = -8 * rounded.sum(); // nibbles are weights plus 8
}

// Row `n` of a group for weights of eight bits. All rows of a part with low bytes are in units of 1/256.
template <class W>
inline void write_words(const float *x, float largest, bool is_fine, bool has_low, TileGroup<W> to, int n) {
    const float most = is_fine ? MOST_WORD : MOST_BYTE, scale = largest / most;
    Rounded rounded(x, largest, most);
    to.scales()[n] = scale;
    if constexpr (!IS_SPLIT<W>) {
        rounded.write(to.quads(), n, to.num);
        return;
    } else {
        to.has_low()[n] = has_low;
        if (is_fine) {
            const Rounded low = rounded.split();
            low.write(to.low(), n, to.num);
            to.low_starts()[n] = -128 * low.sum(); // weights are multiplied plus 128
        } else if (has_low) {
            for (int quad = 0; quad < QUADS; quad++)
                to.low()[quad * to.num + n] = 0;
            to.low_starts()[n] = 0;
            to.scales()[n] = scale / 256.0f;
        }
        rounded.write(to.quads(), n, to.num);
        to.starts()[n] = -128 * rounded.sum();
    }
}

// Of each row of a tile, the largest square of a group of eight bits.
inline void find_limits(const float *x, int num, int inputs, float *limits) {
    for (int n = 0; n < num; n++) {
        float squares = 0;
        for (int first = 0; first < inputs; first += GROUP) {
            const float largest = largest_size(x + (size_t)n * inputs + first);
            squares += largest * largest;
        }
        limits[n] = squares / (inputs / GROUP);
    }
}

// Write the groups from number `begin` to `end` of a tile of `num` rows; `out` is where the tile begins.
template <class W>
inline void interleave_integers(const float *x, int num, int inputs, Rounding rounding, int begin, int end, uint8_t *out) {
    float limits[ALONE] = {};
    if (!IS_INT4<W> && rounding == Rounding::MIXED)
        find_limits(x, num, inputs, limits);
    for (int g = begin; g < end; g++) {
        const TileGroup<W> group{out + g * TileGroup<W>::bytes(num), num};
        const auto values = [&](int n) { return x + (size_t)n * inputs + g * GROUP; };
        if constexpr (IS_INT4<W>) {
            for (int n = 0; n < num; n++)
                write_bytes(values(n), group, n);
        } else {
            for (int first = 0; first < num; first += PART) {
                const int last = std::min(first + PART, num);
                float sizes[ALONE];
                bool is_fine[ALONE], has_low = false;
                for (int n = first; n < last; n++) {
                    sizes[n] = largest_size(values(n));
                    has_low |= is_fine[n] = sizes[n] * sizes[n] > limits[n];
                }
                for (int n = first; n < last; n++)
                    write_words(values(n), sizes[n], is_fine[n], has_low, group, n);
            }
        }
    }
}
