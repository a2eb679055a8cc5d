// One forward of a decoder over slabs of keys and values, on the CPU.
//
// The order of every sum depends on its own row alone: one thread computes an output from the first weight to the last,
// and attention combines stretches in the order of the cells. So a row's bits do not depend on the number of rows,
// threads or neighbours. (Products that may mix do not keep this.)

#include "attention.h"
#include "burst.h"
#include "sampler.h"
#include "products.h"

namespace {

constexpr int MAX_HEAD = 256; // the largest head_dim

struct Layer {
    Matrix qkv, output, gate_up, down; // gate_up: a block of gates, then the corresponding block of ups
    const float *attention_norm, *mlp_norm;
    const float *qkv_bias, *query_norm, *key_norm; // or null
};

struct Model {
    int32_t num_layers, hidden, mlp, heads, kv_heads, dim, vocabulary;
    float epsilon;
    const double *frequencies; // radians a position, [dim / 2]
    const Layer *layers;
    Matrix embedding, head;
    const float *norm;
};

struct Token {
    const Row *row;
    int64_t position;
};

struct Scratch { // memory of one thread
    std::vector<float> key;
    AttentionScratch attention;
};

struct Piece { // one stretch of one tile
    int tile;
    const Stretch *stretch;
    size_t first; // index of its first result in `gathered`
};

struct Rotation { // [tokens, dim / 2] each
    std::vector<float> cos, sin;

    void set(size_t at, double angle) {
        cos[at] = (float)std::cos(angle);
        sin[at] = (float)std::sin(angle);
    }
};

} // namespace

struct Decoder {
    const Model model;
    const Slabs slabs;
    const int width; // dim, padded to whole vectors

    Decoder(const Model &m, const Slabs &s, int num_threads, bool may_mix)
        : model(m), slabs(s), width(padded(m.dim)), pool(num_threads), products(pool, may_mix),
          scratch(num_threads) {}

    void forward(const Row *rows, int num_rows, const int32_t *tokens, float *logits) {
        plan(rows, num_rows);
        pool.run(num_tokens, [&](int n, int) { read_output(model.embedding, tokens[n], &x[(size_t)n * model.hidden]); });
        for (int layer = 0; layer < model.num_layers; layer++) {
            attend(layer);
            transform(model.layers[layer]);
        }
        speak(rows, num_rows, logits);
    }

    // Calls act(row) for each row, side by side.
    template <class Act> void each_row(int num_rows, Act &&act) {
        pool.run(num_rows, [&](int row, int) { act(row); });
    }

  private:
    Pool pool;
    Products products;
    std::vector<Scratch> scratch;
    int num_tokens = 0;
    std::vector<Tile> tiles;
    std::vector<Piece> pieces;                  // empty where a tile's stretches are computed one after the other
    std::vector<size_t> first_of;               // index of each tile's first result in `gathered`
    std::vector<Token> places;                  // of all tokens
    Rotation recent_rotation, sink_rotation;
    std::vector<float> x, h, qkv, queries, sink_queries, mixed, gated, parts;
    std::vector<Gathered> gathered;

    int group() const { return model.heads / model.kv_heads; }
    size_t query_size() const { return (size_t)model.heads * width; }

    // --- Before the first layer

    void plan(const Row *rows, int num_rows) {
        num_tokens = 0;
        tiles.clear();
        places.clear();
        for (int r = 0; r < num_rows; r++) {
            for (int first = 0; first < rows[r].count; first += QUERIES)
                add_tile(rows[r], num_tokens + first, first);
            for (int n = 0; n < rows[r].count; n++)
                places.push_back({&rows[r], rows[r].start + n});
            num_tokens += rows[r].count;
        }
        split();
        const size_t n = num_tokens;
        x.resize(n * model.hidden);
        h.resize(n * model.hidden);
        qkv.resize(n * (model.heads + 2 * model.kv_heads) * model.dim);
        queries.assign(n * query_size(), 0.0f);
        sink_queries.assign(n * query_size(), 0.0f);
        mixed.resize(n * model.heads * model.dim);
        gated.resize(n * model.mlp);
        rotate();
    }

