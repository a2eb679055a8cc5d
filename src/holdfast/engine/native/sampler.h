// Draws one token from one row of logits: the best one, or the best one after adding noise. The same draws as those of
// sampling.py, for parameters without penalties and filters.

#pragma once

#include "vectors.h"

struct Drawn {
    int32_t token; // -1: the logits are not finite
    int32_t padding;
    double logprob, sampling_logprob;
};

typedef uint64_t Longs __attribute__((vector_size(64)));

constexpr double LEAD = 3;
constexpr int SPAN = 32; // tokens whose noise is computed together: eight blocks of four

// Philox4x32-10 with the keys of sampling.py: four neighbouring tokens share a block.
struct Noise {
    uint64_t seed, position;
    uint32_t choice;

    // 23 random bits for each of the SPAN tokens from `first` on, which is a multiple of SPAN.
    void bits(int first, uint32_t (&out)[SPAN]) const {
        constexpr uint64_t LOW = 0xffffffff;
        Longs c0, c1 = Longs{} + (position & LOW), c2 = Longs{} + (position >> 32), c3 = Longs{} + choice;
        for (int i = 0; i < 8; i++)
            c0[i] = first / 4 + i;
        uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
        for (int round = 0; round < 10; round++, k0 += 0x9E3779B9, k1 += 0xBB67AE85) {
            const Longs p0 = c0 * 0xD2511F53u, p1 = c2 * 0xCD9E8D57u;
            c0 = (p1 >> 32) ^ c1 ^ k0;
            c1 = p1 & LOW;
            c2 = (p0 >> 32) ^ c3 ^ k1;
            c3 = p0 & LOW;
        }
        for (int i = 0; i < 8; i++) {
            out[4 * i] = (uint32_t)c0[i] >> 9;
            out[4 * i + 1] = (uint32_t)c1[i] >> 9;
            out[4 * i + 2] = (uint32_t)c2[i] >> 9;
            out[4 * i + 3] = (uint32_t)c3[i] >> 9;
        }
    }

    static double gumbel(uint32_t bits) { return -std::log(-std::log((bits + 0.5) * 0x1p-23)); }
};

inline int best_of(const float *logits, int size) { // of equal ones, the first
    Floats tops = splat(logits[0]);
    int i = 0;
    for (; i + LANES <= size; i += LANES)
        tops = larger(load<Floats>(logits + i), tops);
    float top = largest_of(tops);
    for (; i < size; i++)
        top = std::max(top, logits[i]);
    const float *found = std::find(logits, logits + size, top);
    return found == logits + size ? 0 : (int)(found - logits); // nothing equals nan
}

// The sum of e^((logit - top) / temperature). Not finite if a logit is not finite.
inline double mass_of(const float *logits, int size, float top, float temperature) {
    constexpr int PART = 64 * LANES; // so many floats add up without much loss of precision
    double mass = 0;
    int i = 0;
    while (i + LANES <= size) {
        Floats sum{}, strange{};
        for (int end = std::min(i + PART, size); i + LANES <= end; i += LANES) {
            const Floats some = load<Floats>(logits + i);
            sum += exponential((some - top) / temperature);
            strange += some - some; // nan for what is not finite
        }
        mass += (double)sum_of(sum) + (double)sum_of(strange);
    }
    for (; i < size; i++)
        mass += std::exp((double)(logits[i] - top) / temperature) + (logits[i] - logits[i]);
    return mass;
}

// The token with the highest scaled logit plus noise; of equal ones, the first.
inline int race(const float *logits, int size, float top, double temperature, const Noise &noise) {
    uint32_t bits[SPAN];
    int winner = -1;
    double score = -INFINITY;
    const auto run = [&](float from, float to, uint32_t least) { // logits in [from, to) with bits >= least
        for (int first = 0; first < size; first += SPAN) {
            noise.bits(first, bits);
            for (int i = first; i < std::min(first + SPAN, size); i++) {
                if (bits[i - first] < least || logits[i] < from || logits[i] >= to)
                    continue;
                const double own = ((double)logits[i] - (double)top) / temperature + Noise::gumbel(bits[i - first]);
                if (own > score || (own == score && i < winner)) {
                    winner = i;
                    score = own;
                }
            }
        }
    };
    // Likely tokens first: the others need rare noise to beat the best of them, so few have to be computed.
    const float likely = (float)(top - LEAD * temperature);
    run(likely, INFINITY, 0);
    const double rare = std::exp(-std::exp(-(score + LEAD))) * 0x1p23 - 4; // minus a margin for rounding
    run(-INFINITY, likely, rare > 0 ? (uint32_t)rare : 0);
    return winner;
}

inline Drawn draw(const float *logits, int size, double temperature, const Noise &noise) {
    const int best = best_of(logits, size);
    const float top = logits[best];
    const double mass = mass_of(logits, size, top, 1.0f);
    if (!std::isfinite(mass) || !std::isfinite(top))
        return {-1, 0, 0, 0};
    if (temperature == 0)
        return {best, 0, -std::log(mass), 0};
    const int winner = race(logits, size, top, temperature, noise);
    const double ahead = (double)logits[winner] - (double)top;
    const double warm = temperature == 1 ? mass : mass_of(logits, size, top, (float)temperature);
    return {winner, 0, ahead - std::log(mass), ahead / temperature - std::log(warm)};
}
