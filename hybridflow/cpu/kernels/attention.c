// Causal attention over packed sequences on a CPU, forward and backward; `attention.py` says what is passed.

#include "scratch.h"
#include "softmax.h"
#include "tiles.h"

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
    i64 units;  // tokens of a stretch, in the mean of an item, from which on the matrix units multiply; 0 for none
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

#ifdef MATRIX_UNITS

#define PRECISE_float 3
#define PRECISE_bfloat16 2
BLOCK_OF(3, 3, 16)
BLOCK_OF(3, 3, 32)
BLOCK_OF(1, 1, 16)
BLOCK_OF(1, 1, 32)
BLOCK_OF(1, 2, 16)
BLOCK_OF(1, 2, 32)
BLOCK_OF(2, 1, 32)
#define of_scores_float by_scores_float
static const block by_scores_float[2] = {block_3_3_16, block_3_3_32};
static const block of_scores_bfloat16[2] = {block_1_1_16, block_1_1_32};
static const block by_scores_bfloat16[2] = {block_1_2_16, block_1_2_32};
#define from_scores_float block_3_3_32
#define from_scores_bfloat16 block_2_1_32

// Which keys `count` queries see, the first of which is number `first` of its stretch: a prompt's, in blocks that are
// filled up to `own` rows of scores, and of its own those up to itself.
typedef struct {
    i64 prompt, own, first, count, rows;
} Seen;
enum { NONE_OF, SOME_OF, ALL };  // of the queries in a vector

static int seen_by(const Seen *seen, i64 row, i64 lane) {
    if (row < seen->own) return row < seen->prompt ? ALL : NONE_OF;
    const i64 after = row - seen->own - seen->first - lane;  // the first query of the vector
    return after <= 0 ? ALL : after < LANES ? SOME_OF : NONE_OF;
}
INLINE vi lanes_of(const Seen *seen, i64 row, i64 lane) { return lanes_from(row - seen->own - seen->first - lane); }

// Blocks of 32 keys of an item.
static i64 key_blocks(const Attention *x, const i64 *item) {
    i64 blocks = 0;
    for (i64 s = item[0]; s < item[0] + item[1]; s++) blocks += (x->stretches[3 * s + 1] + SIDE - 1) / SIDE;
    return blocks;
}

#define BODY "attention_units.h"
#include "both_types.h"

static i64 needed_by_units(const Attention *x) {
    const i64 steps = (x->dims + STEP - 1) / STEP, size = x->bfloat16 ? PIECES_bfloat16 : PIECES_float;
    const i64 precise = x->bfloat16 ? PRECISE_bfloat16 : PRECISE_float;
    const i64 operand = TILE_BYTES / 2 * size, scores = TILE_BYTES / 2 * precise;  // floats of 32 lines
    i64 blocks = 0;
    for (i64 i = 0; i < x->num_items; i++) {
        const i64 of_item = key_blocks(x, x->items + 4 * i);
        blocks = of_item > blocks ? of_item : blocks;
    }
    return x->backward ? (3 * blocks + 4) * steps * operand + 3 * blocks * scores + 2 * blocks * SIDE * SIDE +
                             steps * SIDE * SIDE * (1 + 2 * blocks)
                       : (2 * blocks + 1) * steps * operand + blocks * scores + (blocks + steps) * SIDE * SIDE;
}

#endif

// Floats that the largest item needs.
static i64 needed(const Attention *x) {
    i64 keys = 0, width = up(x->dims, 16);
    for (i64 i = 0; i < x->num_items; i++) keys = x->items[4 * i + 3] > keys ? x->items[4 * i + 3] : keys;
    return x->backward ? 4 * width * keys + 5 * ROWS * width + 2 * ROWS * keys
                       : 2 * width * keys + 3 * ROWS * width + ROWS * keys;
}

typedef void (*run_item)(const Attention *, const i64 *, i64, float *);

// Called by as many threads as there are, with one `next`. 0, or 1 where there is no memory.
int hybridflow_attention(const Attention *x) {
    static const run_item of[2][2] = {{forward_item_float, forward_item_bfloat16},
                                      {backward_item_float, backward_item_bfloat16}};
    run_item run = of[x->backward][x->bfloat16];
    i64 size = needed(x);
#ifdef MATRIX_UNITS
    static const run_item by_units[2][2] = {{forward_item_units_float, forward_item_units_bfloat16},
                                            {backward_item_units_float, backward_item_units_bfloat16}};
    const i64 more = needed_by_units(x);
    size = x->units && more > size ? more : size;
    if (x->units) take_units();
#endif
    float *const scratch = scratch_of(size);
    for (i64 work; scratch && (work = __atomic_fetch_add(x->next, 1, __ATOMIC_RELAXED)) < x->num_items * x->kv_heads;) {
        const i64 *item = x->items + 4 * (work / x->kv_heads);
#ifdef MATRIX_UNITS
        run = (x->units && item[3] >= x->units * item[1] ? by_units : of)[x->backward][x->bfloat16];
#endif
        run(x, item, work % x->kv_heads, scratch);
    }
#ifdef MATRIX_UNITS
    if (x->units) leave_units();
#endif
    return !scratch;
}
