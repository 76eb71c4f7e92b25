// The matrix units of a CPU (Intel's AMX): products of tiles of 16 x 32 bfloat16 with 32 x 16, summed up in float32.
//
// A float32 is the sum of three bfloat16, each the nearest to what those before it leave: exact down to 1e-33. Of the
// nine products of two such sums six are taken; the others are below 2^-26 of the whole, where a float32 ends at 2^-24
// (Henry, Tang and Heinecke 2019, "Leveraging the bfloat16 artificial intelligence datatype for higher-precision
// computations"). The units take numbers below 1e-38 for zero; an infinity becomes a NaN.

#pragma once

#include "products.h"

#if (defined(__AMX_BF16__) || defined(__AMXBF16__)) && defined(__AVX512BW__)  // of GCC, of old clang
#define MATRIX_UNITS 1
#include <immintrin.h>

#define STEP 32          // of the inner dimension, in one product of tiles
#define TILE_BYTES 1024  // 16 rows of 64
#define SIDE 32          // rows and columns of a block of four tiles of sums
#define PIECES_float 3
#define PIECES_bfloat16 1

// GCC's own intrinsics for tiles do not tell the compiler that they read and write memory.
#define TILE_LOAD(tile, from, stride)                                                                                  \
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #tile ::"r"(from), "r"((i64)(stride)) : "memory")
#define TILE_STORE(tile, to, stride)                                                                                   \
    __asm__ volatile("tilestored %%tmm" #tile ", (%0,%1,1)" ::"r"(to), "r"((i64)(stride)) : "memory")
#define TILE_ZERO(tile) __asm__ volatile("tilezero %%tmm" #tile ::)
#define TILE_DOT(sums, a, b) __asm__ volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #sums ::)

static void take_units(void) {  // of this thread: eight tiles of 16 rows of 64 bytes
    struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } tiles = {.palette = 1};
    for (int i = 0; i < 8; i++) tiles.bytes[i] = 64, tiles.rows[i] = 16;
    __asm__ volatile("ldtilecfg %0" ::"m"(tiles) : "memory");
}
static void leave_units(void) { __asm__ volatile("tilerelease" ::: "memory"); }

// ------------------------------------------------------------------------------------------------ packing

// x as a sum of `pieces` bfloat16, each in the upper half of its lanes; the lower half of the last one is anything.
INLINE void split(vf x, int pieces, vu *to) {
    for (int i = 0; i < pieces; i++) {
        to[i] = (vu)x;
        if (i < 2) to[i] += 0x8000;  // in the third there is nothing to round
        if (i == pieces - 1) break;
        to[i] &= 0xffff0000;
        x -= (vf)to[i];
    }
}

