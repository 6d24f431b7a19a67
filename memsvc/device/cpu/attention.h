// What both attention kernels are told, and what they share: who sees what, where keys lie, exponentials.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "bfloat16.h"
#include "parallel.h"

constexpr int CHUNK = 256;  // keys between two looks at the largest score
constexpr int MAX_DIM = 256;
constexpr float LOG2_E = 1.442695040888963407f;
// Below every score, but not -inf: the difference of two such is no NaN.
constexpr float NO_SCORE = -1e30f;

// Query rows [from, to) of a request with num tokens, counted token by token and head by head of the group.
struct Block {
    int64_t table_row;  // of the page table
    int64_t first;      // the request's row 0 in q and out
    int64_t num;
    int64_t low;  // no row sees keys before it
    int64_t pos;  // position of row 0
    int64_t from, to;
};

// Mirrored by kernels.py. Strides count elements; tokens of a page lie next to each other.
struct AttentionCall {
    const bf16 *q;
    bf16 *out;
    const bf16 *k_pages, *v_pages;
    const bf16 *own_k, *own_v;  // of the rows themselves; null if they are in the pages as well
    const float *sink;          // a logit per head, or null
    const int32_t *table;
    const Block *blocks;
    int64_t num_blocks, num_threads;
    int64_t q_stride, out_stride, own_k_stride, own_v_stride, page_stride, table_stride;
    int64_t num_pages, page_size, num_kv_heads, group_size, head_dim;
    int64_t is_causal;
    int64_t window;  // a row sees so many positions back, itself included; 0 is all
    float scale;
};

// In the place of keys past the last: 0 times NaN would be NaN.
alignas(64) inline const bf16 zero_row[4 * MAX_DIM] = {};

// Keys a query row sees: [low, high).
struct Seen {
    int64_t low, high;
};

inline Seen seen_by(const AttentionCall &c, const Block &block, int64_t token) {
    const int64_t at = block.pos + token, end = block.pos + block.num;
    Seen seen{block.low, c.is_causal ? at + 1 : end};
    if (c.window) seen = {std::max(seen.low, at - c.window + 1), std::min(seen.high, at + c.window)};
    return seen;
}

// Where the keys of a chunk and their values lie, from one head on.
struct Places {
    const bf16 *keys[CHUNK], *values[CHUNK];
    bool is_lost = false;  // a page that does not exist was named

    // Keys [from, to), filled up with zeros to a multiple of `step`. Returns how many that makes.
    int find(const AttentionCall &c, const Block &block, int64_t kv_head, int64_t from, int64_t to, int step) {
        const int64_t column = kv_head * c.head_dim, row = c.num_kv_heads * c.head_dim;
        const int64_t paged = c.own_k ? std::min(to, block.pos) : to;
        const int32_t *pages = c.table + block.table_row * c.table_stride;
        int num = 0;
        for (int64_t at = from; at < paged;) {
            const int64_t offset = at % c.page_size, most = std::min(paged - at, c.page_size - offset);
            const int64_t page = pages[at / c.page_size], place = page * c.page_stride + offset * row + column;
            const bool exists = page >= 0 && page < c.num_pages;
            is_lost |= !exists;
            for (int64_t i = 0; i < most; i++, num++) {
                keys[num] = exists ? c.k_pages + place + i * row : zero_row;
                values[num] = exists ? c.v_pages + place + i * row : zero_row;
            }
            at += most;
        }
        for (int64_t at = std::max(from, paged); at < to; at++, num++) {
            const int64_t own = block.first + at - block.pos;
            keys[num] = c.own_k + own * c.own_k_stride + column;
            values[num] = c.own_v + own * c.own_v_stride + column;
        }
        for (; num % step; num++) keys[num] = values[num] = zero_row;
        return num;
    }
};

// 2^x for x <= 0, relative error below 3e-6: Taylor on [-1/2, 1/2], far inside the rounding of a weight. Never less
// than 2^-126, which is as good as nothing beside the largest weight, 1: smaller results take hundreds of cycles.
inline __m512 exp2_of(__m512 x) {
    // Of a number and a NaN this gives the second: a score that is none must not come out as a weight.
    x = _mm512_max_ps(_mm512_set1_ps(-126.0f), x);
    const __m512 whole = _mm512_roundscale_ps(x, 8);
    const __m512 f = _mm512_sub_ps(x, whole);
    __m512 y = _mm512_fmadd_ps(_mm512_set1_ps(0.00133335581f), f, _mm512_set1_ps(0.00961812911f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(0.0555041087f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(0.240226507f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(0.693147181f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(y, whole);
}

// Two keys' numbers side by side, as the instructions for products want them: of dimensions [0, 16) and [16, 32).
struct Pairs {
    __m512i lower, upper;

    Pairs() {
        alignas(64) int16_t low[32], high[32];
        for (int i = 0; i < 16; i++) {
            low[2 * i] = i, low[2 * i + 1] = 32 + i;
            high[2 * i] = 16 + i, high[2 * i + 1] = 48 + i;
        }
        lower = _mm512_load_si512(low), upper = _mm512_load_si512(high);
    }
};

// Numbers [0, num) for threads to take: whoever is done takes the next, as contexts differ in length.
struct Queue {
    const int64_t num;
    std::atomic<int64_t> next{0};

    // num or more if none is left.
    int64_t take() { return next++; }
};

// work(worker, queue) on each thread, every one with a Worker of its own. Returns what a call returns: how many row
// blocks were attended, none if the page table names a page that does not exist.
template <typename Worker, typename Work>
int64_t on_threads(const AttentionCall &c, int64_t num, const Work &work) {
    Queue queue{num};
    std::atomic<bool> is_lost{false};
    in_parts(std::min(c.num_threads, num), 1, [&](int64_t, int64_t) {
        Worker worker;
        work(worker, queue);
        if (worker.is_lost()) is_lost = true;
    });
    return is_lost ? 0 : c.num_blocks;
}
