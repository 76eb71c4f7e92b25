// Attention over a cache in blocks, for one type of elements: see both_types.h.
//
// A head of a block is its keys, a row a token, and then its values. One thread computes a head of a sequence.

#include "rows.h"

static void NAME(paged_store)(const Paged *x, i64 first, i64 last) {
    for (i64 t = first; t < last; t++) {
        const i64 slot = x->slots[t], size = x->block_size, dims = x->dims;
        if (slot < 0) continue;
        T *to = (T *)x->cache + slot / size * x->cache_block + slot % size * dims;
        for (i64 head = 0; head < x->kv_heads; head++, to += x->cache_head) {
            memcpy(to, (const T *)x->key + t * x->key_token + head * x->key_head, dims * sizeof(T));
            memcpy(to + size * dims, (const T *)x->value + t * x->value_token + head * x->value_head, dims * sizeof(T));
        }
    }
}

// What lies `ahead`, in elements, is needed soon: a machine by itself fetches ahead to the end of a page alone.
INLINE void NAME(fetch)(const T *from, i64 ahead) { __builtin_prefetch((const char *)from + ahead * (i64)sizeof(T)); }

// scores[r, j] of R queries (R, dims) and `count` keys, rounded up to LANES.
#define SCORES(R)                                                                                                      \
    static void NAME(scores_##R)(const float *queries, const T *keys, i64 dims, i64 count, float *scores, i64 row,     \
                                 i64 ahead) {                                                                          \
        for (i64 j = 0; j < count; j += LANES) {                                                                       \
            vf dots[R][LANES];                                                                                         \
            for (int l = 0; l < LANES; l++) {                                                                          \
                vf sums[R];                                                                                            \
                for (int r = 0; r < R; r++) sums[r] = all(0.0f);                                                       \
                for (i64 d = 0; d < dims; d += LANES) {                                                                \
                    const T *key = keys + (j + l) * dims + d;                                                          \
                    NAME(fetch)(key, ahead);                                                                           \
                    for (int r = 0; r < R; r++)                                                                        \
                        sums[r] = add_product_float(sums[r], NAME(load)(key), load_float(queries + r * dims + d));     \
                }                                                                                                      \
                for (int r = 0; r < R; r++) dots[r][l] = sums[r];                                                      \
            }                                                                                                          \
            for (int r = 0; r < R; r++) store_float(scores + r * row + j, sums_of(dots[r]));                           \
        }                                                                                                              \
    }

// V vectors of outputs (R, dims) (+)= scores (R, count) values (count, dims).
#define OUTPUTS(R, V)                                                                                                  \
    INLINE void NAME(outputs_##R##_##V)(const float *scores, i64 row, const T *values, i64 dims, i64 count,            \
                                        float *outputs, int add, i64 ahead) {                                          \
        vf sums[R][V];                                                                                                 \
        for (int r = 0; r < R; r++)                                                                                    \
            for (int v = 0; v < V; v++) sums[r][v] = add ? load_float(outputs + r * dims + v * LANES) : all(0.0f);     \
        for (i64 j = 0; j < count; j++)                                                                                \
            for (int v = 0; v < V; v++) {                                                                              \
                const T *value = values + j * dims + v * LANES;                                                        \
                NAME(fetch)(value, ahead);                                                                             \
                for (int r = 0; r < R; r++)                                                                            \
                    sums[r][v] = add_product_float(sums[r][v], all(scores[r * row + j]), NAME(load)(value));           \
            }                                                                                                          \
        for (int r = 0; r < R; r++)                                                                                    \
            for (int v = 0; v < V; v++) store_float(outputs + r * dims + v * LANES, sums[r][v]);                       \
    }
