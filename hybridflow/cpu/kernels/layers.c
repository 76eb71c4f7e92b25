// RMSNorm, SwiGLU and rotary embedding on a CPU, each in one pass over memory; `layers.py` says what is passed.

#include <math.h>

#include "calls.h"

#define BLOCK 64  // rows at a time, whose part of the weight's gradient is one row

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
