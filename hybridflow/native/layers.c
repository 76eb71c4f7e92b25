// RMSNorm, SwiGLU and rotary embedding on a CPU, each in one pass over memory; `layers.py` says what is passed.

#include <math.h>

#include "vectors.h"

#define BLOCK 64  // rows at a time, whose part of the weight's gradient is one row

enum { RMS_NORM, ADD_RMS_NORM, RMS_NORM_BACKWARD, SWIGLU, SWIGLU_BACKWARD, ROTATE };

typedef struct {
    const void *x, *weight, *grad, *cos, *sin;
    void *y, *grad_x, *sum;
    float *r;            // (rows,): 1 / sqrt(mean(x^2) + eps)
    float *grad_weight;  // (blocks, columns)
    i64 *next;           // the block that no thread has taken yet
    i64 rows, columns, what, bfloat16;
    i64 heads, turning, x_token, x_head;  // of rotary embedding, where a row is a token; strides in elements
    float eps;
} Rows;

#define BODY "layers.h"
#include "both_types.h"

// Called by as many threads as there are, with one `next`.
int hybridflow_rows(const Rows *a) {
    static void (*const all[6][2])(const Rows *, i64, i64) = {
        [RMS_NORM] = {rms_norm_float, rms_norm_bfloat16},
        [ADD_RMS_NORM] = {add_rms_norm_float, add_rms_norm_bfloat16},
        [RMS_NORM_BACKWARD] = {rms_norm_backward_float, rms_norm_backward_bfloat16},
        [SWIGLU] = {swiglu_float, swiglu_bfloat16},
        [SWIGLU_BACKWARD] = {swiglu_backward_float, swiglu_backward_bfloat16},
        [ROTATE] = {rotate_float, rotate_bfloat16},
    };
    for (;;) {
        const i64 first = BLOCK * __atomic_fetch_add(a->next, 1, __ATOMIC_RELAXED);
        if (first >= a->rows) return 0;
        all[a->what][a->bfloat16](a, first, least(first + BLOCK, a->rows));
    }
}
