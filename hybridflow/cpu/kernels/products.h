// Products of small matrices of float32, and rows turned into columns.

#pragma once

#include "vectors.h"

// C (+)= A B of R rows and V vectors: A[r, p] = a[r * row + p * column]; rows of B and C are contiguous. Each turn of the
// inner loop begins with EACH, for which `ahead` is there.
#define TILE_THAT(name, R, V, EACH)                                                                                    \
    static void name(const float *a, i64 row, i64 column, const float *b, i64 ldb, float *c, i64 ldc, i64 inner,       \
                     int add, const float *ahead, i64 ahead_row) {                                                     \
        vf sums[R][V];                                                                                                 \
        (void)ahead, (void)ahead_row;                                                                                  \
        for (int r = 0; r < R; r++)                                                                                    \
            for (int v = 0; v < V; v++) sums[r][v] = add ? load_float(c + r * ldc + v * LANES) : all(0.0f);            \
        for (i64 p = 0; p < inner; p++) {                                                                              \
            vf right[V];                                                                                               \
            EACH;                                                                                                      \
            for (int v = 0; v < V; v++) right[v] = load_float(b + p * ldb + v * LANES);                                \
            for (int r = 0; r < R; r++) {                                                                              \
                float left = a[r * row + p * column];                                                                  \
                for (int v = 0; v < V; v++) sums[r][v] += left * right[v];                                             \
            }                                                                                                          \
        }                                                                                                              \
        for (int r = 0; r < R; r++)                                                                                    \
            for (int v = 0; v < V; v++) store_float(c + r * ldc + v * LANES, sums[r][v]);                              \
    }
#define TILE(R, V) TILE_THAT(tile_##R##_##V, R, V, )
typedef void (*tile)(const float *, i64, i64, const float *, i64, float *, i64, i64, int, const float *, i64);
#define SMALL(V) TILE(6, V) TILE(4, V) TILE(3, V) TILE(2, V) TILE(1, V)
SMALL(1)
SMALL(2)
#if PANEL == 4  // as many accumulators as leave room for the operands in 32 registers
SMALL(3)
SMALL(4)
TILE(12, 1)
TILE(12, 2)
TILE(8, 1)
TILE(8, 2)
#define LARGE(V) tile_12_##V, tile_8_##V
#else
#define LARGE(V) NULL, NULL
#endif
#define OF(V) tile_6_##V, tile_4_##V, tile_3_##V, tile_2_##V, tile_1_##V
static const i64 heights[7] = {12, 8, 6, 4, 3, 2, 1};
static const tile tiles[PANEL][7] = {  // by vectors; of so many rows
    {LARGE(1), OF(1)},
    {LARGE(2), OF(2)},
#if PANEL == 4
    {NULL, NULL, OF(3)},
    {NULL, NULL, OF(4)},
#endif
};

// C[rows, columns] (+)= A[rows, inner] B[inner, columns]; columns a multiple of 16.
SHARED void product(const float *a, i64 row, i64 column, const float *b, i64 ldb, float *c, i64 ldc, i64 rows,
                    i64 inner, i64 columns, int add) {
    for (i64 j = 0; j < columns; j += PANEL * LANES) {
        const tile *of = tiles[least(PANEL, (columns - j) / LANES) - 1];
        i64 i = 0;
        for (int h = 0; h < 7; h++)
            for (; of[h] && i + heights[h] <= rows; i += heights[h])
                of[h](a + i * row, row, column, b + j, ldb, c + i * ldc + j, ldc, inner, add, NULL, 0);
    }
}

// ---------------------------------------------------------------------------------------------- turning

