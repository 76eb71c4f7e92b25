// A layer of a decoder for the next tokens of an engine: the kernels beside this one, one after the other, by one
// thread. `decoder.py` says what is passed.

#include <time.h>

#include "calls.h"
#include "scratch.h"

enum { PRODUCTS, ATTENTION, ELEMENTWISE, KINDS };  // of work, whose seconds are told where they are asked for

typedef struct {
    const void *x;         // (rows, width): what the layer before gives
    void *residual;        // (rows, width): the sum before it; with `first` x itself
    void *y;               // (rows, width): what this layer gives
    const i64 *positions;  // (rows,)
    const void *rotation;  // (positions, 2 turning): cosines, sines
    void *cache;
    const int32_t *table, *starts, *lengths;  // as in Paged
    const i64 *slots;
    const void *first_norm, *qkv, *qkv_bias, *query_norm, *key_norm, *out, *out_bias;  // weights; NULL for none
    const void *second_norm, *gate_up, *gate_up_bias, *down, *down_bias;
    double *seconds;  // (KINDS,), to which is added; or NULL
    i64 rows, first, width, heads, kv_heads, dims, turning, hidden;  // hidden: of the MLP
    i64 sequences, longest, table_row, block_size, cache_block, cache_head, bfloat16, units;
    float eps, scale;
} Decoder;

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + 1e-9 * time.tv_nsec;
}

static int norm(const Decoder *a, i64 what, const void *x, const void *weight, void *y, i64 rows, i64 columns, float *r) {
    i64 next = 0;
    const Rows of = {.x = x, .weight = weight, .y = y, .sum = a->residual, .r = r, .next = &next, .rows = rows,
                     .columns = columns, .what = what, .bfloat16 = a->bfloat16, .eps = a->eps};
    return hybridflow_rows(&of);
}

static int linear(const Decoder *a, const void *x, const void *weight, const void *bias, void *y, i64 inner, i64 outputs) {
    i64 next = 0;
    const Linear of = {.x = x, .weight = weight, .bias = bias, .y = y, .next = &next, .rows = a->rows, .inner = inner,
                       .outputs = outputs, .x_row = inner, .weight_row = inner, .bfloat16 = a->bfloat16, .units = a->units};
    return hybridflow_linear(&of);
}

// Each head of queries and keys by itself, where they are.
static int head_norms(const Decoder *a, char *qkv, i64 row, i64 size, float *r) {
    const i64 keys = a->heads * a->dims * size;
    for (i64 t = 0; t < a->rows; t++, qkv += row) {
        if (norm(a, RMS_NORM, qkv, a->query_norm, qkv, a->heads, a->dims, r)) return 1;
        if (norm(a, RMS_NORM, qkv + keys, a->key_norm, qkv + keys, a->kv_heads, a->dims, r)) return 1;
    }
    return 0;
}

// Queries and keys, turned by their positions. angles: (2, rows, turning), memory to put cosines and sines side by side.
static int rotate(const Decoder *a, const char *qkv, i64 row, i64 size, char *turned, char *angles) {
    const i64 part = a->turning * size;
    for (i64 t = 0; t < a->rows; t++) {
        const char *of = (const char *)a->rotation + 2 * part * a->positions[t];
        memcpy(angles + part * t, of, part);
        memcpy(angles + part * (a->rows + t), of + part, part);
    }
    i64 next = 0;
    const Rows all = {.x = qkv, .cos = angles, .sin = angles + part * a->rows, .y = turned, .next = &next,
                      .rows = a->rows, .columns = a->dims, .what = ROTATE, .bfloat16 = a->bfloat16, .groups = 1,
                      .heads = a->heads + a->kv_heads, .turning = a->turning, .x_token = row / size,
                      .y_token = (a->heads + a->kv_heads) * a->dims};
    return hybridflow_rows(&all);
}

