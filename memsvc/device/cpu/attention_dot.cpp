// Attention of a few query rows over keys and values where they lie, by dot products of registers.
//
// A work item is up to 16 query rows of one request and one key-value head, in quads of four rows. A register of
// scores holds the four rows of a quad (its 128-bit quarters) times four keys, so that a decode step of three or four
// heads per key-value head fills it. Keys come in chunks that stay in the first cache: scores, online softmax, values.
#include <cmath>
#include <cstring>

#include "attention.h"

namespace {

constexpr int MAX_QUADS = 4;

struct Item {
    alignas(64) bf16 q[MAX_QUADS][MAX_DIM / 8][32];
    alignas(64) float scores[MAX_QUADS][CHUNK / 4][16];
    alignas(64) bf16 weights[MAX_QUADS][CHUNK / 4][16];
    alignas(64) float out[4 * MAX_QUADS][MAX_DIM];
    alignas(64) float shrink[MAX_QUADS][16];  // of what earlier chunks gave
    alignas(64) int32_t low[MAX_QUADS][16], high[MAX_QUADS][16];  // keys a row sees
    __m512 top[MAX_QUADS], sum[MAX_QUADS];
    Places places;
    int64_t first_key, last_key;  // that any row sees: [first, last)

    bool is_lost() const { return places.is_lost; }
};

// f over the four lanes of each quarter, in all four of them.
template <typename F>
__m512 over_quarters(__m512 x, F f) {
    x = f(x, _mm512_shuffle_ps(x, x, 0xb1));
    return f(x, _mm512_shuffle_ps(x, x, 0x4e));
}

void start(Item &item, const AttentionCall &c, const Block &block, int64_t kv_head, int quads) {
    item.first_key = INT32_MAX, item.last_key = 0;
    std::memset(item.out, 0, sizeof(item.out[0]) * 4 * quads);
    for (int quad = 0; quad < quads; quad++) {
        alignas(64) float top[16], sum[16] = {};
        for (int row = 0; row < 4; row++) {
            // Past the last row its neighbour is computed again and left.
            const int64_t flat = std::min(block.from + 4 * quad + row, block.to - 1);
            const int64_t token = flat / c.group_size, head = kv_head * c.group_size + flat % c.group_size;
            const bf16 *q = c.q + (block.first + token) * c.q_stride + head * c.head_dim;
            for (int64_t i = 0; i < c.head_dim / 8; i++) std::memcpy(item.q[quad][i] + 8 * row, q + 8 * i, 16);
            const auto [low, high] = seen_by(c, block, token);
            item.first_key = std::min(item.first_key, low), item.last_key = std::max(item.last_key, high);
            for (int lane = 4 * row; lane < 4 * row + 4; lane++) {
                item.low[quad][lane] = low, item.high[quad][lane] = high;
                top[lane] = c.sink ? c.sink[head] * LOG2_E : NO_SCORE;
            }
            sum[4 * row] = c.sink ? 1.0f : 0.0f;
        }
        item.top[quad] = _mm512_load_ps(top), item.sum[quad] = _mm512_load_ps(sum);
    }
}

// Raw scores of KEYS keys from `first` on: q is read once for all of them, each key once for all quads.
template <int QUADS, int KEYS>
void score(Item &item, int first, int64_t head_dim) {
    __m512 acc[QUADS][KEYS] = {};
    for (int64_t i = 0; i < head_dim / 8; i++) {
        __m512bh key[KEYS];
        for (int k = 0; k < KEYS; k++) {
            const __m128i part = _mm_loadu_si128(reinterpret_cast<const __m128i *>(item.places.keys[first + k] + 8 * i));
            key[k] = (__m512bh)_mm512_broadcast_i32x4(part);
        }
        for (int quad = 0; quad < QUADS; quad++) {
            const __m512bh q = (__m512bh)_mm512_load_si512(item.q[quad][i]);
            for (int k = 0; k < KEYS; k++) acc[quad][k] = _mm512_dpbf16_ps(acc[quad][k], q, key[k]);
        }
    }
    for (int quad = 0; quad < QUADS; quad++)
        for (int k = 0; k < KEYS; k += 4) {
            // A quarter holds four partial sums of one key; four keys are added up and laid side by side.
            const __m512 *a = acc[quad] + k;
            const __m512 x = _mm512_add_ps(_mm512_unpacklo_ps(a[0], a[1]), _mm512_unpackhi_ps(a[0], a[1]));
            const __m512 y = _mm512_add_ps(_mm512_unpacklo_ps(a[2], a[3]), _mm512_unpackhi_ps(a[2], a[3]));
            const __m512 s = _mm512_add_ps(_mm512_shuffle_ps(x, y, 0x44), _mm512_shuffle_ps(x, y, 0xee));
            _mm512_store_ps(item.scores[quad][(first + k) / 4], s);
        }
}

// Scores to weights, relative to the largest score so far.
void weigh(Item &item, int quad, int num, int64_t first_key, float scale) {
    const __m512 to_log2 = _mm512_set1_ps(scale * LOG2_E), hidden = _mm512_set1_ps(-INFINITY);
    const __m512i low = _mm512_load_si512(item.low[quad]), high = _mm512_load_si512(item.high[quad]);
    const __m512i lanes = _mm512_set4_epi32(3, 2, 1, 0);
    const auto largest = [](__m512 a, __m512 b) { return _mm512_max_ps(a, b); };
    __m512 top = item.top[quad];
    for (int i = 0; i < num / 4; i++) {
        const __m512i at = _mm512_add_epi32(lanes, _mm512_set1_epi32(static_cast<int32_t>(first_key) + 4 * i));
        const __mmask16 seen = _mm512_cmpge_epi32_mask(at, low) & _mm512_cmplt_epi32_mask(at, high);
        const __m512 s = _mm512_mask_mul_ps(hidden, seen, _mm512_load_ps(item.scores[quad][i]), to_log2);
        _mm512_store_ps(item.scores[quad][i], s);
        top = _mm512_max_ps(top, s);
    }
    top = over_quarters(top, largest);
    const __m512 shrink = exp2_of(_mm512_sub_ps(item.top[quad], top));
    __m512 sum = _mm512_mul_ps(item.sum[quad], shrink);
    for (int i = 0; i < num / 4; i++) {
        const __m512 weight = exp2_of(_mm512_sub_ps(_mm512_load_ps(item.scores[quad][i]), top));
        sum = _mm512_add_ps(sum, weight);
        _mm256_store_si256(reinterpret_cast<__m256i *>(item.weights[quad][i]), (__m256i)_mm512_cvtneps_pbh(weight));
    }
    item.top[quad] = top, item.sum[quad] = sum;
    _mm512_store_ps(item.shrink[quad], shrink);
}

// Adds the weighted values of a chunk: dimensions [dim, dim + 32 * PARTS) of a quad, the last part under a mask.
template <int PARTS>
void add_values(Item &item, int quad, int num, int64_t dim, __mmask32 last) {
    const Pairs pairs;
    __m512 acc[4][2 * PARTS];
    for (int row = 0; row < 4; row++)
        for (int i = 0; i < 2 * PARTS; i++)
            acc[row][i] = _mm512_mul_ps(_mm512_load_ps(item.out[4 * quad + row] + dim + 16 * i),
                                        _mm512_set1_ps(item.shrink[quad][4 * row]));
    for (int key = 0; key < num; key += 2) {
        // A product takes two keys at once, so their values have to lie in pairs.
        __m512bh values[2 * PARTS];
        for (int i = 0; i < PARTS; i++) {
            const __mmask32 mask = i == PARTS - 1 ? last : 0xffffffff;
            const __m512i a = _mm512_maskz_loadu_epi16(mask, item.places.values[key] + dim + 32 * i);
            const __m512i b = _mm512_maskz_loadu_epi16(mask, item.places.values[key + 1] + dim + 32 * i);
            values[2 * i] = (__m512bh)_mm512_permutex2var_epi16(a, pairs.lower, b);
            values[2 * i + 1] = (__m512bh)_mm512_permutex2var_epi16(a, pairs.upper, b);
        }
        for (int row = 0; row < 4; row++) {
            int32_t pair;
            std::memcpy(&pair, item.weights[quad][key / 4] + 4 * row + key % 4, 4);
            const __m512bh weights = (__m512bh)_mm512_set1_epi32(pair);
            for (int i = 0; i < 2 * PARTS; i++) acc[row][i] = _mm512_dpbf16_ps(acc[row][i], values[i], weights);
        }
    }
    for (int row = 0; row < 4; row++)
        for (int i = 0; i < 2 * PARTS; i++)
            _mm512_store_ps(item.out[4 * quad + row] + dim + 16 * i, acc[row][i]);
}

void finish(Item &item, const AttentionCall &c, const Block &block, int64_t kv_head) {
    const auto plus = [](__m512 a, __m512 b) { return _mm512_add_ps(a, b); };
    for (int64_t flat = block.from; flat < block.to; flat++) {
        const int64_t row = flat - block.from, head = kv_head * c.group_size + flat % c.group_size;
        alignas(64) float sums[16];
        _mm512_store_ps(sums, over_quarters(item.sum[row / 4], plus));
        const __m512 share = _mm512_set1_ps(1.0f / sums[row % 4 * 4]);
        bf16 *out = c.out + (block.first + flat / c.group_size) * c.out_stride + head * c.head_dim;
        for (int64_t i = 0; i < c.head_dim; i += 16)
            store(out + i, 0xffff, _mm512_mul_ps(_mm512_load_ps(item.out[row] + i), share));
    }
}

template <int QUADS>
void attend(Item &item, const AttentionCall &c, const Block &block, int64_t kv_head) {
    constexpr int KEYS = QUADS <= 2 ? 8 : 4;  // as many sums as the registers hold
    start(item, c, block, kv_head, QUADS);
    for (int64_t from = item.first_key; from < item.last_key; from += CHUNK) {
        const int64_t to = std::min(from + CHUNK, item.last_key);
        const int num = item.places.find(c, block, kv_head, from, to, 8);
        for (int key = 0; key < num; key += KEYS) score<QUADS, KEYS>(item, key, c.head_dim);
        for (int quad = 0; quad < QUADS; quad++) {
            weigh(item, quad, num, from, c.scale);
            int64_t dim = 0;
            for (; dim + 64 <= c.head_dim; dim += 64) add_values<2>(item, quad, num, dim, 0xffffffff);
            for (; dim < c.head_dim; dim += 32)
                add_values<1>(item, quad, num, dim, c.head_dim - dim >= 32 ? 0xffffffff : 0xffff);
        }
    }
    finish(item, c, block, kv_head);
}

}  // namespace

extern "C" int64_t paged_attention_by_dot(const AttentionCall *call) {
    const AttentionCall &c = *call;
    return on_threads<Item>(c, c.num_blocks * c.num_kv_heads, [&](Item &item, Queue &queue) {
        for (int64_t i; (i = queue.take()) < queue.num;) {
            const Block &block = c.blocks[i / c.num_kv_heads];
            const int64_t kv_head = i % c.num_kv_heads;
            switch ((block.to - block.from + 3) / 4) {
                case 1: attend<1>(item, c, block, kv_head); break;
                case 2: attend<2>(item, c, block, kv_head); break;
                case 3: attend<3>(item, c, block, kv_head); break;
                default: attend<4>(item, c, block, kv_head);
            }
        }
    });
}
