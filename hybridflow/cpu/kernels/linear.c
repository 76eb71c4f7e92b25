// Products of few rows with a weight as it lies, (outputs, inner); `linear.py` says what is passed.

#include <immintrin.h>

#include "calls.h"
#include "scratch.h"
#include "tiles.h"

#define BLOCK 64  // outputs that a thread takes at a time
#define AHEAD 2   // tiles of outputs that are fetched before they are needed: the weight comes from memory, once
#define MANY (FETCHES ? 9 : 17)  // rows for which it pays to turn the weight, in float32
#define MANY_PAIRS 16            // and in bfloat16
#define WIDE 32   // outputs and
#define DEEP 256  // inner dimensions of it that are turned at a time, and stay in the innermost cache

// What of a row is multiplied at a time.
#define step_float LANES
typedef vf operand_float;
INLINE vf get_float(const float *from) { return load_float(from); }
INLINE vf get_some_float(const float *from, i64 count) { return some_float(from, count); }

#if defined(__AVX512BF16__)
#define step_bfloat16 (2 * LANES)
typedef __m512bh operand_bfloat16;
INLINE __m512bh get_bfloat16(const bfloat16 *from) { return (__m512bh)_mm512_loadu_si512(from); }
INLINE __m512bh get_some_bfloat16(const bfloat16 *from, i64 count) {
    bfloat16 part[2 * LANES] = {0};
    memcpy(part, from, count * sizeof(bfloat16));
    return get_bfloat16(part);
}
INLINE vf add_product_bfloat16(vf sum, __m512bh a, __m512bh b) { return (vf)_mm512_dpbf16_ps((__m512)sum, a, b); }
#else
#define step_bfloat16 LANES
typedef vf operand_bfloat16;
INLINE vf get_bfloat16(const bfloat16 *from) { return load_bfloat16(from); }
INLINE vf get_some_bfloat16(const bfloat16 *from, i64 count) { return some_bfloat16(from, count); }
INLINE vf add_product_bfloat16(vf sum, vf a, vf b) { return add_product_float(sum, a, b); }
#endif

#define BODY "linear.h"
#include "both_types.h"

#if WIDE == 2 * LANES
// Tiles that fetch a kilobyte of one row ahead, then of the next: what comes from memory comes while they multiply.
#define LINES (DEEP / 16)  // of a row
#define FETCHING(R) TILE_THAT(fetching_##R, R, 2, __builtin_prefetch(ahead + p / LINES * ahead_row + p % LINES * 16))
FETCHING(12)
FETCHING(8)
FETCHING(6)
FETCHING(4)
FETCHING(3)
FETCHING(2)
FETCHING(1)
static const tile fetching[7] = {fetching_12, fetching_8, fetching_6, fetching_4, fetching_3, fetching_2, fetching_1};

// y (+)= x of DEEP columns times a piece, while `ahead` is fetched, a piece of as many rows and columns.
static void product_fetching(const Linear *a, const float *x, const float *piece, float *y, int add, const float *ahead) {
    i64 r = 0, fetched = 0;
    for (int h = a->rows == heights[0] ? 2 : 0; h < 7; h++)  // two tiles at least, which fetch half of it each
        for (; r + heights[h] <= a->rows; r += heights[h], fetched += DEEP / LINES) {
            const int more = fetched < WIDE;  // else a line that is there
            fetching[h](x + r * a->x_row, a->x_row, 1, piece, WIDE, y + r * a->outputs, a->outputs, DEEP, add,
                        more ? ahead + fetched * a->weight_row : piece, more ? a->weight_row : 0);
        }
}
#define FETCHES 1
#else
#define FETCHES 0
static void product_fetching(const Linear *a, const float *x, const float *piece, float *y, int add, const float *ahead) {
    (void)a, (void)x, (void)piece, (void)y, (void)add, (void)ahead;
}
#endif

