// Of scores that lie turned, a row for each key and a lane for each query.

#include <math.h>

#include "products.h"

#define ROWS 32  // queries at a time: two vectors, and few scores beyond the diagonal

INLINE vi lanes_from(i64 first) {  // all ones in lane l where l >= first
    vi lanes;
    for (int i = 0; i < LANES; i++) lanes[i] = i;
    return lanes >= (int32_t)first;
}

// scores (prompt + first + count, lanes), a row for each key and a lane for each query, the first of which is number
// `first` of its stretch: -> e^(score - maximum) in place, 0 for keys after the query. `factors`: one over their sums;
// `lse`: maximum + log(sum), `stride` apart.
SHARED void softmax(float *scores, i64 prompt, i64 first, i64 count, i64 lanes, float *factors, float *lse,
                    i64 stride) {
    const i64 all_see = prompt + first + 1, rows = prompt + first + count;
    for (i64 l = 0; l < lanes; l += LANES) {
        vf most = all(-INFINITY), total = all(0.0f);
        for (i64 j = 0; j < rows; j++) {
            vf x = load_float(scores + j * lanes + l);
            most = larger(j < all_see ? x : either(lanes_from(j - all_see + 1 - l), x, most), most);
        }
        for (i64 j = 0; j < rows; j++) {
            vf e = exponential(load_float(scores + j * lanes + l) - most);
            if (j >= all_see) e = either(lanes_from(j - all_see + 1 - l), e, all(0.0f));
            store_float(scores + j * lanes + l, e);
            total += e;
        }
        for (i64 r = l; r < least(count, l + LANES); r++) {
            factors[r] = 1.0f / total[r - l];
            lse[r * stride] = most[r - l] + logf(total[r - l]);
        }
    }
}
