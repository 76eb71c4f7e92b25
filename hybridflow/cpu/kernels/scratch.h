// Memory of a thread that stays from call to call: fresh memory would be taken page by page in every layer.

#include "vectors.h"

static __thread struct {
    float *memory;
    i64 size;
} kept;

// `size` floats, of any content; NULL where there is no memory.
SHARED float *scratch_of(i64 size) {
    if (size > kept.size) {
        free(kept.memory);
        kept.size = 0;
        kept.memory = aligned_alloc(64, up(4 * size, 64));
        if (kept.memory) kept.size = size;
    }
    return kept.memory;
}