    void add_tile(const Row &row, int first, int offset) {
        Tile tile{&row, first, std::min(QUERIES, row.count - offset), row.start + offset, {}};
        const View view(slabs, tile);
        for (int start = 0; start < slabs.capacity; start += STRETCH) {
            Stretch stretch;
            for (int cell = start; cell < std::min(start + STRETCH, (int)slabs.capacity); cell += LANES)
                if (const Sight sight = view.sight(cell); sight != UNSEEN)
                    stretch.push_back({cell, sight});
            if (!stretch.empty())
                tile.stretches.push_back(std::move(stretch));
        }
        tiles.push_back(std::move(tile));
    }

    // With few tiles, their stretches are computed in parallel and combined afterwards in the same order.
    void split() {
        pieces.clear();
        first_of.clear();
        size_t heads = 0;
        for (size_t t = 0; t < tiles.size(); t++) {
            first_of.push_back(heads);
            for (const Stretch &stretch : tiles[t].stretches) {
                pieces.push_back({(int)t, &stretch, heads});
                heads += (size_t)tiles[t].count * model.heads;
            }
        }
        if (tiles.size() * model.kv_heads >= (size_t)4 * pool.num_threads())
            pieces.clear();
        gathered.resize(pieces.empty() ? 0 : heads);
        parts.resize(gathered.size() * width);
    }

    void rotate() {
        const int half = model.dim / 2;
        for (auto *table : {&recent_rotation.cos, &recent_rotation.sin, &sink_rotation.cos, &sink_rotation.sin})
            table->resize((size_t)num_tokens * half);
        pool.run(num_tokens, [&](int n, int) {
            const auto &[row, position] = places[n];
            const int64_t farthest = std::min(position, (int64_t)row->sink + slabs.recent - 1);
            for (int i = 0; i < half; i++) {
                recent_rotation.set((size_t)n * half + i, (double)position * model.frequencies[i]);
                sink_rotation.set((size_t)n * half + i, (double)farthest * model.frequencies[i]);
            }
        });
    }

    void normalise_all(const float *weight) {
        pool.run(num_tokens, [&](int n, int) {
            normalise(&x[(size_t)n * model.hidden], weight, model.hidden, model.epsilon, &h[(size_t)n * model.hidden]);
        });
    }

    // --- A layer

    void attend(int layer) {
        const Layer &weights = model.layers[layer];
        normalise_all(weights.attention_norm);
        products.write(weights.qkv, h.data(), num_tokens, qkv.data());
        pool.run(num_tokens, [&](int n, int thread) { place(layer, n, scratch[thread].key); });
        if (pieces.empty())
            pool.run((int)tiles.size() * model.kv_heads, [&](int unit, int thread) { mix_whole(layer, unit, thread); });
        else
            mix_in_pieces(layer);
        products.add(weights.output, mixed.data(), num_tokens, x.data());
    }

    void transform(const Layer &layer) {
        normalise_all(layer.mlp_norm);
        // The same thread handles a block of gates and then its block of ups.
        products.each(layer.gate_up, h.data(), num_tokens, Gate{gated.data(), model.mlp});
        products.add(layer.down, gated.data(), num_tokens, x.data());
    }

    struct Gate {
        float *out;
        int size;

        void operator()(int row, int block, Floats products) const {
            float *at = out + (size_t)row * size;
            if (block % 2 == 0) {
                put(at, size, block / 2, products);
                return;
            }
            const Floats gate = get(at, size, block / 2);
            put(at, size, block / 2, gate / (1.0f + exponential(-gate)) * products);
        }
    };

    // Bias, norms and rotation of one token; writes its keys and values to their cells.
    void place(int layer, int n, std::vector<float> &turned) {
        const Layer &weights = model.layers[layer];
        const int dim = model.dim, total = model.heads + 2 * model.kv_heads;
        float *all = &qkv[(size_t)n * total * dim];
        if (weights.qkv_bias)
            for (int i = 0; i < total * dim; i++)
                all[i] += weights.qkv_bias[i];
        const Row &row = *places[n].row;
        const int64_t cell = Layout(row, slabs.capacity).cell(places[n].position);
        turned.resize(dim);
        for (int head = 0; head < total; head++) {
            float *at = all + (size_t)head * dim;
            const bool is_query = head < model.heads, is_key = !is_query && head < model.heads + model.kv_heads;
            const float *norm = is_query ? weights.query_norm : is_key ? weights.key_norm : nullptr;
            if (norm)
                normalise(at, norm, dim, model.epsilon, at);
            if (is_query) {
                turn(at, n, recent_rotation, &queries[n * query_size() + (size_t)head * width]);
                turn(at, n, sink_rotation, &sink_queries[n * query_size() + (size_t)head * width]);
            } else if (is_key) {
                turn(at, n, recent_rotation, turned.data());
                keep_key(layer, row, head - model.heads, cell, turned.data());
            } else {
                keep_value(layer, row, head - model.heads - model.kv_heads, cell, at);
            }
        }
    }

