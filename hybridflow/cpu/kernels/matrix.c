// Products of matrices by the matrix units of a CPU; `matrix.py` says what is passed.

#define _GNU_SOURCE
#include <sys/syscall.h>
#include <unistd.h>

#include "scratch.h"
#include "tiles.h"

#define WIDTH 768           // columns at a time, and
#define PACKED (768 * 256)  // float32 of them that are packed, in three pieces: they stay in the second cache

typedef struct {
    const void *a, *b;
    float *c;
    i64 *next;  // the rows that no thread has taken yet, in units of `share`
    i64 rows, inner, columns, a_row, a_inner, b_inner, b_column, c_row, c_column;  // strides, in elements
    i64 adds;   // to what is in c
    i64 share;  // rows of a thread at a time, a multiple of SIDE
    i64 bfloat16;
} Matrix;

#ifdef MATRIX_UNITS

BLOCK_OF(3, 3, 32)
BLOCK_OF(1, 1, 32)

// A block of sums to where it belongs, and from there, whose rows or columns lie side by side.
static void put(const Matrix *x, const float *sums, i64 rows, i64 columns, float *c) {
    if (x->c_column == 1) {
        for (i64 r = 0; r < rows; r++) memcpy(c + r * x->c_row, sums + SIDE * r, 4 * columns);
        return;
    }
    for (i64 n = 0; n < columns; n += LANES)
        for (i64 r = 0; r < rows; r += LANES) {
            vf square[LANES];
            for (int l = 0; l < LANES; l++) square[l] = load_float(sums + SIDE * (r + l) + n);
            turn_square(square);
            for (int l = 0; l < least(LANES, columns - n); l++)
                put_some_float(c + r + (n + l) * x->c_column, square[l], rows - r);
        }
}
static void get(const Matrix *x, const float *c, i64 rows, i64 columns, float *sums) {
    if (x->c_column == 1) {
        for (i64 r = 0; r < rows; r++) memcpy(sums + SIDE * r, c + r * x->c_row, 4 * columns);
        return;
    }
    for (i64 n = 0; n < columns; n += LANES)
        for (i64 r = 0; r < rows; r += LANES) {
            vf square[LANES];
            for (int l = 0; l < LANES; l++)
                square[l] = n + l < columns ? some_float(c + r + (n + l) * x->c_column, rows - r) : all(0.0f);
            turn_square(square);
            for (int l = 0; l < LANES; l++) store_float(sums + SIDE * (r + l) + n, square[l]);
        }
}

static i64 width_of(const Matrix *x) { return least(WIDTH, up(x->columns, SIDE)); }

// Inner numbers at a time.
static i64 depth_of(const Matrix *x) {
    const i64 most = PACKED * (x->bfloat16 ? PIECES_float : 1) / width_of(x) / STEP * STEP;
    return least(least(most, 2048), up(x->inner, STEP));
}

static void some_rows(const Matrix *x, i64 first, i64 last, char *left, char *right, float *sums) {
    const i64 most = depth_of(x), step = 2 * TILE_BYTES * (x->bfloat16 ? PIECES_bfloat16 : PIECES_float);
    const block blocks = x->bfloat16 ? block_1_1_32 : block_3_3_32;
    for (i64 j = 0; j < x->columns; j += WIDTH)
        for (i64 k = 0; k < x->inner; k += most) {
            const i64 width = least(WIDTH, x->columns - j), depth = least(most, x->inner - k);
            const i64 steps = (depth + STEP - 1) / STEP;
            const i64 b = k * x->b_inner + j * x->b_column;
            if (x->bfloat16)
                pack_right_bfloat16((const bfloat16 *)x->b + b, x->b_column, x->b_inner, width, depth, right);
            else
                pack_right_float((const float *)x->b + b, x->b_column, x->b_inner, width, depth, right);
            for (i64 i = first; i < last; i += SIDE) {
                const i64 rows = least(SIDE, last - i);
                const i64 a = i * x->a_row + k * x->a_inner;
                if (x->bfloat16)
                    pack_left_bfloat16((const bfloat16 *)x->a + a, x->a_row, x->a_inner, rows, depth, left);
                else
                    pack_left_float((const float *)x->a + a, x->a_row, x->a_inner, rows, depth, left);
                for (i64 n = 0; n < width; n += SIDE) {
                    const i64 columns = least(SIDE, width - n);
                    float *c = x->c + i * x->c_row + (j + n) * x->c_column;
                    const char *of = right + n / SIDE * steps * step;
                    const int adds = x->adds || k, whole = rows == SIDE && columns == SIDE && x->c_column == 1;
                    if (whole) {
                        blocks(left, of, steps, adds ? c : NULL, c, x->c_row);
                    } else {
                        if (adds) get(x, c, rows, columns, sums);
                        blocks(left, of, steps, adds ? sums : NULL, sums, SIDE);
                        put(x, sums, rows, columns, c);
                    }
                }
            }
        }
}

// Called by as many threads as there are, with one `next`. 0, or 1 where there is no memory.
int hybridflow_matrix(const Matrix *x) {
    const i64 wide = width_of(x), bytes = 2 * depth_of(x) * (x->bfloat16 ? PIECES_bfloat16 : PIECES_float);  // of a line
    char *const scratch = (char *)scratch_of(((wide + SIDE) * bytes + 4 * SIDE * SIDE) / 4);
    if (!scratch) return 1;
    take_units();
    for (;;) {
        const i64 first = x->share * __atomic_fetch_add(x->next, 1, __ATOMIC_RELAXED);
        if (first >= x->rows) break;
        some_rows(x, first, least(first + x->share, x->rows), scratch + wide * bytes, scratch,
                  (float *)(scratch + (wide + SIDE) * bytes));
    }
    leave_units();
    return 0;
}

// Whether this process may use the units: Linux wants to be asked before the first use, once.
int hybridflow_matrix_units(void) {
    const long ask = 0x1023, tiles = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return syscall(SYS_arch_prctl, ask, tiles) == 0;
}

#else

int hybridflow_matrix(const Matrix *x) {
    (void)x;
    return 1;
}
int hybridflow_matrix_units(void) { return 0; }

#endif
