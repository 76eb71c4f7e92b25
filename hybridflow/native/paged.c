// Attention of an engine over its cache of keys and values, in blocks, and what writes into the cache (Kwon et al. 2023);
// `paged.py` says what is passed.

#include "scratch.h"
#include "softmax.h"

#define FEW 12      // queries at a time: of the heads that share a key, then of the tokens after
#define MANY 16     // tokens of a sequence, from which on they are multiplied as a matrix
#define TOKENS 16   // that a thread writes into the cache at a time
#define AHEAD 8192  // bytes that are fetched before they are needed

typedef struct {
    const void *query, *key, *value;
    void *cache, *out;
    const int32_t *table;    // (sequences, table_row): the blocks of each sequence in the cache
    const int32_t *starts;   // (sequences + 1,): where the queries of each begin
    const int32_t *lengths;  // (sequences,): keys of each, up to its last query's own
    const i64 *slots;        // (tokens,): block x block_size + place in it, negative for none
    i64 *next;               // the work that no thread has taken yet
    i64 sequences, tokens, longest, table_row;
    i64 heads, kv_heads, dims, block_size;
    i64 query_token, query_head, key_token, key_head, value_token, value_head, out_token, out_head;  // strides,
    i64 cache_block, cache_head;                                                                     // in elements
    i64 bfloat16;
    float scale;
} Paged;

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