// The cache takes keys and values, and the queries see what is in it.
static int attention(const Decoder *a, const char *turned, const char *qkv, i64 size, char *seen) {
    const i64 heads = a->heads + a->kv_heads, dims = a->dims;
    i64 stored = 0, attended = 0;
    Paged of = {.query = turned, .key = turned + a->heads * dims * size, .value = qkv + heads * dims * size,
                .cache = a->cache, .out = seen, .table = a->table, .starts = a->starts, .lengths = a->lengths,
                .slots = a->slots, .next = &stored, .sequences = a->sequences, .tokens = a->rows, .longest = a->longest,
                .table_row = a->table_row, .heads = a->heads, .kv_heads = a->kv_heads, .dims = dims,
                .block_size = a->block_size, .query_token = heads * dims, .query_head = dims,
                .key_token = heads * dims, .key_head = dims, .value_token = (heads + a->kv_heads) * dims,
                .value_head = dims, .out_token = a->heads * dims, .out_head = dims, .cache_block = a->cache_block,
                .cache_head = a->cache_head, .bfloat16 = a->bfloat16, .scale = a->scale};
    if (hybridflow_paged_store(&of)) return 1;
    of.next = &attended;
    return hybridflow_paged_attention(&of);
}

// What has passed since `since` was for this kind of work.
static int passed(const Decoder *a, int kind, double *since) {
    if (a->seconds) {
        const double moment = now();
        a->seconds[kind] += moment - *since;
        *since = moment;
    }
    return 0;
}

// 0, or 1 where there is no memory.
int hybridflow_decoder(const Decoder *a) {
    const i64 size = a->bfloat16 ? 2 : 4, rows = a->rows, heads = a->heads + a->kv_heads;
    const i64 row = (heads + a->kv_heads) * a->dims * size;  // bytes of a token's queries, keys and values
    const i64 parts[7] = {rows * a->width * size,         rows * row,
                          rows * heads * a->dims * size,  rows * a->heads * a->dims * size,
                          rows * 2 * a->hidden * size,    rows * a->hidden * size,
                          rows * 2 * a->turning * size};
    i64 needed = 4 * (rows + heads);
    for (int i = 0; i < 7; i++) needed += up(parts[i], 64);
    float *const r = scratch_of(needed / 4 + 16);  // of norms
    if (!r) return 1;
    char *at = (char *)r + up(4 * (rows + heads), 64), *of[7];
    for (int i = 0; i < 7; at += up(parts[i], 64), i++) of[i] = at;
    char *normed = of[0], *qkv = of[1], *turned = of[2], *seen = of[3], *gate_up = of[4], *gated = of[5], *angles = of[6];
    double since = a->seconds ? now() : 0;
    i64 next = 0;
    const Rows swiglu = {.x = gate_up, .y = gated, .next = &next, .rows = rows, .columns = a->hidden, .what = SWIGLU,
                         .bfloat16 = a->bfloat16};
    return norm(a, a->first ? RMS_NORM : ADD_RMS_NORM, a->x, a->first_norm, normed, rows, a->width, r) ||
           passed(a, ELEMENTWISE, &since) ||
           linear(a, normed, a->qkv, a->qkv_bias, qkv, a->width, row / size) || passed(a, PRODUCTS, &since) ||
           (a->query_norm && head_norms(a, qkv, row, size, r)) || rotate(a, qkv, row, size, turned, angles) ||
           passed(a, ELEMENTWISE, &since) ||
           attention(a, turned, qkv, size, seen) || passed(a, ATTENTION, &since) ||
           linear(a, seen, a->out, a->out_bias, a->y, a->heads * a->dims, a->width) || passed(a, PRODUCTS, &since) ||
           norm(a, ADD_RMS_NORM, a->y, a->second_norm, normed, rows, a->width, r) || passed(a, ELEMENTWISE, &since) ||
           linear(a, normed, a->gate_up, a->gate_up_bias, gate_up, a->width, 2 * a->hidden) ||
           passed(a, PRODUCTS, &since) || hybridflow_rows(&swiglu) || passed(a, ELEMENTWISE, &since) ||
           linear(a, gated, a->down, a->down_bias, a->y, a->hidden, a->width) || passed(a, PRODUCTS, &since);
}
