// Attention by the matrix units, for one type of elements: see both_types.h, and attention.h, which does the same.
//
// Keys of a stretch are packed in blocks of 32, the last of which is filled up with zeros. Probabilities and the
// gradients of scores are split into PRECISE pieces, so that they lose nothing that matters in bfloat16 either.

#define OPERAND (2 * TILE_BYTES * NAME(PIECES))  // bytes of 32 lines and 32 inner numbers
#define SCORES (2 * TILE_BYTES * NAME(PRECISE))  // and of what is made of scores

// Keys (keys, dims) and values (dims, keys), or with `backward` keys, values and keys turned.
static void NAME(pack_stretches)(const Attention *x, const i64 *item, i64 kv, i64 steps, char *keys, char *values,
                                 char *keys_turned) {
    for (i64 s = item[0]; s < item[0] + item[1]; s++) {
        const i64 start = x->stretches[3 * s], length = x->stretches[3 * s + 1];
        const i64 bytes = up(length, SIDE) / SIDE * steps * OPERAND;
        const T *key = (const T *)x->key + start * x->key_token + kv * x->key_head;
        const T *value = (const T *)x->value + start * x->value_token + kv * x->value_head;
        NAME(pack_left)(key, x->key_token, 1, length, x->dims, keys);
        if (keys_turned) {
            NAME(pack_left)(value, x->value_token, 1, length, x->dims, values);
            NAME(pack_left)(key, 1, x->key_token, x->dims, length, keys_turned);
            keys_turned += bytes;
        } else {
            NAME(pack_left)(value, 1, x->value_token, x->dims, length, values);
        }
        keys += bytes;
        values += bytes;
    }
}

// scores, scaled -> e^(score - maximum), 0 for keys that a query does not see, packed as the right operand.
static void NAME(softmax_units)(const Seen *seen, const float *scores, float scale, char *packed, float *factors,
                                float *lse, i64 stride) {
    for (i64 l = 0; l < seen->count; l += LANES) {
        vf most = all(-INFINITY), total = all(0.0f);
        for (i64 j = 0; j < seen->rows; j++) {
            const int by = seen_by(seen, j, l);
            const vf score = load_float(scores + SIDE * j + l) * scale;
            if (by) most = larger(by == ALL ? score : either(lanes_of(seen, j, l), score, most), most);
        }
        for (i64 j = 0; j < seen->rows; j += 2) {
            vu pieces[2][3];
            for (int i = 0; i < 2; i++) {
                const int by = seen_by(seen, j + i, l);
                vf e = all(0.0f);
                if (by) e = exponential(load_float(scores + SIDE * (j + i) + l) * scale - most);
                if (by == SOME_OF) e = either(lanes_of(seen, j + i, l), e, all(0.0f));
                total += e;
                split(e, NAME(PRECISE), pieces[i]);
            }
            char *to = packed + j / STEP * SCORES + l / 16 * TILE_BYTES + j % STEP / 2 * 64;
            for (int p = 0; p < NAME(PRECISE); p++)
                store_float((float *)(to + 2 * TILE_BYTES * p), (vf)in_turns(pieces[0][p], pieces[1][p]));
        }
        for (i64 r = l; r < least(seen->count, l + LANES); r++) {
            factors[r] = 1.0f / total[r - l];
            lse[r * stride] = most[r - l] + logf(total[r - l]);
        }
    }
}

// Probabilities p = e^(score - lse) as the left operand, and gradients of scores p (grad - delta) as either.
static void NAME(softmax_backward_units)(const Seen *seen, const float *scores, const float *grads, float scale,
                                         const float *lse, const float *delta, char *left, char *grads_left,
                                         char *grads_right) {
    for (i64 j = 0; j < seen->rows; j += 2) {
        vu of[2][2][3], grads_of[2][2][3];  // by key, half of the queries, piece
        for (int i = 0; i < 2; i++)
            for (int half = 0; half < 2; half++) {
                const i64 l = LANES * half;
                const int by = l < seen->count ? seen_by(seen, j + i, l) : 0;
                vf p = all(0.0f), grad = all(0.0f);
                if (by) p = exponential(load_float(scores + SIDE * (j + i) + l) * scale - load_float(lse + l));
                if (by == SOME_OF) p = either(lanes_of(seen, j + i, l), p, all(0.0f));
                if (by) grad = p * (load_float(grads + SIDE * (j + i) + l) - load_float(delta + l));
                split(p, NAME(PRECISE), of[i][half]);
                split(grad, NAME(PRECISE), grads_of[i][half]);
            }
        for (int p = 0; p < NAME(PRECISE); p++) {
            const i64 block = j / STEP * SCORES + 2 * TILE_BYTES * p;
            for (int i = 0; i < 2; i++) {
                const i64 at = block + (j + i) % STEP / 16 * TILE_BYTES + (j + i) % 16 * 64;
                store_float((float *)(left + at), (vf)one_after_the_other(of[i][0][p], of[i][1][p]));
                store_float((float *)(grads_left + at), (vf)one_after_the_other(grads_of[i][0][p], grads_of[i][1][p]));
            }
            for (int half = 0; half < 2; half++)
                store_float((float *)(grads_right + block + half * TILE_BYTES + j % STEP / 2 * 64),
                            (vf)in_turns(grads_of[0][half][p], grads_of[1][half][p]));
        }
    }
}

