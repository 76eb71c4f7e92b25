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

// Sequences that are computed together: one, or some of one token each whose first `shared` keys are the same memory.
typedef struct {
    i64 first, sequences, shared;
} Run;

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

static i64 tokens_of(const Paged *x, i64 sequence) { return x->starts[sequence + 1] - x->starts[sequence]; }

// Whole blocks in which both sequences have the same tokens, at most `most`.
static i64 shared_blocks(const Paged *x, i64 a, i64 b, i64 most) {
    const int32_t *const of_a = x->table + a * x->table_row, *const of_b = x->table + b * x->table_row;
    const i64 whole = least(most, least(x->lengths[a], x->lengths[b]) / x->block_size);
    i64 count = 0;
    while (count < whole && of_a[count] == of_b[count]) count++;
    return count;
}

// Cut the sequences into runs: samples of one prompt, which are neighbours, as many as are computed at once. One that
// shares less than those before it, as only a system prompt, begins a run of its own.
static i64 cut(const Paged *x, Run *runs) {
    const i64 most = FEW / (x->heads / x->kv_heads);
    i64 count = 0;
    for (i64 first = 0, s; first < x->sequences; first = s) {
        i64 shared = 0;
        for (s = first + 1; s < x->sequences && s - first < most; s++) {
            if (tokens_of(x, first) != 1 || tokens_of(x, s) != 1) break;
            const i64 both = shared_blocks(x, first, s, shared ? shared : x->longest);
            if (!both || both < shared) break;
            shared = both;
        }
        runs[count++] = (Run){first, s - first, shared * x->block_size};
    }
    return count;
}

int hybridflow_paged_attention(const Paged *x) {
    static void (*const many[2])(const Paged *, i64, i64, float *) = {paged_many_float, paged_many_bfloat16};
    static void (*const few[2])(const Paged *, const Run *, i64, i64, i64, i64, i64, float *) = {paged_few_float,
                                                                                                paged_few_bfloat16};
    const i64 row = up(x->longest, x->block_size), group = x->heads / x->kv_heads;
    const i64 pieces = up(FEW * (row / x->block_size) * (i64)sizeof(Piece_float), 64) / 4;
    const i64 size = up(ROWS * (row + 3 * x->dims) + x->block_size * x->dims, 16) + pieces;
    float *const scratch = scratch_of(size + x->sequences * (i64)sizeof(Run) / 4);
    if (!scratch) return 1;
    Run *const runs = (Run *)(scratch + size);
    const i64 count = cut(x, runs);
    // a head of a prompt's keys stays near while one run of its samples after the other is computed
    for (;;) {
        const i64 work = __atomic_fetch_add(x->next, 1, __ATOMIC_RELAXED);
        if (work >= count * x->kv_heads) return 0;
        const i64 kv = work / count, last = work % count == count - 1;
        const Run *const run = runs + work % count;
        const i64 tokens = x->starts[run->first + run->sequences] - x->starts[run->first];
        if (run->sequences == 1 && tokens >= MANY) {
            many[x->bfloat16](x, run->first, kv, scratch);
            continue;
        }
        const i64 after = last ? 0 : run[1].first, kv_after = last ? least(kv + 1, x->kv_heads - 1) : kv;
        for (i64 first = 0; first < tokens * group; first += FEW)
            few[x->bfloat16](x, run, after, kv, kv_after, first, least(FEW, tokens * group - first), scratch);
    }
}