// For more rows: a piece of the weight is turned, so that outputs lie side by side, and all rows are multiplied with it.
static int linear_turned(const Linear *a, i64 first, i64 last) {
    const float *bias = a->bias;
    float *y = a->y, *piece = scratch_of(WIDE * DEEP);
    if (!piece) return 1;
    for (i64 o = first; o < last; o += WIDE) {
        const i64 width = least(WIDE, last - o), ahead = o + 2 * WIDE <= a->outputs ? WIDE * a->weight_row : 0;
        for (i64 d = 0; d < a->inner; d += DEEP) {
            const i64 depth = least(DEEP, a->inner - d);
            const float *const weight = (const float *)a->weight + o * a->weight_row + d, *x = (const float *)a->x + d;
            const int fetches = FETCHES && ahead && depth == DEEP;
            turn(weight, a->weight_row, piece, width, depth, fetches ? 0 : ahead);
            if (fetches) product_fetching(a, x, piece, y + o, d > 0, weight + ahead);
            else product(x, a->x_row, 1, piece, width, y + o, a->outputs, a->rows, depth, width, d > 0);
        }
        if (bias)
            for (i64 r = 0; r < a->rows; r++)
                for (i64 i = o; i < o + width; i++) y[r * a->outputs + i] += bias[i];
    }
    return 0;
}

#if FETCHES && defined(__AVX512BF16__)
// The same of bfloat16: two that are neighbours in the inner dimension are turned, and multiplied, as one float32 would.
#define PAIRS 128                // that are turned at a time
#define PAIR_LINES (PAIRS / 16)  // of a row

// sums (R, WIDE) (+)= x of `pairs` pairs times a piece.
#define PAIRED(R)                                                                                                      \
    static void paired_##R(const bfloat16 *x, i64 x_row, const float *piece, float *y, i64 pairs, int add,             \
                           const bfloat16 *ahead, i64 ahead_row) {                                                     \
        vf sums[R][2];                                                                                                 \
        for (int r = 0; r < R; r++)                                                                                    \
            for (int v = 0; v < 2; v++) sums[r][v] = add ? load_float(y + r * WIDE + v * LANES) : all(0.0f);           \
        for (i64 p = 0; p < pairs; p++) {                                                                              \
            __m512bh right[2];                                                                                         \
            __builtin_prefetch(ahead + p / PAIR_LINES * ahead_row + p % PAIR_LINES * 32);                              \
            for (int v = 0; v < 2; v++) right[v] = (__m512bh)load_float(piece + p * WIDE + v * LANES);                 \
            for (int r = 0; r < R; r++) {                                                                              \
                int pair;                                                                                              \
                memcpy(&pair, x + r * x_row + 2 * p, sizeof pair);                                                     \
                const __m512bh left = (__m512bh)_mm512_set1_epi32(pair);                                               \
                for (int v = 0; v < 2; v++) sums[r][v] = add_product_bfloat16(sums[r][v], left, right[v]);             \
            }                                                                                                          \
        }                                                                                                              \
        for (int r = 0; r < R; r++)                                                                                    \
            for (int v = 0; v < 2; v++) store_float(y + r * WIDE + v * LANES, sums[r][v]);                             \
    }
PAIRED(12)
PAIRED(8)
PAIRED(6)
PAIRED(4)
PAIRED(3)
PAIRED(2)
PAIRED(1)
typedef void (*paired)(const bfloat16 *, i64, const float *, float *, i64, int, const bfloat16 *, i64);
static const paired of_pairs[7] = {paired_12, paired_8, paired_6, paired_4, paired_3, paired_2, paired_1};

// sums (rows, WIDE) (+)= x of `pairs` pairs times a piece, while `ahead`, if it is there, is fetched.
static void product_of_pairs(const Linear *a, const bfloat16 *x, const float *piece, float *sums, i64 pairs, int add,
                             const bfloat16 *ahead) {
    i64 r = 0, fetched = 0;
    for (int h = a->rows == heights[0] ? 2 : 0; h < 7; h++)  // two tiles at least, which fetch half of it each
        for (; r + heights[h] <= a->rows; r += heights[h], fetched += PAIRS / PAIR_LINES) {
            const int more = ahead && fetched < WIDE;  // else a line that is there
            of_pairs[h](x + r * a->x_row, a->x_row, piece, sums + r * WIDE, pairs, add,
                        more ? ahead + fetched * a->weight_row : x, more ? a->weight_row : 0);
        }
}

