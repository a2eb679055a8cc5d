// Products of rows with matrices, computed by all threads.

#pragma once

#include <vector>

#include "pairs.h"
#include "pool.h"

class Products {
  public:
    // `exact`: a row's bits do not depend on how many rows are multiplied with it.
    Products(Pool &shared, bool exact) : pool(shared), is_exact(exact), rooms(shared.num_threads()) {}

    // to[row, output] = product
    void write(const Matrix &m, const float *x, int num, float *to) {
        each(m, x, num, [&](int row, int block, Floats products) {
            float *at = to + (size_t)row * m.outputs;
            outputs(m, block, products, [&](int output, float value) { at[output] = value; });
        });
    }

    // to[row, output] += product
    void add(const Matrix &m, const float *x, int num, float *to) {
        each(m, x, num, [&](int row, int block, Floats products) {
            float *at = to + (size_t)row * m.outputs;
            outputs(m, block, products, [&](int output, float value) { at[output] += value; });
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
                for (int block = 2 * piece * size; block < 2 * std::min(pairs, (piece + 1) * size); block++)
                    multiply_block<W>(m.blocks + block * stride, m.inputs, input, rooms[thread],
                                      [&](int row, Floats products) { use(row, block, products); });
            });
        });
    }

  private:
    Pool &pool;
    const bool is_exact;
    std::vector<std::vector<uint8_t>> rooms; // each thread's memory for converted weights
    std::vector<float> rows_beside;          // the interleaved input of a product

    // The input of one product, with interleaved rows.
    struct Input {
        const float *floats;
        const uint32_t *pairs; // or null
        int num;
    };

    Input interleaved(const Matrix &m, const float *x, int num) {
        if (num == 1)
            return {x, nullptr, num};
        const bool is_paired = HAS_PAIRS && !is_exact && num > FEW && m.kind != FLOAT32;
        rows_beside.resize((size_t)num * m.inputs);
        pool.run((num + ROWS - 1) / ROWS, [&](int tile, int) {
            const size_t at = (size_t)tile * ROWS * m.inputs;
            const int size = std::min(ROWS, num - tile * ROWS);
            if (is_paired)
                interleave_pairs(x + at, size, m.inputs, (uint32_t *)rows_beside.data() + at / 2);
            else
                interleave(x + at, size, m.inputs, &rows_beside[at]);
        });
        return {rows_beside.data(), is_paired ? (uint32_t *)rows_beside.data() : nullptr, num};
    }

    // For many rows, the weights are first converted to the form that multiplies fastest.
    template <class W, class Use>
    static void multiply_block(const uint8_t *block, int inputs, Input x, std::vector<uint8_t> &room, Use &&use) {
#if defined(__AVX512BF16__)
        if (x.pairs) {
            if (x.num <= ROWS) {
                multiply_paired_rows<Pairs<W>>(block, inputs, x.pairs, x.num, use);
                return;
            }
            room.resize(inputs / W::GROUP * KeptPairs<W>::BYTES);
            KeptPairs<W>::fill(block, inputs, room.data());
            multiply_paired_rows<KeptPairs<W>>(room.data(), inputs, x.pairs, x.num, use);
            return;
        }
#endif
        if (x.num <= ROWS || std::is_same_v<W, Float32>) {
            multiply_rows<W>(block, inputs, x.floats, x.num, use);
            return;
        }
        room.resize(inputs / W::GROUP * Expanded<W>::BYTES);
        Expanded<W>::fill(block, inputs, room.data());
        multiply_rows<Expanded<W>>(room.data(), inputs, x.floats, x.num, use);
    }

    // Calls put(output, value) for those of a block's 16 products that are outputs.
    template <class Put> static void outputs(const Matrix &m, int block, Floats products, Put &&put) {
        const int first = block * LANES;
        if (first + LANES <= m.outputs) {
            for (int lane = 0; lane < LANES; lane++)
                put(first + lane, products[lane]);
            return;
        }
        for (int lane = 0; lane < m.outputs - first; lane++)
            put(first + lane, products[lane]);
    }
};
