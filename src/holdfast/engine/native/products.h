// Products of rows with matrices, computed by all threads.

#pragma once

#include <vector>

#include "integers.h"
#include "pairs.h"
#include "pool.h"

// The 16 values of a block, of which only those are there that are outputs.
inline Floats get(const float *row, int outputs, int block) {
    const int first = block * LANES;
    if (first + LANES <= outputs)
        return load<Floats>(row + first);
    Floats found{};
    std::memcpy(&found, row + first, std::max(0, outputs - first) * sizeof(float));
    return found;
}

inline void put(float *row, int outputs, int block, Floats values) {
    const int first = block * LANES;
    if (first + LANES <= outputs)
        store(row + first, values);
    else
        std::memcpy(row + first, &values, std::max(0, outputs - first) * sizeof(float));
}

class Products {
  public:
    // A row's bits do not depend on how many rows are multiplied with it, unless it `may_mix`: then activations are floats
    // with few rows and bfloat16 with many, where bfloat16 weights meet instructions for them.
    Products(Pool &shared, bool may_mix) : pool(shared), mixes(may_mix), rooms(shared.num_threads()) {}

    // to[row, output] = product
    void write(const Matrix &m, const float *x, int num, float *to, Rounding rounding = Rounding::MIXED) {
        const auto keep = [&](int row, int block, Floats products) {
            put(to + (size_t)row * m.outputs, m.outputs, block, products);
        };
        each(m, x, num, keep, rounding);
    }

    // to[row, output] += product
    void add(const Matrix &m, const float *x, int num, float *to) {
        each(m, x, num, [&](int row, int block, Floats products) {
            float *at = to + (size_t)row * m.outputs;
            put(at, m.outputs, block, products + get(at, m.outputs, block));
        });
    }

    // Calls use(row, block, products) for all blocks of `m`. One thread handles the two blocks of a pair, in order.
    template <class Use>
    void each(const Matrix &m, const float *x, int num, Use &&use, Rounding rounding = Rounding::MIXED) {
        constexpr size_t PIECE = 1 << 16; // bytes of weights in one piece of work, where reading them takes longest
        const size_t stride = block_bytes(m.kind, m.inputs);
        const int pairs = m.num_blocks / 2;
        const int fair = std::max(1, pairs / (6 * pool.num_threads()));
        const int size = num > ALONE ? 1 : std::clamp((int)(PIECE / (2 * stride)), 1, fair);
        with_kind(m.kind, [&](auto w) {
            using W = typename decltype(w)::type;
            const Input input = interleaved<W>(m.inputs, x, num, rounding);
            pool.run((pairs + size - 1) / size, [&](int piece, int thread) {
                for (int block = 2 * piece * size; block < 2 * std::min(pairs, (piece + 1) * size); block += 2)
                    multiply_pair<W>(m.blocks + block * stride, stride, block, m.inputs, input, rooms[thread], use);
            });
        });
    }

  private:
    Pool &pool;
    const bool mixes;
    std::vector<std::vector<uint8_t>> rooms; // each thread's memory for converted weights
    std::vector<uint8_t> rows_beside;        // the interleaved input of a product

    enum class Form { FLOATS, PAIRS, INTEGERS };

    // The input of one product, with interleaved rows.
    struct Input {
        Form form;
        const uint8_t *rows;
        int num;
    };

    template <class W> Form form_of(int num) const {
        if (HAS_INTEGERS && IS_INTEGER<W>)
            return Form::INTEGERS;
        return HAS_PAIRS && mixes && std::is_same_v<W, Bfloat16> && num > FEW ? Form::PAIRS : Form::FLOATS;
    }

    template <class W> Input interleaved(int inputs, const float *x, int num, Rounding rounding) {
        const Form form = form_of<W>(num);
        if (num == 1 && form == Form::FLOATS)
            return {form, (const uint8_t *)x, num};
        const bool is_integer = form == Form::INTEGERS;
        const int tile = is_integer ? tile_rows(num) : ROWS, num_tiles = (num + tile - 1) / tile;
        rows_beside.resize(is_integer ? tile_bytes<W>(num, inputs) : (size_t)num * inputs * sizeof(float));
        // The groups of a single tile are divided among the threads.
        const int shares = is_integer && num_tiles == 1 && num > 1 ? pool.num_threads() : 1, groups = inputs / GROUP;
        pool.run(num_tiles * shares, [&](int piece, int) {
            const int first = piece / shares * tile, size = std::min(tile, num - first), share = piece % shares;
            const float *from = x + (size_t)first * inputs;
            if constexpr (IS_INTEGER<W>)
                if (is_integer) {
                    const int begin = groups * share / shares, end = groups * (share + 1) / shares;
                    uint8_t *to = &rows_beside[tile_bytes<W>(first, inputs)];
                    return interleave_integers<W>(from, size, inputs, rounding, begin, end, to);
                }
            if (form == Form::PAIRS)
                return interleave_pairs(from, size, inputs, (uint32_t *)rows_beside.data() + (size_t)first * inputs / 2);
            interleave(from, size, inputs, (float *)rows_beside.data() + (size_t)first * inputs);
        });
        return {form, rows_beside.data(), num};
    }

    // Both blocks of a pair. For many rows, weights of floats are first converted to the form that multiplies fastest.
    template <class W, class Use>
    static void multiply_pair(const uint8_t *blocks, size_t stride, int number, int inputs, Input x,
                              std::vector<uint8_t> &room, Use &&use) {
#if defined(__AVX2__)
        if constexpr (IS_INTEGER<W>) {
            multiply_integers<W>(blocks, stride, number, inputs, x.rows, x.num, use);
            return;
        }
#endif
#if defined(__AVX512BF16__)
        if constexpr (std::is_same_v<W, Bfloat16>)
            if (x.form == Form::PAIRS) {
                const uint32_t *rows = (const uint32_t *)x.rows;
                if (x.num > ROWS)
                    multiply_paired_rows<2>(blocks, stride, number, inputs, rows, x.num, use);
                else // the weights come from memory, and in their order they come fastest
                    for (int block = 0; block < 2; block++)
                        multiply_paired_rows<1>(blocks + block * stride, stride, number + block, inputs, rows, x.num, use);
                return;
            }
#endif
        for (int block = number; block < number + 2; block++, blocks += stride) {
            const auto keep = [&](int row, Floats products) { use(row, block, products); };
            const float *rows = (const float *)x.rows;
            if (x.num <= ROWS || std::is_same_v<W, Float32>) {
                multiply_rows<W>(blocks, inputs, rows, x.num, keep);
                continue;
            }
            room.resize(inputs / W::SIZE * Expanded<W>::BYTES);
            Expanded<W>::fill(blocks, inputs, room.data());
            multiply_rows<Expanded<W>>(room.data(), inputs, rows, x.num, keep);
        }
    }
};
