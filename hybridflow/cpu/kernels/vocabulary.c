// Log-probabilities and entropy of logits, and their gradients; `vocabulary.py` says what is passed.

#include "softmax.h"

#define BLOCK 16  // rows that a thread takes at a time

typedef struct {
    void *logits;
    const i64 *targets;     // (rows,): columns, negative where there is none
    const float *divisors;  // temperatures
    float *peak, *sums;     // (rows,) and (3, rows)
    const float *normalizer, *entropy, *grad_log_probs, *grad_entropy;  // (rows,); gradients: or NULL
    i64 *next;                                                          // the block that no thread has taken yet
    i64 rows, columns, padded, row, divisor, backward, bfloat16;        // row, divisor: strides, in elements
} Vocabulary;

// e^x for x <= 0, and 0 below -87: times x it is nothing either.
INLINE vf or_nothing(vf x) { return either(x < -87.0f, all(0.0f), exponential(x)); }

#define BODY "vocabulary.h"
#include "both_types.h"

// Called by as many threads as there are, with one `next`.
int hybridflow_vocabulary(const Vocabulary *a) {
    static void (*const of[2][2])(const Vocabulary *, i64) = {{sums_float, sums_bfloat16},
                                                              {grads_float, grads_bfloat16}};
    for (;;) {
        const i64 first = BLOCK * __atomic_fetch_add(a->next, 1, __ATOMIC_RELAXED);
        if (first >= a->rows) return 0;
        for (i64 row = first; row < least(first + BLOCK, a->rows); row++) of[a->backward][a->bfloat16](a, row);
    }
}
