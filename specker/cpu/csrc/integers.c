// Tiles with 8-bit activations.
#include "tiles.h"
#if defined(__x86_64__)
#include <cpuid.h>
#endif

// Whether a single row of x asks for weights ahead, too. Memory gives Zen 3 and 4 all it can without that; other processors gain by it.
static int alone;
#if defined(__x86_64__)
__attribute__((constructor)) static void set_alone(void) {
    unsigned a = 0, b = 0, c = 0, d = 0;
    __get_cpuid(0, &a, &b, &c, &d);
    const int amd = b == signature_AMD_ebx;
    __get_cpuid(1, &a, &b, &c, &d);
    alone = !amd || (a >> 20 & 255) + (a >> 8 & 15) > 0x19;
}
#endif

// The sum of a group in a row of x, times its scales, plus `to`. Without SIXTEEN, all is in d0.
INLINE vf added(int scales, vi d0, vi d1, vf scale, vf shift, float by, float both, vf to) {
    if (scales == SIXTEEN) return fma_(fma_(to_float(d1), shift, to_float(d0) * scale), splat(by), to);
    to = fma_(to_float(d0), scale * splat(by), to);
    return scales == HALF_SHIFT || scales == FLOAT_SHIFT || scales == SUPER ? fma_(shift, splat(both), to) : to;
}

#if LANES == 8 || defined(BY_PAIRS)
#define CODE_BY_CODE
// The dot products of a group of W with T rows of x at `a`. With `apart`, d0 is the sum over columns 0 to 15 and d1 the
// sum over columns 16 to 31. Without it, d0 is the sum over all of them.
//
// There are 16 registers, and a load of x serves all of W's registers. So eight sums stay in registers while the codes
// are read one by one; with the loops in the other order, compilers spill registers.
INLINE void dots(int bits, int apart, int T, const uint8_t *w, const int8_t *a, const int32_t *less, vi d0[MOST][PARTS],
                 vi d1[MOST][PARTS]) {
    static const int ORDER[2][8] = {{0, 4, 1, 5, 2, 6, 3, 7}, {0, 1, 2, 3, 4, 5, 6, 7}};
#ifdef BY_PAIRS // this many sums of pairs fit 16 bits: 8 2 15 127, 4 2 31 127, 2 2 63 127 < 2^15
    const int most = bits == 8 ? 1 : bits == 6 ? 2 : bits == 5 || bits == E2M1 || apart ? 4 : 8;
#else
    const int most = 8;
#endif
#pragma GCC unroll 8
    for (int t = 0; t < T; t++)
#pragma GCC unroll 2
        for (int part = 0; part < PARTS; part++)
            d0[t][part] = (vi){0} + (less ? less[2 * t] : 0), d1[t][part] = (vi){0} + (apart ? less[2 * t + 1] : 0);
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
#endif

INLINE void tile_integers(int bits, int scales, int T, const uint8_t *w, const rows *x, const int32_t *less, int64_t t0,
                          int64_t E, float *y, int64_t row_y) {
    const int64_t columns = unit_columns(scales), size = unit_bytes(bits, scales);
    const int64_t lines = (size * GROUP / columns + 63) / 64; // of memory, for a group
    const int apart = scales == SIXTEEN, offset = offset_of(bits, scales) != 0, asks = T > 1 || alone;
    vf acc[MOST][PARTS];
#pragma GCC unroll 16
    for (int t = 0; t < T; t++)
#pragma GCC unroll 4
        for (int part = 0; part < PARTS; part++) acc[t][part] = splat(0);
    for (int64_t u = 0; u < E / columns; u++, w += size) {
#pragma GCC unroll 1
        for (int g = 0; g < columns / GROUP; g++) {
            const int64_t at = t0 * (E / GROUP) + (u * (columns / GROUP) + g) * T;
            const uint8_t *here = w + g * code_bytes(bits);
            const int8_t *q8 = x->small.q + at * GROUP;
            const float *by = x->small.scale + at, *both = x->small.both + at;
            const int32_t *begin = offset ? less + 2 * at : 0;
            if (asks) ask_ahead(w + g * lines * 64, lines);
#ifdef CODE_BY_CODE
            vi d0[MOST][PARTS], d1[MOST][PARTS];
            dots(bits, apart, T, here, q8, begin, d0, d1);
#endif
#pragma GCC unroll 4
            for (int part = 0; part < PARTS; part++) {
                vf scale, shift = splat(0); // SIXTEEN: the scales of columns 0 to 15 and 16 to 31
                scales_of(bits, scales, w, g, part, &scale, &shift);
#ifdef CODE_BY_CODE
#pragma GCC unroll 16
                for (int t = 0; t < T; t++)
                    acc[t][part] = added(scales, d0[t][part], d1[t][part], scale, shift, by[t], both[t], acc[t][part]);
#else
                vh q[8];
                codes(bits, here, part, q);
#pragma GCC unroll 16
                for (int t = 0; t < T; t++) { // a row after another: its sum and that of its group need few registers
                    vi d0 = (vi){0} + (offset ? begin[2 * t] : 0), d1 = (vi){0} + (offset && apart ? begin[2 * t + 1] : 0);
#pragma GCC unroll 8
                    for (int i = 0; i < 8; i++) {
                        vi *d = apart && i >= 4 ? &d1 : &d0;
                        const int8_t *four = q8 + t * GROUP + 4 * i;
                        *d = bits == 8 ? dot8_all(*d, q[i], four) : dot4_all(*d, q[i], four);
                    }
                    acc[t][part] = added(scales, d0, d1, scale, shift, by[t], both[t], acc[t][part]);
                }
#endif
            }
        }
    }
#pragma GCC unroll 16
    for (int t = 0; t < T; t++)
#pragma GCC unroll 4
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
        tile_integers(bits, scales, T, w, x, less, t0, E, y, row_y); \
        return;
#define TILE(name, BITS, SCALES) \
    static void tile_##name(int T, const uint8_t *w, const rows *x, const int32_t *less, int64_t t0, int64_t E, float *y, \
                            int64_t row_y) { \
        const int bits = BITS, scales = SCALES; \
        switch (T) { EACH_T(CASE) } \
    }
EACH_KIND(TILE)

#define ENTRY(name, BITS, SCALES) [name] = tile_##name,
integer_tile *const INTEGER_TILES[FORMATS] = {EACH_KIND(ENTRY)};
