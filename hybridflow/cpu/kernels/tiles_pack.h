// Operands of products of tiles, for one type of elements: see both_types.h. The left one's tiles are lines of 32 inner
// numbers, the right one's lines of 16 columns, of two inner numbers each: either is the other turned.

// 16 lines, of which `lines` are there, and 32 inner numbers, of which `depth` are: `pieces` tiles, 2 TILE_BYTES apart.
// `along`: numbers of a line lie side by side and lines `stride` apart; else the other way round.
INLINE void NAME(pack_tile)(const T *from, i64 stride, int along, int right, i64 lines, i64 depth, int pieces,
                            char *to) {
    vf words[3][16];
    for (int i = 0; i < 16; i++) {
        vu of[3] = {0};
        if (!along) {
            const T *first = from + 2 * i * stride;
            NAME(across)(2 * i < depth ? first : NULL, 2 * i + 1 < depth ? first + stride : NULL, lines, pieces, of);
        } else if (i < lines) {
            NAME(along)(from + i * stride, depth, pieces, of);
        }
        for (int p = 0; p < pieces; p++) {
            if (along == right) words[p][i] = (vf)of[p];
            else store_float((float *)(to + 2 * TILE_BYTES * p + 64 * i), (vf)of[p]);
        }
    }
    for (int p = 0; along == right && p < pieces; p++) {
        turn_square(words[p]);
        for (int i = 0; i < 16; i++) store_float((float *)(to + 2 * TILE_BYTES * p + 64 * i), words[p][i]);
    }
}

// lines x depth of a matrix -> [32 lines][step][piece][16 lines], as blocks take it.
INLINE void NAME(pack_blocks)(const T *from, i64 line, i64 inner, int right, i64 lines, i64 depth, int pieces,
                              char *to) {
    const int along = inner == 1;
    const i64 stride = along ? line : inner;
    for (i64 l = 0; l < lines; l += SIDE)
        for (i64 d = 0; d < depth; d += STEP, to += 2 * TILE_BYTES * pieces)
            for (i64 half = 0; half < 2; half++) {
                const i64 first = l + 16 * half;
                const T *at = from + first * line + d * inner;
                char *tile = to + TILE_BYTES * half;
                if (first >= lines) {
                    for (int p = 0; p < pieces; p++) memset(tile + 2 * TILE_BYTES * p, 0, TILE_BYTES);
                } else if (lines - first >= 16 && depth - d >= STEP) {  // numbers that the compiler knows
                    if (along) NAME(pack_tile)(at, stride, 1, right, 16, STEP, pieces, tile);
                    else NAME(pack_tile)(at, stride, 0, right, 16, STEP, pieces, tile);
                } else {
                    NAME(pack_tile)(at, stride, along, right, lines - first, depth - d, pieces, tile);
                }
            }
}
SHARED void NAME(pack_left)(const T *from, i64 line, i64 inner, i64 lines, i64 depth, char *to) {
    NAME(pack_blocks)(from, line, inner, 0, lines, depth, NAME(PIECES), to);
}
SHARED void NAME(pack_right)(const T *from, i64 line, i64 inner, i64 lines, i64 depth, char *to) {
    NAME(pack_blocks)(from, line, inner, 1, lines, depth, NAME(PIECES), to);
}
