// Products of rows with matrices, computed by all threads.

#pragma once

#include <vector>

#include "bytes.h"
#include "pairs.h"
#include "pool.h"

// How activations enter the products. Those of bytes take weights in quads, the others all. A row's bits do not depend on how many rows are
// multiplied with it, unless they are MIXED: as floats with few rows, else in the form that multiplies fastest.
enum Activations : int32_t { MIXED = 0, FLOATS = 1, BYTES = 2 };

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
    Products(Pool &shared, Activations form) : pool(shared), activations(form), rooms(shared.num_threads()) {}

    // to[row, output] = product
    void write(const Matrix &m, const float *x, int num, float *to) {
        each(m, x, num, [&](int row, int block, Floats products) {
            put(to + (size_t)row * m.outputs, m.outputs, block, products);
        });
    }

    // to[row, output] += product
    void add(const Matrix &m, const float *x, int num, float *to) {
        each(m, x, num, [&](int row, int block, Floats products) {
            float *at = to + (size_t)row * m.outputs;
            put(at, m.outputs, block, products + get(at, m.outputs, block));
        });
    }

    // Calls use(row, block, products) for all blocks of `m`. One thread handles the two blocks of a pair, in order.
    template <class Use> void each(const Matrix &m, const float *x, int num, Use &&use) {
        constexpr size_t PIECE = 1 << 16; // bytes of weights in one piece of work
        const Input input = interleaved(m, x, num);
        const size_t stride = block_bytes(m.kind, m.inputs);
        const int pairs = m.num_blocks / 2;
        const int fair = std::max(1, pairs / (6 * pool.num_threads()));
        const int size = std::clamp((int)(PIECE / (2 * stride)), 1, fair);
        pool.run((pairs + size - 1) / size, [&](int piece, int thread) {
            with_kind(m.kind, [&](auto w) {
                using W = typename decltype(w)::type;
                for (int block = 2 * piece * size; block < 2 * std::min(pairs, (piece + 1) * size); block += 2)
                    multiply_pair<W>(m.blocks + block * stride, stride, block, m.inputs, input, rooms[thread], use);
            });
        });
    }

  private:
    Pool &pool;
    const Activations activations;
    std::vector<std::vector<uint8_t>> rooms; // each thread's memory for converted weights
    std::vector<uint8_t> rows_beside;        // the interleaved input of a product

    enum class Form { FLOATS, PAIRS, BYTES };

    // The input of one product, with interleaved rows.
    struct Input {
        Form form;
        const void *rows;
        int num;
    };

    Form form_of(const Matrix &m, int num) const {
        const bool is_fast = activations == MIXED && num > FEW;
        if (HAS_BYTES && activations == BYTES && m.kind > INT8)
            return Form::BYTES;
        return HAS_PAIRS && is_fast && (m.kind == BFLOAT16 || m.kind == INT8) ? Form::PAIRS : Form::FLOATS;
    }

    Input interleaved(const Matrix &m, const float *x, int num) {
        const Form form = form_of(m, num);
        if (num == 1 && form == Form::FLOATS)
            return {form, x, num};
        const int most = form == Form::BYTES ? BYTE_ROWS : ROWS;
        rows_beside.resize((size_t)num * m.inputs * sizeof(float));
        pool.run((num + most - 1) / most, [&](int tile, int) {
            const int first = tile * most, size = std::min(most, num - first);
            const float *from = x + (size_t)first * m.inputs;
            if (form == Form::BYTES)
                interleave_bytes(from, size, m.inputs, &rows_beside[tile_bytes(first, m.inputs)]);
            else if (form == Form::PAIRS)
                interleave_pairs(from, size, m.inputs, (uint32_t *)rows_beside.data() + (size_t)first * m.inputs / 2);
            else
                interleave(from, size, m.inputs, (float *)rows_beside.data() + (size_t)first * m.inputs);
        });
        return {form, rows_beside.data(), num};
    }

    // Both blocks of a pair. For many rows, weights that are not multiplied as bytes are first converted to the form that
    // multiplies fastest.
    template <class W, class Use>
    static void multiply_pair(const uint8_t *blocks, size_t stride, int number, int inputs, Input x,
                              std::vector<uint8_t> &room, Use &&use) {
#if defined(__AVX2__)
        if constexpr (IN_QUADS<W>)
            if (x.form == Form::BYTES) {
                multiply_bytes<W>(blocks, stride, number, inputs, (const uint8_t *)x.rows, x.num, use);
                return;
            }
#endif
        for (int block = number; block < number + 2; block++, blocks += stride) {
            const auto keep = [&](int row, Floats products) { use(row, block, products); };
#if defined(__AVX512BF16__)
            if constexpr (std::is_same_v<W, Bfloat16> || std::is_same_v<W, Int8>)
                if (x.form == Form::PAIRS) {
                    const uint32_t *rows = (const uint32_t *)x.rows;
                    if (x.num <= ROWS) {
                        multiply_paired_rows<Pairs<W>>(blocks, inputs, rows, x.num, keep);
                    } else {
                        room.resize(inputs / W::SIZE * KeptPairs<W>::BYTES);
                        KeptPairs<W>::fill(blocks, inputs, room.data());
                        multiply_paired_rows<KeptPairs<W>>(room.data(), inputs, rows, x.num, keep);
                    }
                    continue;
                }
#endif
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