static int linear_of_pairs(const Linear *a, i64 first, i64 last) {
    float *const piece = scratch_of(WIDE * (PAIRS + a->rows)), *const sums = piece + WIDE * PAIRS;
    if (!piece) return 1;
    for (i64 o = first; o < last; o += WIDE) {
        const i64 ahead = o + 2 * WIDE <= a->outputs ? WIDE * a->weight_row : 0;
        for (i64 d = 0; d < a->inner; d += 2 * PAIRS) {
            const i64 pairs = least(PAIRS, (a->inner - d) / 2);
            const bfloat16 *const weight = (const bfloat16 *)a->weight + o * a->weight_row + d;
            const int fetches = ahead && pairs == PAIRS;
            turn((const float *)weight, a->weight_row / 2, piece, WIDE, pairs, fetches ? 0 : ahead / 2);
            product_of_pairs(a, (const bfloat16 *)a->x + d, piece, sums, pairs, d > 0, fetches ? weight + ahead : NULL);
        }
        for (i64 r = 0; r < a->rows; r++)
            for (i64 i = 0; i < WIDE; i += LANES) {
                const vf bias = a->bias ? load_bfloat16((const bfloat16 *)a->bias + o + i) : all(0.0f);
                store_bfloat16((bfloat16 *)a->y + r * a->outputs + o + i, load_float(sums + r * WIDE + i) + bias);
            }
    }
    return 0;
}
static int has_pairs(const Linear *a) { return a->inner % 32 == 0 && a->outputs % WIDE == 0 && a->weight_row % 2 == 0; }
#else
static int linear_of_pairs(const Linear *a, i64 first, i64 last) {
    (void)a, (void)first, (void)last;
    return 1;
}
static int has_pairs(const Linear *a) {
    (void)a;
    return 0;
}
#endif

#ifdef MATRIX_UNITS

BLOCK_OF(3, 3, 16)
BLOCK_OF(3, 3, 32)
BLOCK_OF(1, 1, 16)
BLOCK_OF(1, 1, 32)

// A block of 32 outputs whose weights are read where they lie.
#define LYING(n)                                                                                                       \
    static void lying_##n(const bfloat16 *weight, i64 row, i64 ahead, const char *b, i64 steps, float *sums) {         \
        TILE_ZERO(0);                                                                                                  \
        TILE_ZERO(1);                                                                                                  \
        TILE_ZERO(2);                                                                                                  \
        TILE_ZERO(3);                                                                                                  \
        for (; steps; steps--, weight += STEP, b += 2 * TILE_BYTES) {                                                  \
            TILE_LOAD(4, weight, 2 * row);                                                                             \
            TILE_LOAD(5, weight + 16 * row, 2 * row);                                                                  \
            RIGHT_##n(0) DOTS_##n                                                                                      \
            if (ahead)                                                                                                 \
                for (int i = 0; i < SIDE; i++) __builtin_prefetch(weight + i * row + ahead);                           \
        }                                                                                                              \
        TILE_STORE(0, sums, 4 * SIDE);                                                                                 \
        TILE_STORE(2, sums + 16 * SIDE, 4 * SIDE);                                                                     \
        if (n == 32) TILE_STORE(1, sums + 16, 4 * SIDE);                                                               \
        if (n == 32) TILE_STORE(3, sums + 16 * SIDE + 16, 4 * SIDE);                                                   \
    }
LYING(16)
LYING(32)

// 32 outputs of a weight, packed; what lies `ahead` is fetched for a later call.
static void pack_outputs(const float *weight, i64 row, i64 outputs, i64 inner, i64 ahead, char *to) {
    for (i64 d = 0; d < inner; d += STEP, to += 2 * TILE_BYTES * PIECES_float) {
        for (int i = 0; ahead && i < SIDE; i++) {
            __builtin_prefetch(weight + i * row + d + ahead);
            __builtin_prefetch(weight + i * row + d + ahead + 16);
        }
        pack_left_float(weight + d, row, 1, outputs, least(STEP, inner - d), to);
    }
}

// Lines `first` to `last` of 32, of one step; what lies `ahead` is fetched for a later call.
INLINE void pack_lines(const float *weight, i64 row, i64 ahead, int first, int last, char *to) {
    for (int i = first; i < last; i++) {
        vu of[3];
        along_float(weight + i * row, STEP, 3, of);
        if (ahead) __builtin_prefetch(weight + i * row + ahead);
        if (ahead) __builtin_prefetch(weight + i * row + ahead + 16);
        for (int p = 0; p < 3; p++)
            store_float((float *)(to + 2 * TILE_BYTES * p + TILE_BYTES * (i / 16) + 64 * (i % 16)), (vf)of[p]);
    }
}

