// Blocks of a stack that take one another's places; `moves.py` says what is passed.

#include "vectors.h"

typedef struct {
    char *const *stacks;  // of `stacks_count` stacks alike
    const i64 *moves;     // (count, 2): to block, from block, in this order; block number `aside` is the scratch
    char *scratch;        // `stretch` bytes for each thread
    i64 *next;            // the stretch that no thread has taken yet
    i64 *threads;         // that have begun
    i64 stacks_count, count, aside, block_bytes, stretch;  // stretch: bytes of each block that are moved at a time
} Moves;

int hybridflow_move_blocks(const Moves *m) {
    char *aside = m->scratch + m->stretch * __atomic_fetch_add(m->threads, 1, __ATOMIC_RELAXED);
    i64 stretches = (m->block_bytes + m->stretch - 1) / m->stretch;
    for (;;) {
        i64 piece = __atomic_fetch_add(m->next, 1, __ATOMIC_RELAXED);
        if (piece >= m->stacks_count * stretches) return 0;
        i64 start = piece % stretches * m->stretch, left = m->block_bytes - start;
        i64 bytes = left < m->stretch ? left : m->stretch;
        char *stack = m->stacks[piece / stretches] + start;
        for (i64 i = 0; i < m->count; i++) {
            i64 to = m->moves[2 * i], from = m->moves[2 * i + 1];
            memcpy(to == m->aside ? aside : stack + to * m->block_bytes,
                   from == m->aside ? aside : stack + from * m->block_bytes, bytes);
        }
    }
}
