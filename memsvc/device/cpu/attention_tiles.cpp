// Attention of a few query rows over keys and values where they lie, by products of tiles (AMX).
//
// A work item is up to 16 query rows of one request and up to four key-value heads, whose keys lie next to each other.
// Scores are computed with keys as rows and query rows as columns: keys go into tiles as they lie, and the softmax runs
// down columns, a query row to a lane. Weights are turned around for the second product.
#include <sys/syscall.h>
#include <unistd.h>

#include <cmath>
#include <cpuid.h>
#include <cstring>

#include "attention.h"
#include "parts.h"
#include "tiles.h"

namespace {

constexpr int STEP = 32;  // keys of a product

struct Head {
    alignas(64) bf16 q[MAX_DIM / 32][16][32];  // pairs of dimensions, then query rows
    alignas(64) float out[16][MAX_DIM];
    __m512 top, sum;
};

struct Item {
    Head heads[MAX_HEADS];
    alignas(64) float scores[CHUNK][16];
    alignas(64) bf16 weights[CHUNK / STEP][16][STEP];
    alignas(64) bf16 keys[STEP][MAX_DIM];
    alignas(64) bf16 values[4][16][32];  // 16 dimensions each: pairs of keys, then dimensions
    alignas(64) int32_t low[16], high[16];  // keys a row sees
    int64_t all_from, all_to;               // that all rows see
    const Places *places;                   // of the chunk at hand
};

__mmask32 first_words(int64_t num) { return num >= 32 ? 0xffffffff : (1u << num) - 1; }

// Queries of a head as tiles: 32 dimensions of all rows at a time, turned around.
void start_head(Head &head, const AttentionCall &c, const Block &block, int64_t kv_head) {
    const int64_t num = block.to - block.from;
    const bf16 *q[16];
    alignas(64) float top[16], sum[16];
    for (int row = 0; row < 16; row++) {
        const int64_t flat = block.from + std::min<int64_t>(row, num - 1);
        const int64_t q_head = kv_head * c.group_size + flat % c.group_size;
        q[row] = c.q + (block.first + flat / c.group_size) * c.q_stride + q_head * c.head_dim;
        top[row] = c.sink ? c.sink[q_head] * LOG2_E : NO_SCORE, sum[row] = c.sink ? 1.0f : 0.0f;
        for (int64_t i = 0; i < c.head_dim; i += 16) _mm512_store_ps(head.out[row] + i, _mm512_setzero_ps());
    }
    head.top = _mm512_load_ps(top), head.sum = _mm512_load_ps(sum);
    for (int64_t i = 0; i < c.head_dim; i += 32) {
        __m512i rows[16];
        for (int row = 0; row < 16; row++)
            rows[row] = _mm512_maskz_loadu_epi16(first_words(c.head_dim - i), q[row] + i);
        transpose(rows);
        for (int pair = 0; pair < 16; pair++) _mm512_store_si512(head.q[i / 32][pair], rows[pair]);
    }
}

// Keys that rows see. Past the last row its neighbour is computed again and left.
void start(Item &item, const AttentionCall &c, const Block &block) {
    item.all_from = 0, item.all_to = INT32_MAX;
    for (int row = 0; row < 16; row++) {
        const auto [low, high] = seen_by(c, block, std::min(block.from + row, block.to - 1) / c.group_size);
        item.low[row] = low, item.high[row] = high;
        item.all_from = std::max(item.all_from, low), item.all_to = std::min(item.all_to, high);
    }
}

// Raw scores of keys [first, first + STEP) of a head that lies `column` numbers into a key's row.
void score(Item &item, const Head &head, int first, int64_t column, int64_t head_dim) {
    for (int key = 0; key < STEP; key++)
        for (int64_t i = 0; i < head_dim; i += 32) {
            const bf16 *at = item.places->keys[first + key] + column + i;
            _mm512_store_si512(item.keys[key] + i, _mm512_maskz_loadu_epi16(first_words(head_dim - i), at));
        }
    _tile_zero(0);
    _tile_zero(1);
    for (int64_t i = 0; i < head_dim; i += 32) {
        _tile_loadd(4, item.keys[0] + i, sizeof(item.keys[0]));
        _tile_loadd(5, item.keys[16] + i, sizeof(item.keys[0]));
        _tile_loadd(6, head.q[i / 32], 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 5, 6);
    }
    _tile_stored(0, item.scores[first], 64);
    _tile_stored(1, item.scores[first + 16], 64);
}

// No weight for keys of a chunk that a row does not see.
void hide(Item &item, int num, int64_t first_key) {
    const __m512 hidden = _mm512_set1_ps(-INFINITY);
    const __m512i low = _mm512_load_si512(item.low), high = _mm512_load_si512(item.high);
    for (int key = 0; key < num; key++) {
        const int64_t at = first_key + key;
        if (at >= item.all_from && at < item.all_to) continue;
        const __m512i here = _mm512_set1_epi32(static_cast<int32_t>(at));
        const __mmask16 seen = _mm512_cmpge_epi32_mask(here, low) & _mm512_cmplt_epi32_mask(here, high);
        _mm512_mask_store_ps(item.scores[key], static_cast<__mmask16>(~seen), hidden);
    }
}

// Scores of a chunk to weights, relative to the largest so far. Returns what earlier sums shrink by.
__m512 weigh(Item &item, Head &head, int num, int64_t first_key, float scale) {
    const __m512 to_log2 = _mm512_set1_ps(scale * LOG2_E);
    hide(item, num, first_key);
    __m512 tops[4];
    for (__m512 &top : tops) top = _mm512_set1_ps(NO_SCORE);
    for (int key = 0; key < num; key += 4)
        for (int i = 0; i < 4; i++) tops[i] = _mm512_max_ps(tops[i], _mm512_load_ps(item.scores[key + i]));
    __m512 top = _mm512_max_ps(_mm512_max_ps(tops[0], tops[1]), _mm512_max_ps(tops[2], tops[3]));
    top = _mm512_max_ps(head.top, _mm512_mul_ps(top, to_log2));
    const __m512 shrink = exp2_of(_mm512_sub_ps(head.top, top));
    __m512 sum = _mm512_mul_ps(head.sum, shrink);
    const Pairs pairs;
    const __m512i interleave = _mm512_mask_sub_epi16(pairs.lower, 0xaaaaaaaa, pairs.lower, _mm512_set1_epi16(16));
    for (int first = 0; first < num; first += STEP) {
        __m512i turned[16];
        for (int i = 0; i < 16; i++) {
            const __m512 a = exp2_of(_mm512_fmsub_ps(_mm512_load_ps(item.scores[first + 2 * i]), to_log2, top));
            const __m512 b = exp2_of(_mm512_fmsub_ps(_mm512_load_ps(item.scores[first + 2 * i + 1]), to_log2, top));
            sum = _mm512_add_ps(sum, _mm512_add_ps(a, b));
            turned[i] = _mm512_permutexvar_epi16(interleave, (__m512i)_mm512_cvtne2ps_pbh(b, a));
        }
        transpose(turned);
        for (int i = 0; i < 16; i++) _mm512_store_si512(item.weights[first / STEP][i], turned[i]);
    }
    head.top = top, head.sum = sum;
    return shrink;
}

// Adds the weighted values of a chunk: 64 dimensions of a head, or as many as it has left.
void add_values(Item &item, Head &head, int num, int64_t column, int64_t dim, int64_t head_dim) {
    const Pairs pairs;
    const __mmask32 masks[2] = {first_words(head_dim - dim), first_words(std::max<int64_t>(head_dim - dim - 32, 0))};
    _tile_loadd(0, head.out[0] + dim, sizeof(head.out[0]));
    _tile_loadd(1, head.out[0] + dim + 16, sizeof(head.out[0]));
    _tile_loadd(2, head.out[0] + dim + 32, sizeof(head.out[0]));
    _tile_loadd(3, head.out[0] + dim + 48, sizeof(head.out[0]));
    for (int first = 0; first < num; first += STEP) {
        for (int i = 0; i < 16; i++) {
            const bf16 *a = item.places->values[first + 2 * i] + column + dim;
            const bf16 *b = item.places->values[first + 2 * i + 1] + column + dim;
            for (int half = 0; half < 2; half++) {
                const __m512i x = _mm512_maskz_loadu_epi16(masks[half], a + 32 * half);
                const __m512i y = _mm512_maskz_loadu_epi16(masks[half], b + 32 * half);
                _mm512_store_si512(item.values[2 * half][i], _mm512_permutex2var_epi16(x, pairs.lower, y));
                _mm512_store_si512(item.values[2 * half + 1][i], _mm512_permutex2var_epi16(x, pairs.upper, y));
            }
        }
        _tile_loadd(4, item.weights[first / STEP], 64);
        _tile_loadd(5, item.values[0], 64);
        _tile_dpbf16ps(0, 4, 5);
        _tile_loadd(6, item.values[1], 64);
        _tile_dpbf16ps(1, 4, 6);
        _tile_loadd(7, item.values[2], 64);
        _tile_dpbf16ps(2, 4, 7);
        _tile_loadd(5, item.values[3], 64);
        _tile_dpbf16ps(3, 4, 5);
    }
    _tile_stored(0, head.out[0] + dim, sizeof(head.out[0]));
    _tile_stored(1, head.out[0] + dim + 16, sizeof(head.out[0]));
    _tile_stored(2, head.out[0] + dim + 32, sizeof(head.out[0]));
    _tile_stored(3, head.out[0] + dim + 48, sizeof(head.out[0]));
}

void shrink_rows(Head &head, __m512 factors, int64_t head_dim) {
    alignas(64) float factor[16];
    _mm512_store_ps(factor, factors);
    for (int row = 0; row < 16; row++)
        for (int64_t i = 0; i < head_dim; i += 16) {
            const __m512 x = _mm512_load_ps(head.out[row] + i);
            _mm512_store_ps(head.out[row] + i, _mm512_mul_ps(x, _mm512_set1_ps(factor[row])));
        }
}

void finish(const Head &head, const AttentionCall &c, const Block &block, int64_t kv_head) {
    alignas(64) float shares[16];
    _mm512_store_ps(shares, _mm512_div_ps(_mm512_set1_ps(1.0f), head.sum));
    for (int64_t flat = block.from; flat < block.to; flat++) {
        const int64_t row = flat - block.from, q_head = kv_head * c.group_size + flat % c.group_size;
        bf16 *out = c.out + (block.first + flat / c.group_size) * c.out_stride + q_head * c.head_dim;
        for (int64_t i = 0; i < c.head_dim; i += 16)
            store(out + i, 0xffff, _mm512_mul_ps(_mm512_load_ps(head.out[row] + i), _mm512_set1_ps(shares[row])));
    }
}

void work(Item &item, const AttentionCall &c, const Part &part, int num, Ahead &ahead) {
    for (int64_t h = 0; h < part.num_heads; h++) {
        Head &head = item.heads[h];
        for (int key = 0; key < num; key += STEP) {
            score(item, head, key, h * c.head_dim, c.head_dim);
            ahead.some();
        }
        const __m512 shrink = weigh(item, head, num, part.from, c.scale);
        shrink_rows(head, shrink, c.head_dim);
        for (int64_t dim = 0; dim < c.head_dim; dim += 64) {
            add_values(item, head, num, h * c.head_dim, dim, c.head_dim);
            ahead.some();
        }
    }
}

struct Worker {
    Tiles tiles;
    Item item;
    Places places[2];

