// Rows of logits, for one type of elements: see both_types.h. `vocabulary.py` has the equations.

// The largest of a row, and sums of what its logits are below it.
static void NAME(sums)(const Vocabulary *a, i64 row) {
    const T *x = (const T *)a->logits + row * a->row;
    const float scale = 1.0f / a->divisors[row * a->divisor];
    vf most = all(-INFINITY), total = all(0.0f), weighted = all(0.0f);
    for (i64 j = 0; j < a->columns; j += LANES)
        most = larger(either(~lanes_from(a->columns - j), NAME(some)(x + j, a->columns - j), all(-INFINITY)), most);
    float peak = most[0];
    for (int l = 1; l < LANES; l++) peak = most[l] > peak ? most[l] : peak;
    peak *= scale;
    for (i64 j = 0; j < a->columns; j += LANES) {
        const vf z = NAME(some)(x + j, a->columns - j) * scale - peak;
        vf e = or_nothing(z), of = e * z;
        if (j + LANES > a->columns) {
            e = either(lanes_from(a->columns - j), all(0.0f), e);
            of = either(lanes_from(a->columns - j), all(0.0f), of);
        }
        total += e;
        weighted += of;
    }
    a->peak[row] = peak;
    a->sums[row] = sum(total);
    a->sums[a->rows + row] = sum(weighted);
    a->sums[2 * a->rows + row] = a->targets[row] < 0 ? 0.0f : NAME(some)(x + a->targets[row], 1)[0] * scale - peak;
}

// The gradient of a row, over its logits; zeros in the padding.
static void NAME(grads)(const Vocabulary *a, i64 row) {
    T *x = (T *)a->logits + row * a->row;
    const float scale = 1.0f / a->divisors[row * a->divisor], normalizer = a->normalizer[row];
    const float of_log_prob = a->grad_log_probs ? a->grad_log_probs[row] : 0.0f;
    const float of_entropy = a->grad_entropy ? a->grad_entropy[row] : 0.0f, entropy = a->entropy[row];
    const i64 target = a->targets[row];
    float at_target = 0;
    for (i64 j = 0; j < a->columns; j += LANES) {
        const vf log_p = NAME(some)(x + j, a->columns - j) * scale - normalizer, p = or_nothing(log_p);
        vf grad = -of_log_prob * p;
        if (a->grad_entropy) grad -= of_entropy * (p * (log_p + entropy));
        grad *= scale;
        if (target >= j && target < j + LANES) at_target = grad[target - j] + of_log_prob * scale;
        NAME(put_some)(x + j, grad, a->columns - j);
    }
    memset(x + a->columns, 0, (a->padded - a->columns) * sizeof(T));
    if (target >= 0) NAME(put_some)(x + target, all(at_target), 1);
}