#if defined(__clang__)
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (vi){__VA_ARGS__})
#endif
#if LANES == 16
#define LOW(a, b) SHUFFLE(a, b, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29)
#define HIGH(a, b) SHUFFLE(a, b, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31)
#define LOW_PAIRS(a, b) SHUFFLE(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29)
#define HIGH_PAIRS(a, b) SHUFFLE(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31)
#define EVEN_FOURS(a, b) SHUFFLE(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27)
#define ODD_FOURS(a, b) SHUFFLE(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31)
#else
#define LOW(a, b) SHUFFLE(a, b, 0, 8, 1, 9, 4, 12, 5, 13)
#define HIGH(a, b) SHUFFLE(a, b, 2, 10, 3, 11, 6, 14, 7, 15)
#define LOW_PAIRS(a, b) SHUFFLE(a, b, 0, 1, 8, 9, 4, 5, 12, 13)
#define HIGH_PAIRS(a, b) SHUFFLE(a, b, 2, 3, 10, 11, 6, 7, 14, 15)
#define EVEN_FOURS(a, b) SHUFFLE(a, b, 0, 1, 2, 3, 8, 9, 10, 11)
#define ODD_FOURS(a, b) SHUFFLE(a, b, 4, 5, 6, 7, 12, 13, 14, 15)
#endif

// A square of LANES rows, turned: within fours of four rows each, then the fours.
INLINE void turn_square(vf *x) {
    for (int i = 0; i < LANES; i += 4) {
        const vf a = LOW(x[i], x[i + 1]), b = HIGH(x[i], x[i + 1]);
        const vf c = LOW(x[i + 2], x[i + 3]), d = HIGH(x[i + 2], x[i + 3]);
        x[i] = LOW_PAIRS(a, c);
        x[i + 1] = HIGH_PAIRS(a, c);
        x[i + 2] = LOW_PAIRS(b, d);
        x[i + 3] = HIGH_PAIRS(b, d);
    }
    for (int j = 0; j < 4; j++) {
        const vf even = EVEN_FOURS(x[j], x[j + 4]), odd = ODD_FOURS(x[j], x[j + 4]);
#if LANES == 16
        const vf more_even = EVEN_FOURS(x[j + 8], x[j + 12]), more_odd = ODD_FOURS(x[j + 8], x[j + 12]);
        x[j] = EVEN_FOURS(even, more_even);
        x[j + 4] = EVEN_FOURS(odd, more_odd);
        x[j + 8] = ODD_FOURS(even, more_even);
        x[j + 12] = ODD_FOURS(odd, more_odd);
#else
        x[j] = even;
        x[j + 4] = odd;
#endif
    }
}

// x[l] -> the vector of their sums. Each step adds the halves of vectors, side by side.
INLINE vf sums_of(vf *x) {
    for (int i = 0; i < LANES; i += 4) {
        const vf a = LOW(x[i], x[i + 2]) + HIGH(x[i], x[i + 2]), b = LOW(x[i + 1], x[i + 3]) + HIGH(x[i + 1], x[i + 3]);
        x[i / 4] = LOW(a, b) + HIGH(a, b);
    }
    for (int count = LANES / 8; count; count /= 2)
        for (int i = 0; i < count; i++)
            x[i] = EVEN_FOURS(x[2 * i], x[2 * i + 1]) + ODD_FOURS(x[2 * i], x[2 * i + 1]);
    return x[0];
}

// rows (count, width), `stride` floats apart -> turned (width, count); both multiples of LANES. What lies `ahead` floats
// further is fetched for a later call.
SHARED void turn(const float *rows, i64 stride, float *turned, i64 count, i64 width, i64 ahead) {
    for (i64 i = 0; i < count; i += LANES)
        for (i64 d = 0; d < width; d += LANES) {
            vf x[LANES];
            for (int l = 0; l < LANES; l++) x[l] = load_float(rows + (i + l) * stride + d);
            if (ahead)
                for (int l = 0; l < LANES; l++) __builtin_prefetch(rows + (i + l) * stride + d + ahead);
            turn_square(x);
            for (int l = 0; l < LANES; l++) store_float(turned + (d + l) * count + i, x[l]);
        }
}
