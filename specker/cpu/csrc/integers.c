// Tiles with 8-bit activations.
#include "tiles.h"
#if defined(__x86_64__)
#include <cpuid.h>
#endif

// Bytes ahead at which weights are asked for: into the second cache early enough for memory, into the first one for the
// next group.
#define FAR 16384
#define NEAR 2048

// Whether a single row of x asks, too. Memory gives Zen 3 and 4 all it can without that; other processors gain by it.
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

// The sum of a group of a row, times its scales, plus `to`.
INLINE vf added(int scales, vi dot, vf scale, vf shift, float by, float both, vf to) {
    to = fma_(to_float(dot), scale * splat(by), to);
    return scales == HALF_SHIFT || scales == FLOAT_SHIFT ? fma_(shift, splat(both), to) : to;
}

// Asks for the weights that come `FAR` and `NEAR` bytes after those of a group of `lines` cache lines.
INLINE void ask_ahead(const uint8_t *w, int64_t lines) {
    for (int64_t i = 0; i < 64 * lines; i += 64) prefetch_far(w + FAR + i), prefetch(w + NEAR + i);
}

// The dot products of a group q of W with a row of x: over columns 0 to 15, and 16 to 31. `split`: in two chains of
// additions; otherwise all is in the first.
INLINE void row_dots(int bits, int split, const vh q[8], const int8_t *row, vi *first, vi *then) {
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        const int n = split ? i / 2 + i % 2 * 4 : i; // in turns
        vi *d = split && n >= 4 ? then : first;
        *d = bits == 8 ? dot8_all(*d, q[n], row + 4 * n) : dot4_all(*d, q[n], row + 4 * n);
    }
}

// Units of 32 columns.
INLINE void tile_small(int bits, int scales, int T, const uint8_t *w, const rows *x, const int32_t *less, int64_t t0, int64_t E,
                       float *y, int64_t row_y) {
    const int64_t size = unit_bytes(bits, scales), units = E / GROUP;
    const int offset = offset_of(bits, scales) != 0, asks = T > 1 || alone;
    vf acc[MOST][PARTS];
#pragma GCC unroll 16
    for (int t = 0; t < T; t++)
#pragma GCC unroll 4
        for (int part = 0; part < PARTS; part++) acc[t][part] = splat(0);
    for (int64_t u = 0; u < units; u++, w += size) {
        const int64_t at = t0 * units + u * T;
        const int8_t *rows = x->small.q + at * GROUP;
        const int32_t *begin = offset ? less + 2 * at : 0;
        if (asks) ask_ahead(w, (size + 63) / 64);
#ifdef CODE_BY_CODE
        vi d0[MOST][PARTS], d1[MOST][PARTS];
        dots(bits, 0, T, w, rows, begin, d0, d1);
#endif
#pragma GCC unroll 4
        for (int part = 0; part < PARTS; part++) {
            vf scale, shift = splat(0);
            scales_of(bits, scales, w, 0, part, &scale, &shift);
#ifndef CODE_BY_CODE
            vh q[8];
            codes(bits, w, part, q);
#endif
#pragma GCC unroll 16
            for (int t = 0; t < T; t++) { // a row after another: its sum and that of its group need few registers
#ifdef CODE_BY_CODE
                const vi first = d0[t][part];
#else
                vi first = (vi){0} + (offset ? begin[2 * t] : 0);
                row_dots(bits, 0, q, rows + t * GROUP, &first, 0);
#endif
                vf *to = &acc[t][part];
                *to = fma_(to_float(first), scale * splat(x->small.scale[at + t]), *to);
                if (scales == HALF_SHIFT || scales == FLOAT_SHIFT) *to = fma_(shift, splat(x->small.both[at + t]), *to);
            }
        }
    }
#pragma GCC unroll 16
    for (int t = 0; t < T; t++)
#pragma GCC unroll 4
        for (int part = 0; part < PARTS; part++) store(y + t * row_y + part * LANES, acc[t][part]);
}