// (dims, queries), times a factor a query -> a row of elements a query.
static void NAME(give_turned)(const float *turned, i64 count, const float *factors, i64 dims, T *to, i64 stride) {
    for (i64 d = 0; d < dims; d += LANES)
        for (i64 r = 0; r < count; r += LANES) {
            vf square[LANES];
            for (int l = 0; l < LANES; l++) square[l] = load_float(turned + (d + l) * SIDE + r);
            turn_square(square);
            for (int l = 0; l < least(LANES, count - r); l++)
                NAME(put_some)(to + (r + l) * stride + d, square[l] * factors[r + l], dims - d);
        }
}

static void NAME(forward_item_units)(const Attention *x, const i64 *item, i64 kv, float *scratch) {
    const i64 steps = up(x->dims, STEP) / STEP, group = x->heads / x->kv_heads, blocks = key_blocks(x, item);
    const i64 of_keys = blocks * steps * OPERAND;
    char *keys = (char *)scratch, *values = keys + of_keys, *queries = values + of_keys;
    char *packed = queries + steps * OPERAND;
    float *scores = (float *)(packed + blocks * SCORES), *outputs = scores + blocks * SIDE * SIDE;
    NAME(pack_stretches)(x, item, kv, steps, keys, values, NULL);
    for (i64 s = item[0], own = 0; s < item[0] + item[1]; own += up(x->stretches[3 * s + 1], SIDE) / SIDE, s++) {
        const i64 start = x->stretches[3 * s], length = x->stretches[3 * s + 1], prompt = prompt_length(x, item, s);
        const i64 before = up(prompt, SIDE) / SIDE, own_blocks = up(length, SIDE) / SIDE;
        for (i64 head = kv * group; head < (kv + 1) * group; head++)
            for (i64 first = 0; first < length; first += SIDE) {
                const i64 count = least(SIDE, length - first), token = start + first;
                const i64 see = first / SIDE + 1;  // blocks of its own
                const Seen seen = {prompt, SIDE * before, first, count, SIDE * (before + see)};
                const int wide = count > 16;
                float factors[SIDE];
                NAME(pack_right)((const T *)x->query + token * x->query_token + head * x->query_head, x->query_token, 1,
                                 count, x->dims, queries);
                for (i64 b = 0; b < before + see; b++) {
                    const char *of = keys + (b < before ? b : own + b - before) * steps * OPERAND;
                    NAME(of_scores)[wide](of, queries, steps, NULL, scores + b * SIDE * SIDE, SIDE);
                }
                NAME(softmax_units)(&seen, scores, x->scale, packed, factors, x->lse + token * x->heads + head,
                                    x->heads);
                for (i64 d = 0; d < steps; d++) {
                    float *to = outputs + d * SIDE * SIDE;
                    if (before) NAME(by_scores)[wide](values + d * before * OPERAND, packed, before, NULL, to, SIDE);
                    NAME(by_scores)[wide](values + (own * steps + d * own_blocks) * OPERAND, packed + before * SCORES,
                                          see, before ? to : NULL, to, SIDE);
                }
                NAME(give_turned)(outputs, count, factors, x->dims,
                                  (T *)x->out + (token * x->heads + head) * x->dims, x->heads * x->dims);
            }
    }
}

