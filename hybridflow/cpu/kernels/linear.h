// Products of few rows with a weight, for one type of elements: see both_types.h.

// y[r, o] = sum over d of x[r, d] w[o, d] for R rows and O outputs. Each sum is taken by lanes, and these are added up
// in the same way whatever R and O are: the bits of a row do not depend on the other rows.
#define FEW(R, O)                                                                                                      \
    static void NAME(few_##R##_##O)(const T *x, i64 x_row, const T *w, i64 w_row, i64 inner, i64 ahead,                \
                                    const float *biases, T *y, i64 y_row) {                                            \
        vf sums[16];                                                                                                   \
        T found[16];                                                                                                   \
        i64 d = 0;                                                                                                     \
        for (int i = 0; i < 16; i++) sums[i] = all(0.0f);                                                              \
        for (; d + NAME(step) <= inner; d += NAME(step)) {                                                             \
            NAME(operand) right[O];                                                                                    \
            for (int o = 0; o < O; o++) right[o] = NAME(get)(w + o * w_row + d);                                       \
            if (ahead)                                                                                                 \
                for (int o = 0; o < O; o++) __builtin_prefetch(w + o * w_row + d + ahead);                             \
            for (int r = 0; r < R; r++) {                                                                              \
                NAME(operand) left = NAME(get)(x + r * x_row + d);                                                     \
                for (int o = 0; o < O; o++) sums[r * O + o] = NAME(add_product)(sums[r * O + o], left, right[o]);      \
            }                                                                                                          \
        }                                                                                                              \
        if (d < inner)                                                                                                 \
            for (int i = 0; i < R * O; i++) {                                                                          \
                NAME(operand) left = NAME(get_some)(x + i / O * x_row + d, inner - d);                                 \
                sums[i] = NAME(add_product)(sums[i], left, NAME(get_some)(w + i % O * w_row + d, inner - d));          \
            }                                                                                                          \
        for (int i = 0; i < 16; i += LANES) NAME(store)(found + i, sums_of(sums + i) + load_float(biases + i));        \
        for (int r = 0; r < R; r++) memcpy(y + r * y_row, found + r * O, O * sizeof(T));                               \
    }
FEW(1, 1)
FEW(2, 1)
FEW(3, 1)
FEW(4, 1)
FEW(1, 4)
FEW(2, 4)
FEW(3, 4)
FEW(4, 4)
#undef FEW

static void NAME(linear)(const Linear *a, i64 first, i64 last) {
    typedef void (*few)(const T *, i64, const T *, i64, i64, i64, const float *, T *, i64);
    static const few one[4] = {NAME(few_1_1), NAME(few_2_1), NAME(few_3_1), NAME(few_4_1)};
    static const few four[4] = {NAME(few_1_4), NAME(few_2_4), NAME(few_3_4), NAME(few_4_4)};
    const T *x = a->x, *weight = a->weight, *bias = a->bias;
    T *y = a->y;
    for (i64 o = first, outputs; o < last; o += outputs) {
        outputs = last - o >= 4 ? 4 : 1;
        const i64 ahead = o + (AHEAD + 1) * outputs <= a->outputs ? AHEAD * outputs * a->weight_row : 0;
        float biases[16] = {0};  // of each output, for one row after the other
        for (int i = 0; bias && i < 16; i++) biases[i] = NAME(some)(bias + o + i % outputs, 1)[0];
        for (i64 r = 0; r < a->rows; r += 4)
            (outputs == 4 ? four : one)[least(4, a->rows - r) - 1](
                x + r * a->x_row, a->x_row, weight + o * a->weight_row, a->weight_row, a->inner, r ? 0 : ahead, biases,
                y + r * a->outputs + o, a->outputs);
    }
}
