// Products of few rows with a weight as it lies, (outputs, inner); `linear.py` says what is passed.

#include <immintrin.h>

#include "calls.h"
#include "products.h"
#include "scratch.h"

#define BLOCK 64  // outputs that a thread takes at a time
#define AHEAD 2   // tiles of outputs that are fetched before they are needed: the weight comes from memory, once
#define MANY 17   // rows for which it pays to turn the weight
#define WIDE 32   // outputs and
#define DEEP 256  // inner dimensions of it that are turned at a time, and stay in the innermost cache

// Always in one instruction: what a compiler makes of a sum and a product depends on what stands around them.
#if LANES == 16
INLINE vf add_product_float(vf sum, vf a, vf b) { return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sum); }
#else
INLINE vf add_product_float(vf sum, vf a, vf b) { return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sum); }
#endif

// What of a row is multiplied at a time.
#define step_float LANES
typedef vf operand_float;
INLINE vf get_float(const float *from) { return load_float(from); }
INLINE vf get_some_float(const float *from, i64 count) { return some_float(from, count); }

#if defined(__AVX512BF16__)
#define step_bfloat16 (2 * LANES)
typedef __m512bh operand_bfloat16;
INLINE __m512bh get_bfloat16(const bfloat16 *from) { return (__m512bh)_mm512_loadu_si512(from); }
INLINE __m512bh get_some_bfloat16(const bfloat16 *from, i64 count) {
    bfloat16 part[2 * LANES] = {0};
    memcpy(part, from, count * sizeof(bfloat16));
    return get_bfloat16(part);
}
INLINE vf add_product_bfloat16(vf sum, __m512bh a, __m512bh b) { return (vf)_mm512_dpbf16_ps((__m512)sum, a, b); }
#else
#define step_bfloat16 LANES
typedef vf operand_bfloat16;
INLINE vf get_bfloat16(const bfloat16 *from) { return load_bfloat16(from); }
INLINE vf get_some_bfloat16(const bfloat16 *from, i64 count) { return some_bfloat16(from, count); }
INLINE vf add_product_bfloat16(vf sum, vf a, vf b) { return add_product_float(sum, a, b); }
#endif

#define BODY "linear.h"
#include "both_types.h"

// For more rows: a piece of the weight is turned, so that outputs lie side by side, and all rows are multiplied with it.
static int linear_turned(const Linear *a, i64 first, i64 last) {
    const float *weight = a->weight, *bias = a->bias;
    float *y = a->y, *piece = scratch_of(WIDE * DEEP);
    if (!piece) return 1;
    for (i64 o = first; o < last; o += WIDE) {
        const i64 width = least(WIDE, last - o), ahead = o + 2 * WIDE <= a->outputs ? WIDE * a->weight_row : 0;
        for (i64 d = 0; d < a->inner; d += DEEP) {
            const i64 depth = least(DEEP, a->inner - d);
            turn(weight + o * a->weight_row + d, a->weight_row, piece, width, depth, ahead);
            product((const float *)a->x + d, a->x_row, 1, piece, width, y + o, a->outputs, a->rows, depth, width, d);
        }
        if (bias)
            for (i64 r = 0; r < a->rows; r++)
                for (i64 i = o; i < o + width; i++) y[r * a->outputs + i] += bias[i];
    }
    return 0;
}

// Called by as many threads as there are, with one `next`.
int hybridflow_linear(const Linear *a) {
    const int turned = !a->bfloat16 && a->rows >= MANY && a->inner % LANES == 0 && a->outputs % LANES == 0;
    for (;;) {
        const i64 first = BLOCK * __atomic_fetch_add(a->next, 1, __ATOMIC_RELAXED);
        if (first >= a->outputs) return 0;
        const i64 last = least(first + BLOCK, a->outputs);
        if (turned) {
            if (linear_turned(a, first, last)) return 1;
        } else {
            (a->bfloat16 ? linear_bfloat16 : linear_float)(a, first, last);
        }
    }
}