// Lanes hold two numbers that follow each other along the inner dimension, the first in the lower half.
INLINE vu in_turns(vu first, vu second) {  // of upper halves: lane i of each
    return (vu)_mm512_mask_blend_epi16(0xaaaaaaaa, (__m512i)(first >> 16), (__m512i)second);
}
INLINE vu one_after_the_other(vu first, vu second) {  // of upper halves: lanes of the first, then of the second
    const __m512i odd = _mm512_set_epi16(63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33, 31, 29, 27, 25,
                                         23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
    return (vu)_mm512_permutex2var_epi16((__m512i)first, odd, (__m512i)second);
}

// `depth` numbers of a line along the inner dimension, zeros up to 32.
INLINE void along_float(const float *from, i64 depth, int pieces, vu *to) {
    vu first[3], second[3];
    split(some_float(from, depth), pieces, first);
    split(depth > LANES ? some_float(from + LANES, depth - LANES) : all(0.0f), pieces, second);
    for (int i = 0; i < pieces; i++) to[i] = one_after_the_other(first[i], second[i]);
}
INLINE void along_bfloat16(const bfloat16 *from, i64 depth, int pieces, vu *to) {
    (void)pieces;
    to[0] = (vu)_mm512_maskz_loadu_epi16(depth >= 32 ? 0xffffffff : (1u << depth) - 1, from);
}

// `count` columns of two lines that follow each other along the inner dimension; NULL stands for one of zeros.
INLINE void across_float(const float *first, const float *second, i64 count, int pieces, vu *to) {
    vu a[3], b[3];
    split(first ? some_float(first, count) : all(0.0f), pieces, a);
    split(second ? some_float(second, count) : all(0.0f), pieces, b);
    for (int i = 0; i < pieces; i++) to[i] = in_turns(a[i], b[i]);
}
INLINE void across_bfloat16(const bfloat16 *first, const bfloat16 *second, i64 count, int pieces, vu *to) {
    (void)pieces;
    const vf a = first ? some_bfloat16(first, count) : all(0.0f), b = second ? some_bfloat16(second, count) : all(0.0f);
    to[0] = in_turns((vu)a, (vu)b);
}

#define BODY "tiles_pack.h"
#include "both_types.h"

// --------------------------------------------------------------------------------------------- products

// Tiles 0 to 3 are sums, 4 and 5 of the left operand, 6 and 7 of the right. Sums of 32 rows and 32 columns, or 16.
#define DOTS_32 TILE_DOT(0, 4, 6); TILE_DOT(1, 4, 7); TILE_DOT(2, 5, 6); TILE_DOT(3, 5, 7);
#define DOTS_16 TILE_DOT(0, 4, 6); TILE_DOT(2, 5, 6);
#define RIGHT_32(piece)                                                                                                \
    TILE_LOAD(6, b + 2 * TILE_BYTES * piece, 64);                                                                      \
    TILE_LOAD(7, b + 2 * TILE_BYTES * piece + TILE_BYTES, 64);
#define RIGHT_16(piece) TILE_LOAD(6, b + 2 * TILE_BYTES * piece, 64);
#define LEFT(piece)                                                                                                    \
    TILE_LOAD(4, a + 2 * TILE_BYTES * piece, 64);                                                                      \
    TILE_LOAD(5, a + 2 * TILE_BYTES * piece + TILE_BYTES, 64);

// Of one step, in the order in which the fewest tiles are read.
#define STEP_3_3(n)                                                                                                    \
    LEFT(0) RIGHT_##n(2) DOTS_##n RIGHT_##n(1) DOTS_##n LEFT(1) DOTS_##n RIGHT_##n(0) DOTS_##n LEFT(2) DOTS_##n        \
    LEFT(0) DOTS_##n
#define STEP_2_1(n) LEFT(1) RIGHT_##n(0) DOTS_##n LEFT(0) DOTS_##n
#define STEP_1_2(n) LEFT(0) RIGHT_##n(1) DOTS_##n RIGHT_##n(0) DOTS_##n
#define STEP_1_1(n) LEFT(0) RIGHT_##n(0) DOTS_##n

// c = from (or zeros) + A B of a block, of packed steps; c (32, n), `stride` floats from row to row, as `from` is.
#define BLOCK_OF(left, right, n)                                                                                       \
    static void block_##left##_##right##_##n(const char *a, const char *b, i64 steps, const float *from, float *c,     \
                                             i64 stride) {                                                             \
        if (from) {                                                                                                    \
            TILE_LOAD(0, from, 4 * stride);                                                                            \
            TILE_LOAD(2, from + 16 * stride, 4 * stride);                                                              \
            if (n == 32) TILE_LOAD(1, from + 16, 4 * stride);                                                          \
            if (n == 32) TILE_LOAD(3, from + 16 * stride + 16, 4 * stride);                                            \
        } else {                                                                                                       \
            TILE_ZERO(0);                                                                                              \
            TILE_ZERO(1);                                                                                              \
            TILE_ZERO(2);                                                                                              \
            TILE_ZERO(3);                                                                                              \
        }                                                                                                              \
        for (; steps; steps--, a += 2 * TILE_BYTES * left, b += 2 * TILE_BYTES * right) { STEP_##left##_##right(n) }   \
        TILE_STORE(0, c, 4 * stride);                                                                                  \
        TILE_STORE(2, c + 16 * stride, 4 * stride);                                                                    \
        if (n == 32) TILE_STORE(1, c + 16, 4 * stride);                                                                \
        if (n == 32) TILE_STORE(3, c + 16 * stride + 16, 4 * stride);                                                  \
    }
typedef void (*block)(const char *, const char *, i64, const float *, float *, i64);

#endif
