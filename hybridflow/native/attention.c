// Causal attention over packed sequences on a CPU, forward and backward; `attention.py` says what is passed.

#include "scratch.h"
#include "softmax.h"

typedef struct {
    const void *query, *key, *value, *out, *grad;
    void *query_grad, *key_grad, *value_grad;
    float *lse;            // (tokens, heads)
    const i64 *stretches;  // (stretches, 3): first token, length, the place of its first key among those of its item
    const i64 *items;      // (items, 4): first stretch, how many, whether the others follow the first, all their tokens
    i64 *next;             // the work that no thread has taken yet
    i64 num_items, heads, kv_heads, dims;
    i64 query_token, query_head, key_token, key_head, value_token, value_head;  // strides, in elements
    i64 bfloat16, backward;
    float scale;
} Attention;

// Of the prompt that a stretch follows, whose keys are the first of its item; 0 if it follows none.
static i64 prompt_length(const Attention *x, const i64 *item, i64 stretch) {
    return item[2] && stretch > item[0] ? x->stretches[3 * item[0] + 1] : 0;
}

// scores -> probabilities p = e^(score - lse), 0 for keys after the query; grads, of probabilities -> of scores:
// p (grad - delta).
static void softmax_backward(float *scores, float *grads, i64 prompt, i64 first, i64 count, i64 lanes,
                             const float *lse, const float *delta) {
    const i64 all_see = prompt + first + 1, rows = prompt + first + count;
    for (i64 l = 0; l < lanes; l += LANES) {
        vf of_lse = load_float(lse + l), of_delta = load_float(delta + l);
        for (i64 j = 0; j < rows; j++) {
            vf p = exponential(load_float(scores + j * lanes + l) - of_lse);
            if (j >= all_see) p = either(lanes_from(j - all_see + 1 - l), p, all(0.0f));
            store_float(scores + j * lanes + l, p);
            store_float(grads + j * lanes + l, p * (load_float(grads + j * lanes + l) - of_delta));
        }
    }
}

#define BODY "attention.h"
#include "both_types.h"

// Floats that the largest item needs.
static i64 needed(const Attention *x) {
    i64 keys = 0, width = up(x->dims, 16);
    for (i64 i = 0; i < x->num_items; i++) keys = x->items[4 * i + 3] > keys ? x->items[4 * i + 3] : keys;
    return x->backward ? 4 * width * keys + 5 * ROWS * width + 2 * ROWS * keys
                       : 2 * width * keys + 3 * ROWS * width + ROWS * keys;
}

// Called by as many threads as there are, with one `next`. 0, or 1 where there is no memory.
int hybridflow_attention(const Attention *x) {
    float *const scratch = scratch_of(needed(x));
    if (!scratch) return 1;
    void (*const run)(const Attention *, const i64 *, i64, float *) =
        x->backward ? (x->bfloat16 ? backward_item_bfloat16 : backward_item_float)
                    : (x->bfloat16 ? forward_item_bfloat16 : forward_item_float);
    for (;;) {
        const i64 work = __atomic_fetch_add(x->next, 1, __ATOMIC_RELAXED);
        if (work >= x->num_items * x->kv_heads) return 0;
        run(x, x->items + 4 * (work / x->kv_heads), work % x->kv_heads, scratch);
    }
}