// A block of 32 outputs. While one step of it is multiplied the next one is packed, at last the first of `next`, if
// there is one: the units need few instructions. packed: two steps, of which the one that is `now` has been packed.
#define PACKING(n)                                                                                                     \
    static int packing_##n(const float *weight, const float *next, i64 row, i64 ahead, const char *b, i64 steps,       \
                           float *sums, char *packed, int now) {                                                       \
        TILE_ZERO(0);                                                                                                  \
        TILE_ZERO(1);                                                                                                  \
        TILE_ZERO(2);                                                                                                  \
        TILE_ZERO(3);                                                                                                  \
        for (; steps; steps--, b += 6 * TILE_BYTES, now = !now) {                                                      \
            const float *from = steps > 1 ? weight += STEP : next;                                                     \
            const int none = !from;                                                                                    \
            const char *a = packed + 6 * TILE_BYTES * now;                                                             \
            char *to = packed + 6 * TILE_BYTES * !now;                                                                 \
            LEFT(0) RIGHT_##n(2) DOTS_##n pack_lines(from, row, ahead, 0, none ? 0 : 6, to);                           \
            RIGHT_##n(1) DOTS_##n pack_lines(from, row, ahead, 6, none ? 0 : 11, to);                                  \
            LEFT(1) DOTS_##n pack_lines(from, row, ahead, 11, none ? 0 : 16, to);                                      \
            RIGHT_##n(0) DOTS_##n pack_lines(from, row, ahead, 16, none ? 0 : 22, to);                                 \
            LEFT(2) DOTS_##n pack_lines(from, row, ahead, 22, none ? 0 : 27, to);                                      \
            LEFT(0) DOTS_##n pack_lines(from, row, ahead, 27, none ? 0 : 32, to);                                      \
        }                                                                                                              \
        TILE_STORE(0, sums, 4 * SIDE);                                                                                 \
        TILE_STORE(2, sums + 16 * SIDE, 4 * SIDE);                                                                     \
        if (n == 32) TILE_STORE(1, sums + 16, 4 * SIDE);                                                               \
        if (n == 32) TILE_STORE(3, sums + 16 * SIDE + 16, 4 * SIDE);                                                   \
        return now;                                                                                                    \
    }
PACKING(16)
PACKING(32)

// Sums (outputs, rows) + biases -> y (rows, outputs).
static void give_outputs(const Linear *a, const float *sums, i64 first, i64 outputs, i64 row, i64 rows) {
    for (i64 o = 0; o < outputs; o += LANES)
        for (i64 r = 0; r < rows; r += LANES) {
            const i64 count = least(LANES, outputs - o);
            vf square[LANES], bias = all(0.0f);
            if (a->bias)
                bias = a->bfloat16 ? some_bfloat16((const bfloat16 *)a->bias + first + o, count)
                                   : some_float((const float *)a->bias + first + o, count);
            for (int l = 0; l < LANES; l++) square[l] = load_float(sums + (o + l) * SIDE + r);
            turn_square(square);
            for (int l = 0; l < least(LANES, rows - r); l++) {
                const i64 at = (row + r + l) * a->outputs + first + o;
                if (a->bfloat16) put_some_bfloat16((bfloat16 *)a->y + at, square[l] + bias, count);
                else put_some_float((float *)a->y + at, square[l] + bias, count);
            }
        }
}

// The outputs that a thread takes after those from `o` on, 32 at a time; at least `a->outputs` where there are no more.
static i64 outputs_after(const Linear *a, i64 o) {
    if (o >= 0 && (o + SIDE) % BLOCK && o + SIDE < a->outputs) return o + SIDE;
    return BLOCK * __atomic_fetch_add(a->next, 1, __ATOMIC_RELAXED);
}

// What lies two blocks further on in memory, if that is of the weight.
static i64 ahead_of(const Linear *a, i64 o) { return o + 2 * SIDE <= a->outputs ? SIDE * a->weight_row : 0; }

static void lying_by_units(const Linear *a, const char *right, i64 of_rows, char *left, float *sums) {
    const i64 steps = (a->inner + STEP - 1) / STEP;
    for (i64 o = outputs_after(a, -1); o < a->outputs; o = outputs_after(a, o)) {
        const bfloat16 *weight = (const bfloat16 *)a->weight + o * a->weight_row;
        const i64 outputs = least(SIDE, a->outputs - o), ahead = ahead_of(a, o);
        const int lies = outputs == SIDE && a->inner % STEP == 0;
        if (!lies) pack_left_bfloat16(weight, a->weight_row, 1, outputs, a->inner, left);
        for (i64 r = 0; r < a->rows; r += SIDE) {
            const i64 rows = least(SIDE, a->rows - r);
            const char *of = right + r / SIDE * of_rows;
            if (lies) (rows > 16 ? lying_32 : lying_16)(weight, a->weight_row, r ? 0 : ahead, of, steps, sums);
            else (rows > 16 ? block_1_1_32 : block_1_1_16)(left, of, steps, NULL, sums, SIDE);
            give_outputs(a, sums, o, outputs, r, rows);
        }
    }
}

