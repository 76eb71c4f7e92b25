// Attention of an engine over its cache of keys and values, in blocks, and what writes into the cache (Kwon et al. 2023);
// `paged.py` says what is passed.

#include "calls.h"
#include "scratch.h"
#include "softmax.h"

#define FEW 12      // queries at a time: of the heads that share a key, then of the tokens after
#define MANY 16     // tokens of a sequence, from which on they are multiplied as a matrix
#define TOKENS 16   // that a thread writes into the cache at a time
#define FAR 8192    // bytes that are fetched before they are needed, of keys and values
#define NEAR (256 << 10)  // more than these, which would have left the nearest caches again

// scores (count) of one query -> e^(score - maximum), zeros up to `padded`; one over their sum.
static float softmax_of_row(float *scores, i64 count, i64 padded) {
    for (i64 j = count; j < padded; j++) scores[j] = -INFINITY;
    vf most = load_float(scores), total = all(0.0f);
    for (i64 j = LANES; j < padded; j += LANES) most = larger(load_float(scores + j), most);
    float largest = most[0];
    for (int l = 1; l < LANES; l++) largest = most[l] > largest ? most[l] : largest;
    for (i64 j = 0; j < padded; j += LANES) {
        vf x = load_float(scores + j), e = either(x == -INFINITY, all(0.0f), exponential(x - largest));
        store_float(scores + j, e);
        total += e;
    }
    return 1.0f / sum(total);
}

// `count` elements as float32: where they are, or in `to`.
INLINE const float *as_floats_float(const float *from, float *to, i64 count) {
    (void)to, (void)count;
    return from;
}
INLINE const float *as_floats_bfloat16(const bfloat16 *from, float *to, i64 count) {
    for (i64 i = 0; i < count; i += LANES) store_float(to + i, load_bfloat16(from + i));
    return to;
}

#define BODY "paged.h"
#include "both_types.h"

// Both are called by as many threads as there are, with one `next`. 0, or 1 where there is no memory.
int hybridflow_paged_store(const Paged *x) {
    for (;;) {
        const i64 first = TOKENS * __atomic_fetch_add(x->next, 1, __ATOMIC_RELAXED);
        if (first >= x->tokens) return 0;
        (x->bfloat16 ? paged_store_bfloat16 : paged_store_float)(x, first, least(first + TOKENS, x->tokens));
    }
}

int hybridflow_paged_attention(const Paged *x) {
    static void (*const of[2][2])(const Paged *, i64, i64, float *) = {{paged_few_float, paged_few_bfloat16},
                                                                        {paged_many_float, paged_many_bfloat16}};
    const i64 size = ROWS * (up(x->longest, x->block_size) + 3 * x->dims) + x->block_size * x->dims;
    float *const scratch = scratch_of(size);
    if (!scratch) return 1;
    // samples of one prompt are neighbours: a head of the prompt's keys stays near while they are computed
    for (;;) {
        const i64 work = __atomic_fetch_add(x->next, 1, __ATOMIC_RELAXED);
        if (work >= x->sequences * x->kv_heads) return 0;
        const i64 sequence = work % x->sequences;
        const i64 many = x->starts[sequence + 1] - x->starts[sequence] >= MANY;
        of[many][x->bfloat16](x, sequence, work / x->sequences, scratch);
    }
}
