// What a decoder does to single rows between its matrix products: norm, gated activation, rotation, and storing keys.
// Every kernel rounds to bfloat16 where the torch code beside it does (layers.py, rope.py), and gives the same bits.
#include <cmath>
#include <cstring>

#include "bfloat16.h"
#include "parallel.h"

ParallelFor parallel_for = nullptr;

namespace {

constexpr int64_t MIN_ELEMENTS = 1 << 14;  // fewer are not worth waking a thread for

int64_t rows_per_part(int64_t width) { return (MIN_ELEMENTS + width - 1) / width; }

__m512 squares(const bf16 *at) {
    const __m512 x = load(at, 0xffff);
    return _mm512_mul_ps(x, x);
}

__m256 squares8(const bf16 *at) {
    const __m256i bits = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(at)));
    const __m256 x = _mm256_castsi256_ps(_mm256_slli_epi32(bits, 16));
    return _mm256_mul_ps(x, x);
}

// In the order in which torch sums a row, so that the norm has the same last bit: columns of 8 floats in four
// accumulators, folded into a second level after 16 additions and into a third after 256; then the columns that are
// left over, the accumulators, the numbers that are left over, and the eight lanes one by one.
float sum_of_squares(const bf16 *x, int64_t width) {
    __m512 level[3][2] = {};  // each holds two accumulators
    const int64_t steps = width / 32;
    for (int64_t i = 0; i < steps;) {
        level[0][0] = _mm512_add_ps(level[0][0], squares(x + 32 * i));
        level[0][1] = _mm512_add_ps(level[0][1], squares(x + 32 * i + 16));
        i++;
        for (int upper = 1; upper < 3 && i % (1 << 4 * upper) == 0; upper++)
            for (int half = 0; half < 2; half++) {
                level[upper][half] = _mm512_add_ps(level[upper][half], level[upper - 1][half]);
                level[upper - 1][half] = _mm512_setzero_ps();
            }
    }
    for (int half = 0; half < 2; half++)
        level[0][half] = _mm512_add_ps(_mm512_add_ps(level[0][half], level[1][half]), level[2][half]);
    __m256 sum = _mm512_castps512_ps256(level[0][0]);
    for (int64_t i = 32 * steps; i + 8 <= width; i += 8) sum = _mm256_add_ps(sum, squares8(x + i));
    sum = _mm256_add_ps(sum, _mm512_extractf32x8_ps(level[0][0], 1));
    sum = _mm256_add_ps(sum, _mm512_castps512_ps256(level[0][1]));
    sum = _mm256_add_ps(sum, _mm512_extractf32x8_ps(level[0][1], 1));
    alignas(32) float lanes[8];
    _mm256_store_ps(lanes, sum);
    float total = 0;
    for (int64_t i = width / 8 * 8; i < width; i++) {
        const float number = _mm512_cvtss_f32(load(x + i, 1));
        total += number * number;
    }
    for (float lane : lanes) total += lane;
    return total;
}

void add(bf16 *x, const bf16 *more, int64_t width) {
    for (int64_t i = 0; i < width; i += 16) {
        const __mmask16 mask = first_lanes(width - i);
        store(x + i, mask, _mm512_add_ps(load(x + i, mask), load(more + i, mask)));
    }
}

void normed(const bf16 *x, const bf16 *weight, bf16 *out, int64_t width, float eps) {
    const float mean = sum_of_squares(x, width) / static_cast<float>(width);
    const __m512 scale = _mm512_set1_ps(1.0f / std::sqrt(mean + eps));
    for (int64_t i = 0; i < width; i += 16) {
        const __mmask16 mask = first_lanes(width - i);
        const __m512 unweighted = through_bf16(_mm512_mul_ps(load(x + i, mask), scale));
        store(out + i, mask, _mm512_mul_ps(load(weight + i, mask), unweighted));
    }
}

// e^x by the reduction (x = q ln 2 + s) and polynomial of torch's vector library, so that the last bit is the same.
// Outside [-104, 104] nothing changes any more, but infinity would become NaN.
__m512 exp_of(__m512 x) {
    x = _mm512_min_ps(_mm512_set1_ps(104.0f), _mm512_max_ps(_mm512_set1_ps(-104.0f), x));
    const __m512 q = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.442695040888963407f)), 8);
    __m512 s = _mm512_fmadd_ps(q, _mm512_set1_ps(-0.693145751953125f), x);
    s = _mm512_fmadd_ps(q, _mm512_set1_ps(-1.428606765330187045e-06f), s);
    __m512 u = _mm512_set1_ps(0.000198527617612853646278381f);
    u = _mm512_fmadd_ps(u, s, _mm512_set1_ps(0.00139304355252534151077271f));
    u = _mm512_fmadd_ps(u, s, _mm512_set1_ps(0.00833336077630519866943359f));
    u = _mm512_fmadd_ps(u, s, _mm512_set1_ps(0.0416664853692054748535156f));
    u = _mm512_fmadd_ps(u, s, _mm512_set1_ps(0.166666671633720397949219f));
    u = _mm512_fmadd_ps(u, s, _mm512_set1_ps(0.5f));
    u = _mm512_add_ps(_mm512_set1_ps(1.0f), _mm512_fmadd_ps(_mm512_mul_ps(s, s), u, s));
    return _mm512_scalef_ps(u, q);
}

