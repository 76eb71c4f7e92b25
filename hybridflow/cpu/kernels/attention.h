// Attention over stretches of tokens, for one type of elements: see both_types.h.
//
// Work is cut into items: a key/value head of a sequence, or of a prompt with all that follow it. What an item writes
// no other does, so that sums do not depend on the number of threads. Scores lie turned, a row for each key, so that
// sums and maxima over keys are sums of vectors.

#include "rows.h"

// The keys and values of an item, a row a token.
static void NAME(take_item)(const Attention *x, const i64 *item, i64 kv, float *keys, float *values, i64 width) {
    for (i64 s = item[0]; s < item[0] + item[1]; s++) {
        const i64 *stretch = x->stretches + 3 * s, start = stretch[0], length = stretch[1], at = stretch[2] * width;
        NAME(take)((const T *)x->key + start * x->key_token + kv * x->key_head, x->key_token, length, length, x->dims,
                   1.0f, keys + at, width);
        NAME(take)((const T *)x->value + start * x->value_token + kv * x->value_head, x->value_token, length, length,
                   x->dims, 1.0f, values + at, width);
    }
}

static void NAME(forward_item)(const Attention *x, const i64 *item, i64 kv, float *scratch) {
    const i64 dims = x->dims, width = up(dims, 16), group = x->heads / x->kv_heads;
    float *keys = scratch, *values = keys + width * item[3], *queries = values + width * item[3];
    float *turned = queries + ROWS * width, *outputs = turned + ROWS * width, *scores = outputs + ROWS * width;
    NAME(take_item)(x, item, kv, keys, values, width);
    for (i64 s = item[0]; s < item[0] + item[1]; s++) {
        const i64 *stretch = x->stretches + 3 * s, start = stretch[0], length = stretch[1], own = stretch[2] * width;
        const i64 prompt = prompt_length(x, item, s);
        for (i64 head = kv * group; head < (kv + 1) * group; head++)
            for (i64 first = 0; first < length; first += ROWS) {
                const i64 count = least(ROWS, length - first), lanes = up(count, 16), seen = first + count;
                NAME(take)((const T *)x->query + (start + first) * x->query_token + head * x->query_head,
                           x->query_token, count, lanes, dims, x->scale, queries, width);
                turn(queries, width, turned, lanes, width, 0);
                product(keys, width, 1, turned, lanes, scores, lanes, prompt, width, lanes, 0);
                product(keys + own, width, 1, turned, lanes, scores + prompt * lanes, lanes, seen, width, lanes, 0);
                float factors[ROWS];
                softmax(scores, prompt, first, count, lanes, factors, x->lse + (start + first) * x->heads + head,
                        x->heads);
                product(scores, 1, lanes, values, width, outputs, width, count, prompt, width, 0);
                product(scores + prompt * lanes, 1, lanes, values + own, width, outputs, width, count, seen, width, 1);
                for (i64 r = 0; r < count; r++)
                    for (i64 d = 0; d < width; d += LANES)
                        store_float(outputs + r * width + d, load_float(outputs + r * width + d) * factors[r]);
                NAME(give)(outputs, width, count, dims, (T *)x->out + ((start + first) * x->heads + head) * dims,
                           x->heads * dims);
            }
    }
}

// Flash attention's backward pass (Dao et al. 2022, algorithm 4), with all scores of a query at once.
static void NAME(backward_item)(const Attention *x, const i64 *item, i64 kv, float *scratch) {
    const i64 dims = x->dims, width = up(dims, 16), group = x->heads / x->kv_heads, all_keys = width * item[3];
    float *keys = scratch, *values = keys + all_keys, *key_grads = values + all_keys;
    float *value_grads = key_grads + all_keys, *queries = value_grads + all_keys, *grads = queries + ROWS * width;
    float *outputs = grads + ROWS * width, *queries_turned = outputs + ROWS * width;
    float *grads_turned = queries_turned + ROWS * width, *scores = grads_turned + ROWS * width;
    float *score_grads = scores + ROWS * item[3];
    NAME(take_item)(x, item, kv, keys, values, width);
    memset(key_grads, 0, 2 * 4 * all_keys);
    for (i64 s = item[0]; s < item[0] + item[1]; s++) {
        const i64 *stretch = x->stretches + 3 * s, start = stretch[0], length = stretch[1], own = stretch[2] * width;
        const i64 prompt = prompt_length(x, item, s);
        for (i64 head = kv * group; head < (kv + 1) * group; head++)
            for (i64 first = 0; first < length; first += ROWS) {
                const i64 count = least(ROWS, length - first), lanes = up(count, 16), token = start + first;
                const i64 flat = (token * x->heads + head) * dims, stride = x->heads * dims;
                NAME(take)((const T *)x->query + token * x->query_token + head * x->query_head, x->query_token, count,
                           lanes, dims, x->scale, queries, width);
                NAME(take)((const T *)x->grad + flat, stride, count, lanes, dims, 1.0f, grads, width);
                NAME(take)((const T *)x->out + flat, stride, count, count, dims, 1.0f, outputs, width);
                turn(queries, width, queries_turned, lanes, width, 0);
                turn(grads, width, grads_turned, lanes, width, 0);
                float lse[ROWS] = {0}, delta[ROWS] = {0};
                for (i64 r = 0; r < count; r++) {
                    vf dots = all(0.0f);
                    for (i64 d = r * width; d < (r + 1) * width; d += LANES)
                        dots += load_float(grads + d) * load_float(outputs + d);
                    delta[r] = sum(dots);
                    lse[r] = x->lse[(token + r) * x->heads + head];
                }
                const i64 seen[2] = {prompt, first + count}, places[2] = {0, own}, rows[2] = {0, prompt * lanes};
                for (int i = 0; i < 2; i++) {
                    product(keys + places[i], width, 1, queries_turned, lanes, scores + rows[i], lanes, seen[i], width,
                            lanes, 0);
                    product(values + places[i], width, 1, grads_turned, lanes, score_grads + rows[i], lanes, seen[i],
                            width, lanes, 0);
                }
                softmax_backward(scores, score_grads, prompt, first, count, lanes, lse, delta);
                for (int i = 0; i < 2; i++) {
                    product(score_grads + rows[i], 1, lanes, keys + places[i], width, outputs, width, count, seen[i],
                            width, i);
                    product(score_grads + rows[i], lanes, 1, queries, width, key_grads + places[i], width, seen[i],
                            count, width, 1);
                    product(scores + rows[i], lanes, 1, grads, width, value_grads + places[i], width, seen[i], count,
                            width, 1);
                }
                for (i64 i = 0; i < count * width; i += LANES)
                    store_float(outputs + i, load_float(outputs + i) * x->scale);
                NAME(give)(outputs, width, count, dims, (T *)x->query_grad + flat, stride);
            }
    }
    for (i64 s = item[0]; s < item[0] + item[1]; s++) {
        const i64 *stretch = x->stretches + 3 * s, flat = (stretch[0] * x->kv_heads + kv) * dims;
        const i64 at = stretch[2] * width, stride = x->kv_heads * dims;
        NAME(give)(key_grads + at, width, stretch[1], dims, (T *)x->key_grad + flat, stride);
        NAME(give)(value_grads + at, width, stretch[1], dims, (T *)x->value_grad + flat, stride);
    }
}