    bool is_lost() const { return places[0].is_lost || places[1].is_lost; }

    void run(const AttentionCall &c, const Parts &parts, Queue &queue) {
        Part part = parts.after({}, queue);
        int now = 0, num = find(c, part, places[0]);
        Ahead(places[0], num, part.num_heads * c.head_dim, 1).some();
        while (part.block) {
            if (part.from == part.first_key) {
                start(item, c, *part.block);
                for (int64_t h = 0; h < part.num_heads; h++)
                    start_head(item.heads[h], c, *part.block, part.first_head + h);
            }
            const Part next = parts.after(part, queue);
            const int next_num = find(c, next, places[1 - now]);
            const int64_t calls = part.num_heads * (num / STEP + (c.head_dim + 63) / 64);
            Ahead ahead(places[1 - now], next_num, next.num_heads * c.head_dim, calls);
            item.places = &places[now];
            work(item, c, part, num, ahead);
            for (int64_t h = 0; h < part.num_heads && part.to == part.last_key; h++)
                finish(item.heads[h], c, *part.block, part.first_head + h);
            part = next, num = next_num, now = 1 - now;
        }
    }

    static int find(const AttentionCall &c, const Part &part, Places &places) {
        return part.block ? places.find(c, *part.block, part.first_head, part.from, part.to, STEP) : 0;
    }
};

}  // namespace

extern "C" {

int64_t paged_attention_by_tiles(const AttentionCall *call) {
    const Parts parts(*call);
    return on_threads<Worker>(*call, parts.num_items(), [&](Worker &worker, Queue &queue) {
        worker.run(*call, parts, queue);
    });
}

// The CPU has tiles for bfloat16, and the system lets this process use them.
int64_t cpu_has_tiles() {
    unsigned a, b, c, d;
    constexpr unsigned BF16 = 1u << 22, TILE = 1u << 24;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & (BF16 | TILE)) != (BF16 | TILE)) return 0;
#ifdef __linux__
    constexpr long REQUEST = 0x1023, TILE_DATA = 18;
    return syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
#else
    return 0;
#endif
}
}