// Units of 256 columns. Float32 adds products of dots and integer scales without rounding while they stay below 2^24: for
// eight groups of four bits, four of five bits, and one of six.
INLINE void tile_large(int bits, int scales, int T, const uint8_t *w, const rows *x, const int32_t *less, int64_t t0, int64_t E,
                       float *y, int64_t row_y) {
    const int64_t size = unit_bytes(bits, scales), units = E / 256;
    const int apart = scales == SIXTEEN, asks = T > 1 || alone;
    const int exact = bits == 4 ? 8 : bits == 5 ? 4 : 1;
    const eights *given = &x->large;
    _Alignas(64) float all[MOST][ROWS];    // of all units so far
    _Alignas(64) int32_t sums[MOST][ROWS]; // of this one
    memset(all, 0, T * ROWS * 4);
    for (int64_t u = 0; u < units; u++, w += size) {
        const uint8_t *p = w + 8 * code_bytes(bits);
#pragma GCC unroll 1
        for (int n = 0; n < 8; n += exact) {
            vf acc[MOST][PARTS];
#pragma GCC unroll 16
            for (int t = 0; t < T; t++)
#pragma GCC unroll 4
                for (int part = 0; part < PARTS; part++) acc[t][part] = splat(0);
#pragma GCC unroll 1
            for (int g = n; g < n + exact; g++) {
                const int64_t at = t0 * (E / GROUP) + (u * 8 + g) * T;
                const uint8_t *here = w + g * code_bytes(bits);
                const int8_t *rows = given->q + at * GROUP;
                const int32_t *begin = less + 2 * at;
                if (asks) ask_ahead(w + g * ((size / 8 + 63) / 64 * 64), (size / 8 + 63) / 64);
#ifdef CODE_BY_CODE
                vi d0[MOST][PARTS], d1[MOST][PARTS];
                dots(bits, apart, T, here, rows, begin, d0, d1);
#endif
#pragma GCC unroll 4
                for (int part = 0; part < PARTS; part++) {
                    vi scale, second;
                    integer_scales(scales, p, g, part, &scale, &second);
                    const vf by = to_float(scale), by2 = to_float(second);
#ifndef CODE_BY_CODE
                    vh q[8];
                    codes(bits, here, part, q);
#endif
#pragma GCC unroll 16
                    for (int t = 0; t < T; t++) {
#ifdef CODE_BY_CODE
                        const vi first = d0[t][part], then = d1[t][part];
#else
                        vi first = (vi){0} + begin[2 * t], then = (vi){0} + begin[2 * t + 1];
                        row_dots(bits, 1, q, rows + t * GROUP, &first, &then);
                        if (!apart) first += then;
#endif
                        vf *to = &acc[t][part];
                        *to = exact > 1 ? fma_(to_float(first), by, *to) : to_float(first) * by;
                        if (apart) *to = fma_(to_float(then), by2, *to);
                    }
                }
            }
            __asm__("" ::: "memory"); // otherwise `sums` takes the registers that `acc` needs
#pragma GCC unroll 16
            for (int t = 0; t < T; t++)
#pragma GCC unroll 4
                for (int part = 0; part < PARTS; part++) {
                    int32_t *to = &sums[t][part * LANES];
                    const vi more = to_integer(acc[t][part]);
                    store(to, (vf)(n ? lanes(to) + more : more));
                }
        }
        const int64_t at = t0 * units + u * T;
#pragma GCC unroll 4
        for (int part = 0; part < PARTS; part++) {
            const factors f = factors_of(scales, p, part);
            vi offsets[4];
            if (scales == SUPER) pairs_of(p + part * LANES, offset_of(bits, scales), offsets);
#pragma GCC unroll 4
            for (int t = 0; t < T; t++) {
                const int16_t *of_x = given->sums + 8 * (at + t);
                float *to = &all[t][part * LANES];
                vi sum = lanes(&sums[t][part * LANES]);
                if (scales == SUPER) sum = summed(sum, offsets, of_x);
                store(to, scaled(scales, &f, of_x, given->scale[at + t], sum, load(to)));
            }
        }
    }
    for (int t = 0; t < T; t++) memcpy(y + t * row_y, all[t], ROWS * 4);
}

INLINE void tile_integers(int bits, int scales, int T, const uint8_t *w, const rows *x, const int32_t *less, int64_t t0,
                          int64_t E, float *y, int64_t row_y) {
    if (scales >= SUPER)
        tile_large(bits, scales, T, w, x, less, t0, E, y, row_y);
    else
        tile_small(bits, scales, T, w, x, less, t0, E, y, row_y);
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