static void packed_by_units(const Linear *a, const char *right, i64 of_rows, char *left, float *sums) {
    const i64 steps = (a->inner + STEP - 1) / STEP;
    for (i64 o = outputs_after(a, -1); o < a->outputs; o = outputs_after(a, o)) {
        const i64 outputs = least(SIDE, a->outputs - o);
        pack_outputs((const float *)a->weight + o * a->weight_row, a->weight_row, outputs, a->inner, ahead_of(a, o), left);
        for (i64 r = 0; r < a->rows; r += SIDE) {
            const i64 rows = least(SIDE, a->rows - r);
            (rows > 16 ? block_3_3_32 : block_3_3_16)(left, right + r / SIDE * of_rows, steps, NULL, sums, SIDE);
            give_outputs(a, sums, o, outputs, r, rows);
        }
    }
}

// The same of whole blocks.
static void packing_by_units(const Linear *a, const char *right, i64 of_rows, char *left, float *sums) {
    const i64 row = a->weight_row;
    int now = 0;
    i64 o = outputs_after(a, -1);
    if (o < a->outputs) pack_lines((const float *)a->weight + o * row, row, ahead_of(a, o), 0, 32, left);
    while (o < a->outputs) {
        const i64 after = outputs_after(a, o);
        const float *const weight = (const float *)a->weight + o * row;
        for (i64 r = 0; r < a->rows; r += SIDE) {
            const i64 rows = least(SIDE, a->rows - r);
            const float *const next = r + SIDE < a->rows ? weight : after < a->outputs ? weight + (after - o) * row : NULL;
            now = (rows > 16 ? packing_32 : packing_16)(weight, next, row, r ? 0 : ahead_of(a, o), right + r / SIDE * of_rows,
                                                        a->inner / STEP, sums, left, now);
            give_outputs(a, sums, o, SIDE, r, rows);
        }
        o = after;
    }
}

// By the matrix units: the weight is the left operand, as it lies along the inner dimension; rows are packed, once.
static int linear_by_units(const Linear *a) {
    const i64 steps = (a->inner + STEP - 1) / STEP, pieces = a->bfloat16 ? PIECES_bfloat16 : PIECES_float;
    const i64 of_rows = 2 * TILE_BYTES * pieces * steps;  // bytes of 32 rows, or outputs
    char *const left = (char *)scratch_of((of_rows * ((a->rows + SIDE - 1) / SIDE + 2) + 4 * SIDE * SIDE) / 4);
    if (!left) return 1;
    char *const right = left + 2 * of_rows;
    float *const sums = (float *)(right + of_rows * ((a->rows + SIDE - 1) / SIDE));
    if (a->bfloat16) pack_right_bfloat16(a->x, a->x_row, 1, a->rows, a->inner, right);
    else pack_right_float(a->x, a->x_row, 1, a->rows, a->inner, right);
    take_units();
    if (a->bfloat16) lying_by_units(a, right, of_rows, left, sums);
    else (a->inner % STEP || a->outputs % SIDE ? packed_by_units : packing_by_units)(a, right, of_rows, left, sums);
    leave_units();
    return 0;
}

#else
static int linear_by_units(const Linear *a) {
    (void)a;
    return 1;
}
#endif

// Called by as many threads as there are, with one `next`.
int hybridflow_linear(const Linear *a) {
    const int turned = a->bfloat16 ? a->rows >= MANY_PAIRS && has_pairs(a)
                                   : a->rows >= MANY && a->inner % LANES == 0 && a->outputs % LANES == 0;
    if (a->units) return linear_by_units(a);
    for (;;) {
        const i64 first = BLOCK * __atomic_fetch_add(a->next, 1, __ATOMIC_RELAXED);
        if (first >= a->outputs) return 0;
        const i64 last = least(first + BLOCK, a->outputs);
        if (turned) {
            if ((a->bfloat16 ? linear_of_pairs : linear_turned)(a, first, last)) return 1;
        } else {
            (a->bfloat16 ? linear_bfloat16 : linear_float)(a, first, last);
        }
    }
}
