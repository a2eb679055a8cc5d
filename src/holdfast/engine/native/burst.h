// Several tokens of several rows in one call: forwards and draws, with nothing in between.

#pragma once

#include "attention.h"
#include "sampler.h"
#include <chrono>

struct Wanted { // how the tokens of one row are drawn, and which of them end it
    uint64_t seed;
    double temperature;
    const int32_t *ends;
    int32_t num_ends;
    uint32_t choice;

    bool is_end(int32_t token) const { return token < 0 || std::find(ends, ends + num_ends, token) != ends + num_ends; }
};

// Decodes until a row ends, `max_steps` are done, or one more step would take longer than the rest of `budget_s`.
// Every row has one token, which is in `tokens`. Writes one Drawn per step and row; returns the number of steps.
template <class Decoder>
int decode_burst(Decoder &decoder, Row *rows, int num_rows, int32_t *tokens, const Wanted *wanted, int max_steps,
                 double budget_s, float *logits, Drawn *drawn) {
    using Clock = std::chrono::steady_clock;
    const auto begun = Clock::now();
    for (int step = 1;; step++) {
        decoder.forward(rows, num_rows, tokens, logits);
        bool is_over = step == max_steps;
        decoder.each_row(num_rows, [&](int r) {
            const int size = decoder.model.vocabulary;
            const Noise noise{wanted[r].seed, (uint64_t)++rows[r].start, wanted[r].choice};
            drawn[r] = draw(logits + (size_t)r * size, size, wanted[r].temperature, noise);
            tokens[r] = drawn[r].token;
        });
        for (int r = 0; r < num_rows; r++)
            is_over |= wanted[r].is_end(tokens[r]);
        drawn += num_rows;
        const double taken_s = std::chrono::duration<double>(Clock::now() - begun).count();
        if (is_over || taken_s / step * (step + 1) > budget_s)
            return step;
    }
}
