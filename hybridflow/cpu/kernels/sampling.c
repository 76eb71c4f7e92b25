// Draws of next tokens, and what goes with them, in few passes over the logits; `sampling.py` says what is drawn.

#include <immintrin.h>
#include <math.h>

#include "scratch.h"

#define HALF (LANES / 2)  // 64-bit numbers of a vector
#define PART 1024         // numbers that are added up in float32
#define MARGIN 1.0001f    // more than what float32 takes off the bound of a candidate

typedef uint64_t vq __attribute__((vector_size(4 * LANES), aligned(8), may_alias));

typedef struct {
    const float *logits;  // (rows, vocabulary), of which some may be -inf
    const i64 *seeds;     // (rows,)
    i64 *tokens;          // (rows,)
    float *log_probs;     // (rows,)
    i64 *ranks;           // (rows,): how many logits are at least the token's
    i64 *next;            // the row that no thread has taken yet
    i64 rows, vocabulary, row;
} Draw;

// SplitMix64 (Steele, Lea and Flood 2014): the finaliser of its state, which goes up by GAMMA from number to number.
#define GAMMA 0x9E3779B97F4A7C15ull
#define MIX(z)                                                                                                         \
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;                                                                       \
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;                                                                       \
    z = z ^ (z >> 31);

static uint64_t mixed(uint64_t z) {
    MIX(z)
    return z;
}

// Gumbel noise of token i, -log(-log u), from the upper 53 bits of its number: u in (0, 1).
static double noise(uint64_t key, i64 i) {
    return -log(-log(((double)(mixed(key + (i + 1) * GAMMA) >> 11) + 0.5) * 0x1p-53));
}

// `count` elements, -inf for those beyond.
INLINE vf some_logits(const float *from, i64 count) {
    if (count >= LANES) return load_float(from);
    float part[LANES];
    for (int l = 0; l < LANES; l++) part[l] = l < count ? from[l] : -INFINITY;
    return load_float(part);
}

// One bit a lane: whether 1 - u is below its bound, of the tokens from i on. A lower bound of 1 - u is taken.
INLINE unsigned below(uint64_t key, i64 i, vf bounds) {
    float lowest[LANES];
    for (int part = 0; part < 2; part++) {
        vq z;
        for (int l = 0; l < HALF; l++) z[l] = key + (uint64_t)(i + part * HALF + l + 1) * GAMMA;
        MIX(z)
        z = ~z >> 40;
        for (int l = 0; l < HALF; l++) lowest[part * HALF + l] = (float)(int32_t)z[l];
    }
    vf of = load_float(lowest) * 0x1p-24f;
#if LANES == 16
    return _mm512_cmp_ps_mask((__m512)of, (__m512)bounds, _CMP_LT_OQ);
#else
    return _mm256_movemask_ps(_mm256_cmp_ps((__m256)of, (__m256)bounds, _CMP_LT_OQ));
#endif
}

// Token i is drawn where logit_i + noise_i is the largest: where its -log u, which is at least 1 - u, is the smallest
// beside e^logit. So most tokens are ruled out by one comparison with the best so far, the likeliest token at first.
static void draw(const Draw *a, i64 r, float *probabilities) {
    const float *x = a->logits + r * a->row;
    const i64 size = a->vocabulary;
    const uint64_t key = mixed(a->seeds[r]);
    vf most = all(-INFINITY);
    for (i64 i = 0; i < size; i += LANES) most = larger(some_logits(x + i, size - i), most);
    float largest = most[0];
    for (int l = 1; l < LANES; l++) largest = most[l] > largest ? most[l] : largest;
    i64 best = 0;
    double total = 0;  // in parts: a sum of a hundred thousand float32 would lose digits
    for (i64 i = 0; i < size;) {
        vf part = all(0.0f);
        for (const i64 end = least(i + PART, size); i < end; i += LANES) {
            vf logits = some_logits(x + i, size - i);
            vf p = either(logits == -INFINITY, all(0.0f), exponential(logits - largest));
            store_float(probabilities + i, p);
            part += p;
        }
        total += sum(part);
    }
    while (best < size - 1 && x[best] != largest) best++;
    double best_logit = x[best], best_noise = noise(key, best);
    // p_best / e^noise_best: p of a token times this is what its -log u has to be below
    float bound = (float)exp(-best_noise) * MARGIN;
    for (i64 i = 0; i < size; i += LANES) {
        unsigned candidates = below(key, i, load_float(probabilities + i) * bound);
        for (; candidates; candidates &= candidates - 1) {
            const i64 token = i + __builtin_ctz(candidates);
            if (token >= size) break;
            const double further = (double)x[token] - best_logit, of = noise(key, token);
            if (further + of > best_noise) {
                best = token, best_logit = x[token], best_noise = of;
                bound = (float)exp(-best_noise - (best_logit - largest)) * MARGIN;
            }
        }
    }
    vi counts = {};
    for (i64 i = 0; i < size; i += LANES) counts -= some_logits(x + i, size - i) >= x[best];
    i64 rank = 0;
    for (int l = 0; l < LANES; l++) rank += counts[l];
    a->tokens[r] = best, a->ranks[r] = rank;
    a->log_probs[r] = (float)((double)x[best] - largest - log(total));
}

// Called by as many threads as there are, with one `next`. 0, or 1 where there is no memory.
int hybridflow_draw(const Draw *a) {
    float *const probabilities = scratch_of(up(a->vocabulary, LANES));
    if (!probabilities) return 1;
    for (;;) {
        const i64 r = __atomic_fetch_add(a->next, 1, __ATOMIC_RELAXED);
        if (r >= a->rows) return 0;
        draw(a, r, probabilities);
    }
}
