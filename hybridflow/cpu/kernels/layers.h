// Norms and activations of rows, for one type of elements: see both_types.h. `layers.py` has the equations.

static void NAME(rms_norm)(const Rows *a, i64 first, i64 last) {
    const i64 columns = a->columns;
    for (i64 row = first; row < last; row++) {
        const T *x = (const T *)a->x + row * columns;
        T *y = (T *)a->y + row * columns;
        vf squares[4] = {all(0.0f), all(0.0f), all(0.0f), all(0.0f)};
        for (i64 d = 0; d < columns; d += 4 * LANES)
            for (int i = 0; i < 4; i++) {
                vf part = NAME(some)(x + d + i * LANES, columns - d - i * LANES);
                squares[i] += part * part;
            }
        const float r = 1.0f / sqrtf(sum((squares[0] + squares[1]) + (squares[2] + squares[3])) / columns + a->eps);
        a->r[row] = r;
        for (i64 d = 0; d < columns; d += LANES) {
            vf weight = NAME(some)((const T *)a->weight + d, columns - d);
            NAME(put_some)(y + d, NAME(rounded)(NAME(some)(x + d, columns - d) * r) * weight, columns - d);
        }
    }
}

// sum = x + what stands beside it, or sum += x; y is its norm.
static void NAME(add_rms_norm)(const Rows *a, i64 first, i64 last) {
    const i64 columns = a->columns;
    Rows of_sum = *a;
    of_sum.x = a->sum;
    for (i64 row = first; row < last; row++) {
        const T *x = (const T *)a->x + row * columns;
        T *sum = (T *)a->sum + row * columns;
        const T *other = a->beside ? (const T *)a->beside + row * columns : sum;
        for (i64 d = 0; d < columns; d += LANES)
            NAME(put_some)(sum + d, NAME(some)(other + d, columns - d) + NAME(some)(x + d, columns - d), columns - d);
        NAME(rms_norm)(&of_sum, row, row + 1);
    }
}

static void NAME(rms_norm_backward)(const Rows *a, i64 first, i64 last) {
    const i64 columns = a->columns;
    float *of_weight = a->grad_weight + first / BLOCK * columns;
    memset(of_weight, 0, 4 * columns);
    for (i64 row = first; row < last; row++) {
        const T *x = (const T *)a->x + row * columns, *grad = (const T *)a->grad + row * columns;
        T *grad_x = (T *)a->grad_x + row * columns;
        const float r = a->r[row];
        vf dots = all(0.0f);
        for (i64 d = 0; d < columns; d += LANES) {
            vf product = NAME(some)(grad + d, columns - d) * (NAME(some)(x + d, columns - d) * r);
            put_some_float(of_weight + d, some_float(of_weight + d, columns - d) + product, columns - d);
            dots += product * NAME(some)((const T *)a->weight + d, columns - d);
        }
        const float mean = sum(dots) / columns;
        const T *beside = a->beside ? (const T *)a->beside + row * columns : NULL;
        for (i64 d = 0; d < columns; d += LANES) {
            vf scaled = NAME(some)(grad + d, columns - d) * NAME(some)((const T *)a->weight + d, columns - d);
            vf of_x = (scaled - NAME(some)(x + d, columns - d) * (r * mean)) * r;
            if (beside) of_x += NAME(some)(beside + d, columns - d);
            NAME(put_some)(grad_x + d, of_x, columns - d);
        }
    }
}

static void NAME(swiglu)(const Rows *a, i64 first, i64 last) {
    const i64 columns = a->columns;
    for (i64 row = first; row < last; row++) {
        const T *gates = (const T *)a->x + 2 * row * columns, *ups = gates + columns;
        T *y = (T *)a->y + row * columns;
        for (i64 d = 0; d < columns; d += LANES) {
            vf gate = NAME(some)(gates + d, columns - d), up = NAME(some)(ups + d, columns - d);
            NAME(put_some)(y + d, NAME(rounded)(gate * sigmoid(gate)) * up, columns - d);
        }
    }
}

static void NAME(swiglu_backward)(const Rows *a, i64 first, i64 last) {
    const i64 columns = a->columns;
    for (i64 row = first; row < last; row++) {
        const T *gates = (const T *)a->x + 2 * row * columns, *ups = gates + columns;
        const T *grads = (const T *)a->grad + row * columns;
        T *of_gate = (T *)a->grad_x + 2 * row * columns, *of_up = of_gate + columns;
        for (i64 d = 0; d < columns; d += LANES) {
            vf gate = NAME(some)(gates + d, columns - d), up = NAME(some)(ups + d, columns - d);
            vf grad = NAME(some)(grads + d, columns - d), open = sigmoid(gate), silu = gate * open;
            NAME(put_some)(of_gate + d, grad * up * (open + silu * (1.0f - open)), columns - d);
            NAME(put_some)(of_up + d, grad * silu, columns - d);
        }
    }
}

// (a, b) -> (a cos - b sin, b cos + a sin), a the first `turning` columns of each head and b the next; others stay. y may
// be x.
static void NAME(rotate)(const Rows *a, i64 first, i64 last) {
    const i64 half = a->turning;
    for (i64 token = first; token < last; token++) {
        const T *cosines = (const T *)a->cos + token * half, *sines = (const T *)a->sin + token * half;
        for (i64 i = 0; i < a->groups * a->heads; i++) {
            const i64 group = i / a->heads, head = i % a->heads;
            const T *x = (const T *)a->x + token * a->x_token + group * a->x_group + head * a->columns;
            T *y = (T *)a->y + token * a->y_token + group * a->y_group + head * a->columns;
            for (i64 d = 0; d < half; d += LANES) {
                vf left = NAME(some)(x + d, half - d), right = NAME(some)(x + half + d, half - d);
                vf cosine = NAME(some)(cosines + d, half - d), sine = NAME(some)(sines + d, half - d);
                NAME(put_some)(y + d, left * cosine - right * sine, half - d);
                NAME(put_some)(y + half + d, right * cosine + left * sine, half - d);
            }
            if (y != x) memcpy(y + 2 * half, x + 2 * half, (a->columns - 2 * half) * sizeof(T));
        }
    }
}