void gated(const bf16 *gate, const bf16 *up, bf16 *out, int64_t width) {
    const __m512 one = _mm512_set1_ps(1.0f);
    for (int64_t i = 0; i < width; i += 16) {
        const __mmask16 mask = first_lanes(width - i);
        const __m512 x = load(gate + i, mask);
        const __m512 below = _mm512_add_ps(one, exp_of(_mm512_sub_ps(_mm512_setzero_ps(), x)));
        const __m512 silu = through_bf16(_mm512_div_ps(x, below));
        store(out + i, mask, _mm512_mul_ps(silu, load(up + i, mask)));
    }
}

// One half of a head: x cos + swapped sin, all three rounded.
void turned(const bf16 *x, const bf16 *swapped, const bf16 *cos, const bf16 *sin, bf16 *out, int64_t half) {
    for (int64_t i = 0; i < half; i += 16) {
        const __mmask16 mask = first_lanes(half - i);
        const __m512 a = through_bf16(_mm512_mul_ps(load(swapped + i, mask), load(sin + i, mask)));
        const __m512 b = through_bf16(_mm512_mul_ps(load(x + i, mask), load(cos + i, mask)));
        store(out + i, mask, _mm512_add_ps(a, b));
    }
}

}  // namespace

extern "C" {

// Mirrored by kernels.py, as are the others: numbers of elements, not of bytes.
struct NormCall {
    bf16 *x;  // changed if there is more
    const bf16 *weight, *more;  // more is added to x before it is normed; null or of x's form
    bf16 *out;
    int64_t num_rows, num_heads, width, row_stride, head_stride, weight_stride, more_stride;
    float eps;
};

struct GateCall {
    const bf16 *gate, *up;
    bf16 *out;
    int64_t num_rows, width, row_stride;
};

struct RotateCall {
    const bf16 *x, *cos, *sin;
    bf16 *out;
    int64_t num_rows, num_heads, head_dim, rotary_dim, row_stride;
};

struct WriteCall {
    const bf16 *k, *v;
    bf16 *k_pages, *v_pages;
    const int64_t *pages, *offsets;
    int64_t num_rows, row, k_stride, v_stride, page_stride, num_pages, page_size;
};

int64_t rms_norm(const NormCall *call) {
    const NormCall c = *call;
    in_parts(c.num_rows, rows_per_part(c.num_heads * c.width), [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i++) {
            if (c.more) add(c.x + i * c.row_stride, c.more + i * c.more_stride, c.width);
            for (int64_t head = 0; head < c.num_heads; head++)
                normed(c.x + i * c.row_stride + head * c.head_stride, c.weight + head * c.weight_stride,
                       c.out + (i * c.num_heads + head) * c.width, c.width, c.eps);
        }
    });
    return c.num_rows;
}

int64_t silu_mul(const GateCall *call) {
    const GateCall c = *call;
    in_parts(c.num_rows, rows_per_part(c.width), [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i++)
            gated(c.gate + i * c.row_stride, c.up + i * c.row_stride, c.out + i * c.width, c.width);
    });
    return c.num_rows;
}

int64_t rotate(const RotateCall *call) {
    const RotateCall c = *call;
    const int64_t half = c.rotary_dim / 2, rest = c.head_dim - c.rotary_dim;
    in_parts(c.num_rows, rows_per_part(c.num_heads * c.head_dim), [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i++) {
            const bf16 *cos = c.cos + i * c.rotary_dim, *sin = c.sin + i * c.rotary_dim;
            for (int64_t head = 0; head < c.num_heads; head++) {
                const bf16 *x = c.x + i * c.row_stride + head * c.head_dim;
                bf16 *out = c.out + (i * c.num_heads + head) * c.head_dim;
                turned(x, x + half, cos, sin, out, half);
                turned(x + half, x, cos + half, sin + half, out + half, half);
                if (rest) std::memcpy(out + c.rotary_dim, x + c.rotary_dim, rest * sizeof(bf16));
            }
        }
    });
    return c.num_rows;
}

// How many rows were written: up to the first whose page or offset does not exist.
int64_t write_kv(const WriteCall *call) {
    const WriteCall c = *call;
    for (int64_t i = 0; i < c.num_rows; i++) {
        if (c.pages[i] < 0 || c.pages[i] >= c.num_pages || c.offsets[i] < 0 || c.offsets[i] >= c.page_size) return i;
        const int64_t at = c.pages[i] * c.page_stride + c.offsets[i] * c.row;
        std::memcpy(c.k_pages + at, c.k + i * c.k_stride, c.row * sizeof(bf16));
        std::memcpy(c.v_pages + at, c.v + i * c.v_stride, c.row * sizeof(bf16));
    }
    return c.num_rows;
}

void set_parallel_for(ParallelFor function) { parallel_for = function; }

int32_t cpu_has_instructions() {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512bf16");
}

const char *source_digest() { return SOURCE_DIGEST; }
}