static void NAME(backward_item_units)(const Attention *x, const i64 *item, i64 kv, float *scratch) {
    const i64 dims = x->dims, steps = up(dims, STEP) / STEP, width = STEP * steps, group = x->heads / x->kv_heads;
    const i64 blocks = key_blocks(x, item), of_keys = blocks * steps * OPERAND, of_queries = steps * OPERAND;
    char *keys = (char *)scratch, *values = keys + of_keys, *keys_turned = values + of_keys;
    char *queries = keys_turned + of_keys, *grads = queries + of_queries, *queries_turned = grads + of_queries;
    char *grads_turned = queries_turned + of_queries, *left = grads_turned + of_queries;
    char *grads_left = left + blocks * SCORES, *grads_right = grads_left + blocks * SCORES;
    float *scores = (float *)(grads_right + blocks * SCORES), *score_grads = scores + blocks * SIDE * SIDE;
    float *outputs = score_grads + blocks * SIDE * SIDE, *key_grads = outputs + width * SIDE;
    float *value_grads = key_grads + blocks * SIDE * width, factors[SIDE];
    for (i64 i = 0; i < SIDE; i++) factors[i] = x->scale;
    NAME(pack_stretches)(x, item, kv, steps, keys, values, keys_turned);
    memset(key_grads, 0, 2 * 4 * blocks * SIDE * width);
    for (i64 s = item[0], own = 0; s < item[0] + item[1]; own += up(x->stretches[3 * s + 1], SIDE) / SIDE, s++) {
        const i64 start = x->stretches[3 * s], length = x->stretches[3 * s + 1], prompt = prompt_length(x, item, s);
        const i64 before = up(prompt, SIDE) / SIDE, own_blocks = up(length, SIDE) / SIDE;
        for (i64 head = kv * group; head < (kv + 1) * group; head++)
            for (i64 first = 0; first < length; first += SIDE) {
                const i64 count = least(SIDE, length - first), token = start + first, see = first / SIDE + 1;
                const i64 flat = (token * x->heads + head) * dims, stride = x->heads * dims;
                const Seen seen = {prompt, SIDE * before, first, count, SIDE * (before + see)};
                const T *query = (const T *)x->query + token * x->query_token + head * x->query_head;
                const T *grad = (const T *)x->grad + flat, *out = (const T *)x->out + flat;
                const int wide = count > 16;
                NAME(pack_right)(query, x->query_token, 1, count, dims, queries);
                NAME(pack_right)(grad, stride, 1, count, dims, grads);
                NAME(pack_right)(query, 1, x->query_token, dims, count, queries_turned);
                NAME(pack_right)(grad, 1, stride, dims, count, grads_turned);
                float lse[SIDE] = {0}, delta[SIDE] = {0};
                for (i64 r = 0; r < count; r++) {
                    vf dots = all(0.0f);
                    for (i64 d = 0; d < dims; d += LANES)
                        dots += NAME(some)(grad + r * stride + d, dims - d) * NAME(some)(out + r * stride + d, dims - d);
                    delta[r] = sum(dots);
                    lse[r] = x->lse[(token + r) * x->heads + head];
                }
                for (i64 b = 0; b < before + see; b++) {
                    const i64 of = (b < before ? b : own + b - before) * steps * OPERAND;
                    NAME(of_scores)[wide](keys + of, queries, steps, NULL, scores + b * SIDE * SIDE, SIDE);
                    NAME(of_scores)[wide](values + of, grads, steps, NULL, score_grads + b * SIDE * SIDE, SIDE);
                }
                NAME(softmax_backward_units)(&seen, scores, score_grads, x->scale, lse, delta, left, grads_left,
                                             grads_right);
                for (i64 d = 0; d < steps; d++) {
                    float *to = outputs + d * SIDE * SIDE;
                    if (before)
                        NAME(by_scores)[wide](keys_turned + d * before * OPERAND, grads_right, before, NULL, to, SIDE);
                    NAME(by_scores)[wide](keys_turned + (own * steps + d * own_blocks) * OPERAND,
                                          grads_right + before * SCORES, see, before ? to : NULL, to, SIDE);
                    for (i64 b = 0; b < before + see; b++) {
                        const i64 at = (b < before ? b : own + b - before) * SIDE * width + d * SIDE;
                        NAME(from_scores)(grads_left + b * SCORES, queries_turned + d * OPERAND, 1, key_grads + at,
                                          key_grads + at, width);
                        NAME(from_scores)(left + b * SCORES, grads_turned + d * OPERAND, 1, value_grads + at,
                                          value_grads + at, width);
                    }
                }
                NAME(give_turned)(outputs, count, factors, dims, (T *)x->query_grad + flat, stride);
            }
    }
    for (i64 i = 0; i < blocks * SIDE * width; i += LANES)
        store_float(key_grads + i, load_float(key_grads + i) * x->scale);
    for (i64 s = item[0], own = 0; s < item[0] + item[1]; own += up(x->stretches[3 * s + 1], SIDE) / SIDE, s++) {
        const i64 length = x->stretches[3 * s + 1], flat = (x->stretches[3 * s] * x->kv_heads + kv) * dims;
        const i64 at = own * SIDE * width, stride = x->kv_heads * dims;
        NAME(give)(key_grads + at, width, length, dims, (T *)x->key_grad + flat, stride);
        NAME(give)(value_grads + at, width, length, dims, (T *)x->value_grad + flat, stride);
    }
}

#undef OPERAND
#undef SCORES
