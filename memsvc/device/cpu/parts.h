// The order of the work on pages, and fetching what comes next.
#pragma once

#include "attention.h"

constexpr int MAX_HEADS = 4;  // of an item

// Heads of a block over a chunk of its keys, [from, to).
struct Part {
    const Block *block = nullptr;
    int64_t first_head = 0, num_heads = 0;
    int64_t first_key = 0, last_key = 0;  // of all its chunks: [first, last)
    int64_t from = 0, to = 0;
};

// Asks for a part while another is worked on, in the order in which its pages lie: the machine then fetches ahead by
// itself, which it does not along one head.
class Ahead {
   public:
    // In about num_calls calls of some().
    Ahead(const Places &places, int num, int64_t width, int64_t num_calls)
        : places_(places), num_(num), width_(width), share_(2 * num / std::max<int64_t>(num_calls, 1) + 1) {}

    void some() {
        for (int64_t end = std::min<int64_t>(next_ + share_, 2 * num_); next_ < end; next_++) {
            const bf16 *row = next_ < num_ ? places_.keys[next_] : places_.values[next_ - num_];
            for (int64_t i = 0; i < width_; i += 32) _mm_prefetch(row + i, _MM_HINT_T1);
        }
    }

   private:
    const Places &places_;
    const int64_t num_, width_, share_;
    int64_t next_ = 0;
};

// Hands out the parts of a call, chunk after chunk of an item.
class Parts {
   public:
    explicit Parts(const AttentionCall &call) : c(call) {
        // Heads of a request share a pass over its pages, unless there are too few requests to go round.
        heads_ = c.num_blocks >= 2 * c.num_threads || c.num_threads == 1 ? MAX_HEADS : 1;
        per_block_ = (c.num_kv_heads + heads_ - 1) / heads_;
    }

    int64_t num_items() const { return c.num_blocks * per_block_; }

    // The part after this one; without a block if there is none.
    Part after(Part part, Queue &queue) const {
        if (part.to == part.last_key) part = item(queue.take());
        part.from = part.to, part.to = std::min(part.from + CHUNK, part.last_key);
        return part;
    }

   private:
    Part item(int64_t i) const {
        if (i >= num_items()) return {};
        const Block &block = c.blocks[i / per_block_];
        const int64_t head = i % per_block_ * heads_;
        const Seen first = seen_by(c, block, block.from / c.group_size);
        const Seen last = seen_by(c, block, (block.to - 1) / c.group_size);
        return {&block, head, std::min(heads_, c.num_kv_heads - head), first.low, last.high, first.low, first.low};
    }

    const AttentionCall &c;
    int64_t heads_, per_block_;
};