#define QUERIES(R)                                                                                                     \
    SCORES(R)                                                                                                          \
    OUTPUTS(R, 1)                                                                                                      \
    OUTPUTS(R, 2)                                                                                                      \
    OUTPUTS(R, 4)                                                                                                      \
    static void NAME(outputs_##R)(const float *scores, i64 row, const T *values, i64 dims, i64 count, float *outputs,  \
                                  int add, i64 ahead) {                                                                \
        i64 d = 0;                                                                                                     \
        for (; PANEL == 4 && d + 4 * LANES <= dims; d += 4 * LANES)                                                    \
            NAME(outputs_##R##_4)(scores, row, values + d, dims, count, outputs + d, add, ahead);                             \
        for (; d + 2 * LANES <= dims; d += 2 * LANES)                                                                  \
            NAME(outputs_##R##_2)(scores, row, values + d, dims, count, outputs + d, add, ahead);                             \
        for (; d < dims; d += LANES)                                                                                   \
            NAME(outputs_##R##_1)(scores, row, values + d, dims, count, outputs + d, add, ahead);                             \
    }
QUERIES(6)
QUERIES(4)
QUERIES(2)
QUERIES(1)
#undef QUERIES
#undef OUTPUTS
#undef SCORES

// Where the keys of a block lie; its values lie block_size x dims behind.
static const T *NAME(keys_of)(const Paged *x, i64 sequence, i64 at, i64 kv) {
    return (const T *)x->cache + x->table[sequence * x->table_row + at / x->block_size] * x->cache_block +
           kv * x->cache_head;
}

// Keys that queries see: `count` from the token `at` of a sequence on, seen by `rows` queries from number `first` on.
typedef struct {
    const T *keys;
    i64 sequence, at, count, first, rows;
} NAME(Piece);

static NAME(Piece) NAME(piece)(const Paged *x, i64 kv, i64 sequence, i64 at, i64 end, i64 first, i64 rows) {
    return (NAME(Piece)){NAME(keys_of)(x, sequence, at, kv), sequence, at, least(x->block_size, end - at), first, rows};
}

// Few queries: `rows` from number `first` on of one sequence's tokens and heads, or those of the last tokens of several,
// which share their first blocks. Keys that queries share are read once. What is computed for one query is the same,
// and in the same order, whichever others there are.
static void NAME(paged_few)(const Paged *x, const Run *run, i64 after, i64 kv, i64 kv_after, i64 first, i64 rows,
                            float *scratch) {
    static const struct {
        int rows;
        void (*scores)(const float *, const T *, i64, i64, float *, i64, i64);
        void (*outputs)(const float *, i64, const T *, i64, i64, float *, int, i64);
    } of[4] = {{6, NAME(scores_6), NAME(outputs_6)},
               {4, NAME(scores_4), NAME(outputs_4)},
               {2, NAME(scores_2), NAME(outputs_2)},
               {1, NAME(scores_1), NAME(outputs_1)}};
    const i64 dims = x->dims, size = x->block_size, group = x->heads / x->kv_heads, row = up(x->longest, size);
    const i64 own = run->sequences == 1 ? rows : group, token = x->starts[run->first] + first / group;
    float *scores = scratch, *queries = scores + FEW * row, *outputs = queries + FEW * dims, factors[FEW];
    i64 ends[FEW];  // keys that a query sees
    for (i64 r = 0, lane = first % group; r < rows; r++, lane++) {
        const i64 t = token + lane / group, head = kv * group + lane % group;
        ends[r] = run->sequences > 1 ? x->lengths[run->first + r / group]
                                     : x->lengths[run->first] - (x->starts[run->first + 1] - 1 - t);
        NAME(take)((const T *)x->query + t * x->query_token + head * x->query_head, 0, 1, 1, dims, x->scale,
                   queries + r * dims, dims);
    }
    NAME(Piece) *const pieces = (NAME(Piece) *)up((i64)(outputs + FEW * dims), 8);
    i64 count = 0, seen = 0;
    for (i64 at = 0; at < run->shared; at += size)
        pieces[count++] = NAME(piece)(x, kv, run->first, at, run->shared, 0, rows);
    for (i64 r = 0; r < rows; r += own)
        for (i64 at = run->shared, end = ends[r + own - 1]; at < end; at += size)
            pieces[count++] = NAME(piece)(x, kv, run->first + r / group, at, end, r, own);
    for (i64 i = 0; i < count; i++) seen += pieces[i].count;
    const int stay = 2 * seen * dims * (i64)sizeof(T) <= NEAR;  // what is fetched now is there when it is needed
    const int small = size * dims * (i64)sizeof(T) <= 2 * FAR;  // blocks, of which the next is fetched
    // with the keys the values are fetched, and with these the keys of what comes after
    for (i64 i = 0; i < count; i++) {
        const NAME(Piece) *p = pieces + i;
        const T *next = i + 1 < count ? p[1].keys : pieces->keys + size * dims;
        const i64 ahead = stay ? size * dims : small ? next - p->keys : FAR / (i64)sizeof(T);
        i64 r = p->first;
        for (int k = 0; k < 4; k++)
            for (; r + of[k].rows <= p->first + p->rows; r += of[k].rows)
                of[k].scores(queries + r * dims, p->keys, dims, p->count, scores + r * row + p->at, row, ahead);
    }
    for (i64 r = 0; r < rows; r++)
        factors[r] = softmax_of_row(scores + r * row, ends[r], up(ends[r - r % own + own - 1], LANES));
    for (i64 i = 0; i < count; i++) {
        const NAME(Piece) *p = pieces + i;
        const T *values = p->keys + size * dims, *next = i + 1 < count ? p[1].keys + size * dims : NULL;
        if (stay || !next) {
            const i64 then = least(after + p->sequence - run->first, x->sequences - 1);
            next = NAME(keys_of)(x, then, stay && p->at < x->lengths[then] ? p->at : 0, kv_after);
        }
        const i64 ahead = stay || small ? next - values : FAR / (i64)sizeof(T);
        i64 r = p->first;
        for (int k = 0; k < 4; k++)
            for (; r + of[k].rows <= p->first + p->rows; r += of[k].rows)
                of[k].outputs(scores + r * row + p->at, row, values, dims, p->count, outputs + r * dims, p->at > 0,
                              ahead);
    }
    for (i64 r = 0, lane = first % group; r < rows; r++, lane++) {
        T *out = (T *)x->out + (token + lane / group) * x->out_token + (kv * group + lane % group) * x->out_head;
        for (i64 d = 0; d < dims; d += LANES)
            NAME(store)(out + d, load_float(outputs + r * dims + d) * factors[r]);
    }
}

// Many queries: products of matrices, as in attention.h.
static void NAME(paged_many)(const Paged *x, i64 sequence, i64 kv, float *scratch) {
    const i64 dims = x->dims, size = x->block_size, group = x->heads / x->kv_heads;
    const i64 start = x->starts[sequence], tokens = x->starts[sequence + 1] - start;
    const i64 before = x->lengths[sequence] - tokens;
    float *block = scratch, *queries = block + size * dims, *turned = queries + ROWS * dims;
    float *outputs = turned + ROWS * dims, *scores = outputs + ROWS * dims, factors[ROWS], lse[ROWS];
    for (i64 head = kv * group; head < (kv + 1) * group; head++)
        for (i64 first = 0; first < tokens; first += ROWS) {
            const i64 count = least(ROWS, tokens - first), lanes = up(count, 16), seen = before + first + count;
            NAME(take)((const T *)x->query + (start + first) * x->query_token + head * x->query_head, x->query_token,
                       count, lanes, dims, x->scale, queries, dims);
            turn(queries, dims, turned, lanes, dims, 0);
            for (i64 at = 0; at < seen; at += size) {
                const i64 keys = least(size, seen - at);
                product(NAME(as_floats)(NAME(keys_of)(x, sequence, at, kv), block, keys * dims), dims, 1, turned, lanes,
                        scores + at * lanes, lanes, keys, dims, lanes, 0);
            }
            softmax(scores, before, first, count, lanes, factors, lse, 1);
            for (i64 at = 0; at < seen; at += size) {
                const i64 keys = least(size, seen - at);
                product(scores + at * lanes, 1, lanes,
                        NAME(as_floats)(NAME(keys_of)(x, sequence, at, kv) + size * dims, block, keys * dims), dims,
                        outputs, dims, count, keys, dims, at > 0);
            }
            for (i64 r = 0; r < count; r++)
                for (i64 d = 0; d < dims; d += LANES)
                    store_float(outputs + r * dims + d, load_float(outputs + r * dims + d) * factors[r]);
            NAME(give)(outputs, dims, count, dims, (T *)x->out + (start + first) * x->out_token + head * x->out_head,
                       x->out_token);
        }
}