    void turn(const float *from, int n, const Rotation &by, float *to) const {
        const int half = model.dim / 2;
        const float *cos = &by.cos[(size_t)n * half], *sin = &by.sin[(size_t)n * half];
        for (int i = 0; i < half; i++) {
            const float a = from[i], b = from[i + half];
            to[i] = a * cos[i] - b * sin[i];
            to[i + half] = b * cos[i] + a * sin[i];
        }
    }

    // The bytes before the cells of one head.
    size_t cells_of(int layer, const Row &row, int kv_head) const {
        const size_t heads = ((size_t)layer * slabs.num_slabs + row.slot) * model.kv_heads + kv_head;
        return heads * slabs.capacity * model.dim * slabs.item_bytes();
    }

    void keep_key(int layer, const Row &row, int kv_head, int64_t cell, const float *from) const {
        const int units = model.dim * slabs.item_bytes() / 4;
        uint32_t *to = (uint32_t *)(slabs.keys + cells_of(layer, row, kv_head)) + cell / LANES * units * LANES + cell % LANES;
        for (int unit = 0; unit < units; unit++, to += LANES)
            if (slabs.kind == FLOAT32)
                std::memcpy(to, from + unit, sizeof *to);
            else
                *to = to_bfloat16(from[2 * unit]) | (uint32_t)to_bfloat16(from[2 * unit + 1]) << 16;
    }

    void keep_value(int layer, const Row &row, int kv_head, int64_t cell, const float *from) const {
        uint8_t *to = slabs.values + cells_of(layer, row, kv_head) + cell * model.dim * slabs.item_bytes();
        if (slabs.kind == FLOAT32) {
            std::memcpy(to, from, model.dim * sizeof(float));
            return;
        }
        for (int d = 0; d < model.dim; d++) {
            const uint16_t bits = to_bfloat16(from[d]);
            std::memcpy(to + 2 * d, &bits, sizeof bits);
        }
    }

    // --- Attention of one layer

    // Computes one stretch of one tile and key head.
    void gather(int layer, const Tile &tile, const Stretch &stretch, int kv_head, Gathered *found, AttentionScratch &room) const {
        const auto with = [&]<int V, int KIND>() {
            stretches_of<V, KIND>(layer, tile, kv_head).gather(stretch, found, room);
        };
        const auto of_width = [&]<int... V>(std::integer_sequence<int, V...>) {
            ((width != (V + 1) * LANES          ? void()
              : slabs.kind == FLOAT32 ? with.template operator()<V + 1, FLOAT32>()
                                      : with.template operator()<V + 1, BFLOAT16>()),
             ...);
        };
        of_width(std::make_integer_sequence<int, MAX_HEAD / LANES>{});
    }

    template <int V, int KIND> Stretches<V, KIND> stretches_of(int layer, const Tile &tile, int kv_head) const {
        const size_t at = cells_of(layer, *tile.row, kv_head);
        const size_t first = tile.first * query_size() + (size_t)kv_head * group() * width;
        const float scale = 1.0f / std::sqrt((float)model.dim);
        return {View(slabs, tile), slabs.keys + at, slabs.values + at, &queries[first], &sink_queries[first],
                query_size(),      model.dim,       group(),           scale};
    }

