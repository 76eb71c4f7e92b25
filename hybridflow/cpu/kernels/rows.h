// Tokens of a head as rows of float32 and back, for one type of elements: see both_types.h.

// `count` tokens of one head as float32 rows of `width` (a multiple of 16, the rest zero), times `factor`; rows of
// zeros follow up to `padded`.
static void NAME(take)(const T *from, i64 stride, i64 count, i64 padded, i64 dims, float factor, float *to, i64 width) {
    for (i64 t = 0; t < count; t++, from += stride, to += width) {
        for (i64 d = 0; d < width; d += LANES) store_float(to + d, NAME(some)(from + d, dims - d) * factor);
    }
    memset(to, 0, 4 * width * (padded - count));
}

static void NAME(give)(const float *from, i64 width, i64 count, i64 dims, T *to, i64 stride) {
    for (i64 t = 0; t < count; t++, from += width, to += stride) {
        for (i64 d = 0; d < dims; d += LANES) NAME(put_some)(to + d, load_float(from + d), dims - d);
    }
}
