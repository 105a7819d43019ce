// Tiles over activations in eight bits.
#include "tiles.h"

#define AHEAD 4096 // bytes between the bytes in use and the prefetched ones

INLINE void tile_integers(int bits, int scales, int T, const uint8_t *w, const rows *x, int64_t t0, int64_t E, float *y,
                          int64_t row_y) {
    const int64_t columns = unit_columns(scales), size = unit_bytes(bits, scales);
    const int shifted = scales == HALF_SHIFT || scales == FLOAT_SHIFT || scales == SUPER;
    const int zero = bits == 8 ? ZERO8 : zero_of(bits, scales); // what a code of 0 stands for, negated
    vf acc[MOST][PARTS];
    for (int t = 0; t < T; t++)
        for (int part = 0; part < PARTS; part++) acc[t][part] = splat(0);
    for (int64_t u = 0; u < E / columns; u++, w += size) {
#pragma GCC unroll 1
        for (int g = 0; g < columns / GROUP; g++) {
            const int64_t group = u * (columns / GROUP) + g;
            const uint8_t *here = w + g * code_bytes(bits);
            const int64_t at = group * x->T + t0;
            const int8_t *q8 = x->q + at * GROUP;
            const float *by = x->scale + at, *both = x->both + at, *sum = x->sum + 2 * at;
            for (int i = 0; i < code_bytes(bits) + 32; i += 64) prefetch(here + AHEAD + i);
#pragma GCC unroll 4
            for (int part = 0; part < PARTS; part++) {
                vh q[8];
                vf scale, shift, second = splat(0); // second: the scale of columns 16 to 31
                codes(bits, here, part, q);
                scales_of(bits, scales, w, g, part, &scale, &shift);
                if (scales == SIXTEEN) second = shift;
                vf low_zero = scale * (float)-zero, high_zero = second * (float)-zero;
                if (shifted) low_zero = zero ? low_zero + shift : shift;
#pragma GCC unroll 8
                for (int t = 0; t < T; t++) {
                    const int8_t *a = q8 + t * GROUP;
                    vi d0 = (vi){0}, d1 = (vi){0};
#pragma GCC unroll 4
                    for (int i = 0; i < 4; i++) {
                        vi low = (vi){0} + word(a + 4 * i), high = (vi){0} + word(a + 16 + 4 * i);
                        d0 = bits == 8 ? dot8(d0, q[i], low) : dot4(d0, q[i], low);
                        d1 = bits == 8 ? dot8(d1, q[i + 4], high) : dot4(d1, q[i + 4], high);
                    }
                    vf to = acc[t][part];
                    if (scales == SIXTEEN) {
                        to = fma_(fma_(to_float(d1), second, to_float(d0) * scale), splat(by[t]), to);
                        to = fma_(low_zero, splat(sum[2 * t]), fma_(high_zero, splat(sum[2 * t + 1]), to));
                    } else {
                        to = fma_(to_float(d0 + d1), scale * splat(by[t]), to);
                        if (shifted || zero) to = fma_(low_zero, splat(both[t]), to);
                    }
                    acc[t][part] = to;
                }
            }
        }
    }
    for (int t = 0; t < T; t++)
        for (int part = 0; part < PARTS; part++) store(y + t * row_y + part * LANES, acc[t][part]);
}

#if MOST == 8
#define EACH_T(X) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8)
#elif MOST == 4
#define EACH_T(X) X(1) X(2) X(3) X(4)
#else
#define EACH_T(X) X(1) X(2)
#endif
#define CASE(T) \
    case T: \
        tile_integers(bits, scales, T, w, x, t0, E, y, row_y); \
        return;
#define TILE(name, BITS, SCALES) \
    static void tile_##name(int T, const uint8_t *w, const rows *x, int64_t t0, int64_t E, float *y, int64_t row_y) { \
        const int bits = BITS, scales = SCALES; \
        switch (T) { EACH_T(CASE) } \
    }
EACH_KIND(TILE)

#define ENTRY(name, BITS, SCALES) [name] = tile_##name,
integer_tile *const INTEGER_TILES[FORMATS] = {EACH_KIND(ENTRY)};
