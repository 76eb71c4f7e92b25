// Products of small matrices of float32, and rows turned into columns.

#include "vectors.h"

// C (+)= A B of R rows and V vectors: A[r, p] = a[r * row + p * column]; rows of B and C are contiguous.
#define TILE(R, V)                                                                                                     \
    static void tile_##R##_##V(const float *a, i64 row, i64 column, const float *b, i64 ldb, float *c, i64 ldc,        \
                               i64 inner, int add) {                                                                   \
        vf sums[R][V];                                                                                                 \
        for (int r = 0; r < R; r++)                                                                                    \
            for (int v = 0; v < V; v++) sums[r][v] = add ? load_float(c + r * ldc + v * LANES) : all(0.0f);            \
        for (i64 p = 0; p < inner; p++) {                                                                              \
            vf right[V];                                                                                               \
            for (int v = 0; v < V; v++) right[v] = load_float(b + p * ldb + v * LANES);                                \
            for (int r = 0; r < R; r++) {                                                                              \
                float left = a[r * row + p * column];                                                                  \
                for (int v = 0; v < V; v++) sums[r][v] += left * right[v];                                             \
            }                                                                                                          \
        }                                                                                                              \
        for (int r = 0; r < R; r++)                                                                                    \
            for (int v = 0; v < V; v++) store_float(c + r * ldc + v * LANES, sums[r][v]);                              \
    }
typedef void (*tile)(const float *, i64, i64, const float *, i64, float *, i64, i64, int);
#define SMALL(V) TILE(6, V) TILE(3, V) TILE(2, V) TILE(1, V)
SMALL(1)
SMALL(2)
#if PANEL == 4  // as many accumulators as leave room for the operands in 32 registers
SMALL(3)
SMALL(4)
TILE(12, 1)
TILE(12, 2)
#define LARGE(V) tile_12_##V
#else
#define LARGE(V) NULL
#endif
static const tile tiles[PANEL][5] = {  // by vectors; of 12, 6, 3, 2 and 1 rows
    {LARGE(1), tile_6_1, tile_3_1, tile_2_1, tile_1_1},
    {LARGE(2), tile_6_2, tile_3_2, tile_2_2, tile_1_2},
#if PANEL == 4
    {NULL, tile_6_3, tile_3_3, tile_2_3, tile_1_3},
    {NULL, tile_6_4, tile_3_4, tile_2_4, tile_1_4},
#endif
};
static const i64 heights[5] = {12, 6, 3, 2, 1};

// C[rows, columns] (+)= A[rows, inner] B[inner, columns]; columns a multiple of 16.
static void product(const float *a, i64 row, i64 column, const float *b, i64 ldb, float *c, i64 ldc, i64 rows,
                    i64 inner, i64 columns, int add) {
    for (i64 j = 0; j < columns; j += PANEL * LANES) {
        const tile *of = tiles[least(PANEL, (columns - j) / LANES) - 1];
        i64 i = 0;
        for (int h = 0; h < 5; h++)
            for (; of[h] && i + heights[h] <= rows; i += heights[h])
                of[h](a + i * row, row, column, b + j, ldb, c + i * ldc + j, ldc, inner, add);
    }
}

// ---------------------------------------------------------------------------------------------- turning

#if defined(__clang__)
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (vi){__VA_ARGS__})
#endif
#if LANES == 16
#define LOW(a, b) SHUFFLE(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23)
#define HIGH(a, b) SHUFFLE(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31)
#else
#define LOW(a, b) SHUFFLE(a, b, 0, 8, 1, 9, 2, 10, 3, 11)
#define HIGH(a, b) SHUFFLE(a, b, 4, 12, 5, 13, 6, 14, 7, 15)
#endif

// rows (count, width) -> turned (width, count); both multiples of LANES. A perfect shuffle of the rows, log2(LANES)
// times, turns a square.
static void turn(const float *rows, float *turned, i64 count, i64 width) {
    for (i64 i = 0; i < count; i += LANES)
        for (i64 d = 0; d < width; d += LANES) {
            vf x[LANES], y[LANES];
            for (int l = 0; l < LANES; l++) x[l] = load_float(rows + (i + l) * width + d);
            for (int step = LANES; step > 1; step /= 2) {
                for (int l = 0; l < LANES / 2; l++) {
                    y[2 * l] = LOW(x[l], x[l + LANES / 2]);
                    y[2 * l + 1] = HIGH(x[l], x[l + LANES / 2]);
                }
                for (int l = 0; l < LANES; l++) x[l] = y[l];
            }
            for (int l = 0; l < LANES; l++) store_float(turned + (d + l) * count + i, x[l]);
        }
}