    // Computes one tile and key head, from its first stretch to its last.
    void mix_whole(int layer, int unit, int thread) {
        const Tile &tile = tiles[unit / model.kv_heads];
        const int kv_head = unit % model.kv_heads, num = tile.count * group();
        AttentionScratch &room = scratch[thread].attention;
        room.mixed.assign((size_t)2 * num * width, 0.0f);
        std::vector<Gathered> sums, part(num);
        for (int i = 0; i < num; i++)
            sums.push_back({NEVER, 0.0f, &room.mixed[(size_t)i * width]});
        for (const Stretch &stretch : tile.stretches) {
            float *fresh = &room.mixed[(size_t)num * width];
            std::fill(fresh, fresh + (size_t)num * width, 0.0f);
            for (int i = 0; i < num; i++)
                part[i] = {NEVER, 0.0f, fresh + (size_t)i * width};
            gather(layer, tile, stretch, kv_head, part.data(), room);
            for (int i = 0; i < num; i++)
                fold(sums[i], part[i], width);
        }
        for (int i = 0; i < num; i++)
            finish(tile, kv_head, i, sums[i]);
    }

    void mix_in_pieces(int layer) {
        std::fill(parts.begin(), parts.end(), 0.0f);
        for (size_t i = 0; i < gathered.size(); i++)
            gathered[i] = {NEVER, 0.0f, &parts[i * width]};
        pool.run((int)pieces.size() * model.kv_heads, [&](int unit, int thread) {
            const Piece &piece = pieces[unit / model.kv_heads];
            const Tile &tile = tiles[piece.tile];
            const int kv_head = unit % model.kv_heads;
            const size_t at = piece.first + (size_t)kv_head * tile.count * group();
            gather(layer, tile, *piece.stretch, kv_head, &gathered[at], scratch[thread].attention);
        });
        pool.run((int)tiles.size(), [&](int t, int) {
            const Tile &tile = tiles[t];
            const size_t step = (size_t)tile.count * model.heads;
            for (int kv_head = 0; kv_head < model.kv_heads; kv_head++)
                for (int i = 0; i < tile.count * group(); i++) {
                    const size_t at = first_of[t] + (size_t)kv_head * tile.count * group() + i;
                    Gathered sum = gathered[at];
                    for (size_t s = 1; s < tile.stretches.size(); s++)
                        fold(sum, gathered[at + s * step], width);
                    finish(tile, kv_head, i, sum);
                }
        });
    }

    void finish(const Tile &tile, int kv_head, int i, const Gathered &sum) {
        const size_t token = tile.first + i / group(), head = (size_t)kv_head * group() + i % group();
        float *to = &mixed[(token * model.heads + head) * model.dim];
        for (int d = 0; d < model.dim; d++)
            to[d] = sum.mixed[d] / sum.mass;
    }

    // --- After the last layer

    void speak(const Row *rows, int num_rows, float *logits) {
        int num = 0, end = 0;
        for (int r = 0; r < num_rows; r++) {
            end += rows[r].count;
            for (int n = end - rows[r].num_logits; n < end; n++, num++)
                normalise(&x[(size_t)n * model.hidden], model.norm, model.hidden, model.epsilon,
                          &h[(size_t)num * model.hidden]);
        }
        products.write(model.head, h.data(), num, logits, Rounding::FINE);
    }
};

extern "C" {

Decoder *holdfast_decoder(const Model *model, const Slabs *slabs, int32_t num_threads, int32_t may_mix) {
    return new Decoder(*model, *slabs, num_threads, may_mix);
}

void holdfast_free(Decoder *decoder) { delete decoder; }

void holdfast_forward(Decoder *decoder, const Row *rows, int32_t num_rows, const int32_t *tokens, float *logits) {
    decoder->forward(rows, num_rows, tokens, logits);
}

int32_t holdfast_burst(Decoder *decoder, Row *rows, int32_t num_rows, int32_t *tokens, const Wanted *wanted,
                       int32_t max_steps, double budget_s, float *logits, Drawn *drawn) {
    return decode_burst(*decoder, rows, num_rows, tokens, wanted, max_steps, budget_s, logits, drawn);
}

void holdfast_draw(const float *logits, int32_t size, double temperature, uint64_t seed, uint64_t position,
                   uint32_t choice, Drawn *drawn) {
    *drawn = draw(logits, size, temperature, {seed, position, choice});
}

// Whether weights of this kind are multiplied in different ways with few and with many rows, where that is allowed.
int32_t holdfast_mixes(int32_t kind) { return HAS_PAIRS && kind == BFLOAT16; }
}
