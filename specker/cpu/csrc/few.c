// Products of a few rows over units of 256 columns, with the bits of squares.c.
#include "units.h"
#if defined(__AMX_INT8__)

// Float32 adds products of dots and integer scales without rounding while they stay below 2^24: for eight groups of four
// bits, if codes are less half of their range, for four of five bits, and for one of six.
INLINE void tile(int bits, int scales, int T, const uint8_t *w, const rows *x, int part, int64_t E, float *y, int64_t row_y) {
    const int64_t size = unit_bytes(bits, scales), units = E / 256, lines = (size / 8 + 63) / 64;
    const eights *given = &x->large;
    const int apart = scales == SIXTEEN, exact = bits == 4 ? 8 : bits == 5 ? 4 : 1;
    _Alignas(64) float all[8][ROWS]; // of all units so far
    _Alignas(64) int32_t sums[8][ROWS]; // of this one
    memset(all, 0, T * ROWS * 4);
    for (int64_t u = 0; u < units; u++, w += size) {
        const uint8_t *p = w + 8 * code_bytes(bits);
#pragma GCC unroll 1
        for (int n = 0; n < 8; n += exact) {
            vf acc[8];
#pragma GCC unroll 8
            for (int t = 0; t < T; t++) acc[t] = splat(0);
#pragma GCC unroll 1
            for (int g = n; g < n + exact; g++) {
                const int64_t at = (u * 8 + g) * T;
                const int8_t *row = given->q + at * GROUP;
                const int32_t *begin = given->less[part] + 2 * at;
                ask_ahead(w + g * lines * 64, lines);
                vi scale, second;
                vh q[8];
                integer_scales(scales, p, g, &scale, &second);
                codes(bits, w + g * code_bytes(bits), 0, q);
                const vf by = to_float(scale), by2 = to_float(second);
#pragma GCC unroll 8
                for (int t = 0; t < T; t++, row += GROUP) {
                    vi dots[2] = {(vi){0} + begin[2 * t], (vi){0} + begin[2 * t + 1]}; // of columns 0 to 15, and 16 to 31
#pragma GCC unroll 4
                    for (int i = 0; i < 4; i++) { // two short chains of additions take less time than a long one
                        dots[0] = dot4_all(dots[0], q[i], row + 4 * i);
                        dots[1] = dot4_all(dots[1], q[i + 4], row + 4 * i + 16);
                    }
                    if (apart)
                        acc[t] = fma_(to_float(dots[1]), by2, to_float(dots[0]) * by);
                    else
                        acc[t] = fma_(to_float(dots[0] + dots[1]), by, acc[t]);
                }
            }
            __asm__("" ::: "memory"); // otherwise `sums` takes registers that the groups need
#pragma GCC unroll 8
            for (int t = 0; t < T; t++) {
                const vi more = to_integer(acc[t]);
                store(sums[t], (vf)(n ? lanes(sums[t]) + more : more));
            }
        }
        const factors f = factors_of(scales, p);
        vi offsets[4];
        if (scales == SUPER) pairs_of(p, 1 << (bits - 1), offsets);
        const int64_t at = u * T;
#pragma GCC unroll 8
        for (int t = 0; t < T; t++) {
            const int16_t *of_x = given->sums + 8 * (at + t);
            vi sum = lanes(sums[t]);
            if (scales == SUPER) sum = summed(sum, offsets, of_x); // what codes were less by
            store(all[t], scaled(scales, &f, of_x, given->scale[at + t], sum, load(all[t])));
        }
        for (int t = 0; t < T; t++)
            if (x->far.groups[t * units + u]) store(all[t], with_outliers(bits, scales, w, &f, &x->far, t, u, E, load(all[t])));
    }
    for (int t = 0; t < T; t++) memcpy(y + t * row_y, all[t], ROWS * 4);
}

#define CASE(T) case T: tile(bits, scales, T, w, x, part, E, y, row_y); break;
#define TILE(name, BITS, SCALES) \
    static void tile_##name(const uint8_t *w, const rows *x, int part, int64_t E, float *y, int64_t row_y) { \
        const int bits = BITS, scales = SCALES; \
        switch (x->T) { CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) } \
    }
TILE(FOUR_SUPER, 4, SUPER)
TILE(FIVE_SUPER, 5, SUPER)
TILE(SIX_SIXTEEN, 6, SIXTEEN)

void few_rows(int64_t format, const uint8_t *w, const rows *x, int part, int64_t E, float *y, int64_t row_y) {
    if (format == FOUR_SUPER)
        tile_FOUR_SUPER(w, x, part, E, y, row_y);
    else if (format == FIVE_SUPER)
        tile_FIVE_SUPER(w, x, part, E, y, row_y);
    else
        tile_SIX_SIXTEEN(w, x, part, E, y, row_y);
}
#endif
