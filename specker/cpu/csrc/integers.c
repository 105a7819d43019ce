// Tiles with 8-bit activations.
#include "tiles.h"

#define AHEAD 8192 // prefetch distance in bytes

// The dot products of a group of W with T rows of x at `a`. With `apart`, d0 is the sum over columns 0 to 15 and d1 the
// sum over columns 16 to 31. Without it, only the sum of d0 and d1 is meaningful.
#if LANES == 8 || defined(BY_PAIRS)
// There are 16 registers, and a load of x serves all of W's registers. So eight sums stay in registers while the codes
// are read one by one; with the loops in the other order, compilers spill registers.
INLINE void dots(int bits, int apart, int T, const uint8_t *w, const int8_t *a, vi d0[MOST][PARTS], vi d1[MOST][PARTS]) {
    static const int ORDER[2][8] = {{0, 4, 1, 5, 2, 6, 3, 7}, {0, 1, 2, 3, 4, 5, 6, 7}};
#ifdef BY_PAIRS // this many sums of pairs fit 16 bits: 8 2 15 127, 4 2 31 127, 2 2 63 127 < 2^15
    const int most = bits == 8 ? 1 : bits == 6 ? 2 : bits == 5 || bits == E2M1 || apart ? 4 : 8;
#else
    const int most = 8;
#endif
#pragma GCC unroll 8
    for (int t = 0; t < T; t++)
#pragma GCC unroll 2
        for (int part = 0; part < PARTS; part++) d0[t][part] = d1[t][part] = (vi){0};
#pragma GCC unroll 8
    for (int n = 0; n < 8; n += most) {
#ifdef BY_PAIRS
        vh sum[MOST][PARTS];
#endif
#pragma GCC unroll 8
        for (int j = n; j < n + most; j++) {
            const int i = ORDER[apart][j];
            vh q[PARTS];
#pragma GCC unroll 2
            for (int part = 0; part < PARTS; part++) q[part] = code(bits, w, part, i);
#pragma GCC unroll 8
            for (int t = 0; t < T; t++) {
                const vi word_ = (vi){0} + word(a + t * GROUP + 4 * i);
#pragma GCC unroll 2
                for (int part = 0; part < PARTS; part++) {
#ifdef BY_PAIRS
                    if (bits < 8) {
                        vh both = pairs(q[part], word_);
                        if (j > n) both += sum[t][part];
                        __asm__("" : "+x"(both)); // otherwise gcc adds all of them at the end
                        sum[t][part] = both;
                        continue;
                    }
#endif
                    vi *d = apart && i >= 4 ? &d1[t][part] : &d0[t][part];
                    *d = bits == 8 ? dot8(*d, q[part], word_) : dot4(*d, q[part], word_);
#if LANES == 8
                    __asm__("" : "+x"(*d));
#endif
                }
            }
        }
#ifdef BY_PAIRS
        if (bits < 8) {
#pragma GCC unroll 8
            for (int t = 0; t < T; t++)
#pragma GCC unroll 2
                for (int part = 0; part < PARTS; part++) {
                    vi *d = apart && n >= 4 ? &d1[t][part] : &d0[t][part];
                    *d += sum_pairs(sum[t][part]);
                }
        }
#endif
    }
}
#else
INLINE void dots(int bits, int apart, int T, const uint8_t *w, const int8_t *a, vi d0[MOST][PARTS], vi d1[MOST][PARTS]) {
    (void)apart;
#pragma GCC unroll 4
    for (int part = 0; part < PARTS; part++) {
        vh q[8];
        codes(bits, w, part, q);
#pragma GCC unroll 16
        for (int t = 0; t < T; t++) {
            vi first = (vi){0}, second = (vi){0};
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) {
                vi low = (vi){0} + word(a + t * GROUP + 4 * i), high = (vi){0} + word(a + t * GROUP + 16 + 4 * i);
                first = bits == 8 ? dot8(first, q[i], low) : dot4(first, q[i], low);
                second = bits == 8 ? dot8(second, q[i + 4], high) : dot4(second, q[i + 4], high);
            }
            d0[t][part] = first, d1[t][part] = second;
        }
    }
}
#endif

INLINE void tile_integers(int bits, int scales, int T, const uint8_t *w, const rows *x, int64_t t0, int64_t E, float *y,
                          int64_t row_y) {
    const int64_t columns = unit_columns(scales), size = unit_bytes(bits, scales);
    const int shifted = scales == HALF_SHIFT || scales == FLOAT_SHIFT || scales == SUPER;
    const int zero = bits == 8 ? ZERO8 : zero_of(bits, scales); // the number that code 0 stands for, negated
    vf acc[MOST][PARTS];
    for (int t = 0; t < T; t++)
        for (int part = 0; part < PARTS; part++) acc[t][part] = splat(0);
    for (int64_t u = 0; u < E / columns; u++, w += size) {
#pragma GCC unroll 1
        for (int g = 0; g < columns / GROUP; g++) {
            const int64_t group = u * (columns / GROUP) + g;
            const uint8_t *here = w + g * code_bytes(bits);
            const int64_t at = t0 * (E / GROUP) + group * T;
            const int8_t *q8 = x->q + at * GROUP;
            const float *by = x->scale + at, *both = x->both + at, *sum = x->sum + 2 * at;
            if (T > 1) // a single row leaves the processor time to find the stream, and reads faster by itself
                for (int i = 0; i < code_bytes(bits) + 32; i += 64) prefetch(here + AHEAD + i);
            vi d0[MOST][PARTS], d1[MOST][PARTS];
            dots(bits, scales == SIXTEEN, T, here, q8, d0, d1);
#pragma GCC unroll 4
            for (int part = 0; part < PARTS; part++) {
                vf scale, shift, second = splat(0); // second: the scale of columns 16 to 31
                scales_of(bits, scales, w, g, part, &scale, &shift);
                if (scales == SIXTEEN) second = shift;
                vf low_zero = scale * (float)-zero, high_zero = second * (float)-zero;
                if (shifted) low_zero = zero ? low_zero + shift : shift;
#pragma GCC unroll 16
                for (int t = 0; t < T; t++) {
                    vf to = acc[t][part];
                    if (scales == SIXTEEN) {
                        vf both_ = fma_(to_float(d1[t][part]), second, to_float(d0[t][part]) * scale);
                        to = fma_(both_, splat(by[t]), to);
                        to = fma_(low_zero, splat(sum[2 * t]), fma_(high_zero, splat(sum[2 * t + 1]), to));
                    } else {
                        to = fma_(to_float(d0[t][part] + d1[t][part]), scale * splat(by[t]), to);
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

#if MOST == 16
#define EACH_T(X) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11) X(12) X(13) X(14) X(15) X(16)
#elif MOST == 8
#define EACH_T(X) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8)
#elif MOST == 6
#define EACH_T(X) X(1) X(2) X(3) X(4) X(5) X(6)
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
