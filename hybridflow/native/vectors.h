// Vectors of float32 as wide as the machine's registers, and rows of float32 or bfloat16 that are read into them.
// GCC's and clang's vector types; bfloat16 is float32 without its lower half, rounded to the nearest even.

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__AVX512F__)
#define LANES 16
#define PANEL 4  // vectors of a tile's row: 6 x 4 accumulators and their operands fit 32 registers
#else
#define LANES 8
#define PANEL 2  // 6 x 2 fit 16
#endif

typedef int64_t i64;
typedef uint16_t bfloat16;
typedef float vf __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t vi __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint32_t vu __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint16_t vh __attribute__((vector_size(2 * LANES), aligned(2), may_alias));

#define INLINE static inline __attribute__((always_inline))

INLINE vf all(float x) { return x - (vf){}; }

INLINE vf load_float(const float *from) { return *(const vf *)from; }
INLINE void store_float(float *to, vf x) { *(vf *)to = x; }

INLINE vf load_bfloat16(const bfloat16 *from) {
    return (vf)(__builtin_convertvector(*(const vh *)from, vu) << 16);
}
INLINE void store_bfloat16(bfloat16 *to, vf x) {
    vu bits = (vu)x, rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    vu nan = (vu)(x != x);  // all ones where there is none
    *(vh *)to = __builtin_convertvector((rounded & ~nan) | (nan & 0x7fc0), vh);
}

INLINE float one_float(const float *from) { return *from; }
INLINE void put_float(float *to, float x) { *to = x; }
INLINE float one_bfloat16(const bfloat16 *from) {
    uint32_t bits = (uint32_t)*from << 16;
    float x;
    memcpy(&x, &bits, 4);
    return x;
}
INLINE void put_bfloat16(bfloat16 *to, float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    *to = x != x ? 0x7fc0 : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}

INLINE vf either(vi where, vf yes, vf no) { return (vf)((where & (vi)yes) | (~where & (vi)no)); }
INLINE vf larger(vf a, vf b) { return either(a > b, a, b); }

INLINE float sum(vf x) {
    float total = 0;
    for (int i = 0; i < LANES; i++) total += x[i];
    return total;
}
// e^x for x <= 88, to 2 units in the last place; 1e-38 below -87. e^x = 2^n e^r with |r| <= ln(2) / 2, and e^r by its
// Taylor series up to r^7 / 7!, whose rest is below 4e-9. A NaN stays one.
INLINE vf exponential(vf x) {
    const float round = 12582912.0f;  // 1.5 x 2^23: adding it leaves an integer in the lower bits
    vf bounded = either(x < -87.0f, all(-87.0f), x);
    vf shifted = bounded * 1.44269504f + round, n = shifted - round;
    vf r = (bounded - n * 0.693145752f) - n * 1.42860677e-6f;
    vf p = 1.0f / 5040 + (vf){};
    p = p * r + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    return (vf)((vi)p + ((vi)shifted << 23));
}

INLINE i64 up(i64 x, i64 multiple) { return (x + multiple - 1) / multiple * multiple; }
INLINE i64 least(i64 a, i64 b) { return a < b ? a : b; }

// ---------------------------------------------------------------------------------------------- products

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
