// Vectors of float32 as wide as the machine's registers, and rows of float32 or bfloat16 that are read into them.
// GCC's and clang's vector types; bfloat16 is float32 without its lower half, rounded to the nearest even.

#pragma once

#include <immintrin.h>
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
#define SHARED static __attribute__((unused))  // of a header, of which not every file needs all

INLINE vf all(float x) { return x - (vf){}; }

INLINE vf load_float(const float *from) { return *(const vf *)from; }
INLINE void store_float(float *to, vf x) { *(vf *)to = x; }

INLINE vf load_bfloat16(const bfloat16 *from) {
    return (vf)(__builtin_convertvector(*(const vh *)from, vu) << 16);
}
#if defined(__AVX512BF16__)  // which takes numbers below 1e-38 for zero
INLINE void store_bfloat16(bfloat16 *to, vf x) { *(vh *)to = (vh)_mm512_cvtneps_pbh((__m512)x); }
INLINE vf rounded_bfloat16(vf x) { return (vf)(__builtin_convertvector((vh)_mm512_cvtneps_pbh((__m512)x), vu) << 16); }
#else
// The bits of float32 whose upper half is x in bfloat16; the lower half is anything.
INLINE vu nearest_bfloat16(vf x) {
    vu bits = (vu)x, nan = (vu)(x != x);  // all ones where there is none
    return ((bits + 0x7fff + ((bits >> 16) & 1)) & ~nan) | (nan & 0x7fc00000);
}
INLINE void store_bfloat16(bfloat16 *to, vf x) { *(vh *)to = __builtin_convertvector(nearest_bfloat16(x) >> 16, vh); }
INLINE vf rounded_bfloat16(vf x) { return (vf)(nearest_bfloat16(x) & 0xffff0000); }
#endif

// `count` elements: zeros stand for those beyond.
#define SOME(type)                                                                                                     \
    INLINE vf some_##type(const type *from, i64 count) {                                                               \
        if (count >= LANES) return load_##type(from);                                                                  \
        type part[LANES] = {0};                                                                                        \
        if (count > 0) memcpy(part, from, count * sizeof(type));                                                       \
        return load_##type(part);                                                                                      \
    }                                                                                                                  \
    INLINE void put_some_##type(type *to, vf x, i64 count) {                                                           \
        type part[LANES];                                                                                              \
        if (count >= LANES) return store_##type(to, x);                                                                \
        store_##type(part, x);                                                                                         \
        if (count > 0) memcpy(to, part, count * sizeof(type));                                                         \
    }
SOME(float)
SOME(bfloat16)

// What is left of a number that is written and read again, as rounded_bfloat16.
INLINE vf rounded_float(vf x) { return x; }

INLINE vf either(vi where, vf yes, vf no) { return (vf)((where & (vi)yes) | (~where & (vi)no)); }
#if LANES == 16  // where either is a NaN: b
INLINE vf larger(vf a, vf b) { return (vf)_mm512_max_ps((__m512)a, (__m512)b); }
#else
INLINE vf larger(vf a, vf b) { return (vf)_mm256_max_ps((__m256)a, (__m256)b); }
#endif

// Always in one instruction: what a compiler makes of a sum and a product depends on what stands around them, and
// a query or a row would have other bits among others.
#if LANES == 16
INLINE vf add_product_float(vf sum, vf a, vf b) { return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sum); }
#else
INLINE vf add_product_float(vf sum, vf a, vf b) { return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sum); }
#endif

INLINE float sum(vf x) {
    float total = 0;
    for (int i = 0; i < LANES; i++) total += x[i];
    return total;
}

// e^x for x <= 88, to 2 units in the last place; 1e-38 below -87. e^x = 2^n e^r with |r| <= ln(2) / 2, and e^r by the
// polynomial whose largest error there, relative, is the smallest: 2e-8. A NaN stays one.
INLINE vf exponential(vf x) {
    const float round = 12582912.0f;  // 1.5 x 2^23: adding it leaves an integer in the lower bits
    vf bounded = larger(all(-87.0f), x);
    vf shifted = bounded * 1.44269504f + round, n = shifted - round;
    vf r = (bounded - n * 0.693145752f) - n * 1.42860677e-6f;
    vf p = 0.00138368248f + (vf){};
    p = p * r + 0.00837483257f;
    p = p * r + 0.0416682251f;
    p = p * r + 0.166664198f;
    p = p * r + 0.499999911f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    return (vf)((vi)p + ((vi)shifted << 23));
}

// 1 / x for 1 <= x < 1e38.
INLINE vf reciprocal(vf x) {
#if LANES == 16  // a division takes as long as ten other operations; one step of Newton's doubles 14 bits
    const vf near = (vf)_mm512_rcp14_ps((__m512)x);
    return near * (2.0f - x * near);
#else
    return 1.0f / x;
#endif
}

INLINE vf sigmoid(vf x) {  // 1e-38 below -87
    vf bounded = larger(all(-87.0f), x);
    return reciprocal(1.0f + exponential(-bounded));
}

INLINE i64 up(i64 x, i64 multiple) { return (x + multiple - 1) / multiple * multiple; }
INLINE i64 least(i64 a, i64 b) { return a < b ? a : b; }
