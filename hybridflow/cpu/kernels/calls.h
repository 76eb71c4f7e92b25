// What those kernels are given that a layer of a decoder calls: see the Python file of each.

#pragma once

#include "vectors.h"

enum { RMS_NORM, ADD_RMS_NORM, RMS_NORM_BACKWARD, SWIGLU, SWIGLU_BACKWARD, ROTATE };

typedef struct {
    const void *x, *weight, *grad, *cos, *sin;
    const void *beside;  // what is added to x or, in a backward pass, to the gradient; NULL: what `sum` has, or nothing
    void *y, *grad_x, *sum;
    float *r;            // (rows,): 1 / sqrt(mean(x^2) + eps)
    float *grad_weight;  // (blocks, columns)
    i64 *next;           // the block that no thread has taken yet
    i64 rows, columns, what, bfloat16;
    // of rotary embedding, where a row is a token; the heads of a group lie side by side; strides in elements
    i64 groups, heads, turning, x_token, x_group, y_token, y_group;
    float eps;
} Rows;

typedef struct {
    const void *x, *weight, *bias;  // bias: or NULL
    void *y;                        // (rows, outputs)
    i64 *next;                      // the block that no thread has taken yet
    i64 rows, inner, outputs, x_row, weight_row, bfloat16;  // strides in elements
    i64 units;                      // whether the matrix units multiply
} Linear;

typedef struct {
    const void *query, *key, *value;
    void *cache, *out;
    const int32_t *table;    // (sequences, table_row): the blocks of each sequence in the cache
    const int32_t *starts;   // (sequences + 1,): where the queries of each begin
    const int32_t *lengths;  // (sequences,): keys of each, up to its last query's own
    const i64 *slots;        // (tokens,): block x block_size + place in it, negative for none
    i64 *next;               // the work that no thread has taken yet
    i64 sequences, tokens, longest, table_row;
    i64 heads, kv_heads, dims, block_size;
    i64 query_token, query_head, key_token, key_head, value_token, value_head, out_token, out_head;  // strides,
    i64 cache_block, cache_head;                                                                     // in elements
    i64 bfloat16;
    float scale;
} Paged;

// Each is called by as many threads as there are, with one `next`. 0, or 1 where there is no memory.
int hybridflow_rows(const Rows *);
int hybridflow_linear(const Linear *);
int hybridflow_paged_store(const Paged *);
int hybridflow_paged_attention(const Paged *);
