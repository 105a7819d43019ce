// Products of formats with units of 256 columns where the processor has AMX. x has one scale for a unit there, because a
// tile of AMX adds up all of its columns: integers, whose sum is scaled once.
#pragma once
#include "tiles.h"
#define FEWEST 9   // rows of x from which AMX is faster
#define FAR_NUMBER 10.0f // numbers of x beyond so many times a unit's root mean square are outliers

#if defined(__AMX_INT8__)
int amx_allowed(void); // whether the system lets this process use it
// y = 16 rows of W at `w` times all rows of x, fewer than FEWEST, with the bits of `squares`.
void few_rows(int64_t format, const uint8_t *w, const rows *x, int part, int64_t E, float *y, int64_t row_y);
// y = rows 0 .. count - 1 of W at `w` times all rows of x.
void squares(int64_t format, const uint8_t *w, int64_t count, const rows *x, int64_t E, float *y, int64_t row_y);
#else
INLINE int amx_allowed(void) { return 0; }
#endif

INLINE int by_units(int64_t format) { return KINDS[format].scales >= SUPER && amx_allowed(); }

#if defined(__AMX_INT8__)
// The integers by which the dot products of group g are multiplied, with SIXTEEN those of columns 0 to 15, and of 16 to
// 31. `p`: where the unit's scales begin.
INLINE void integer_scales(int scales, const uint8_t *p, int64_t g, vi *scale, vi *second) {
    if (scales == SUPER) {
        *scale = *second = integers(p + 16 * g);
    } else {
        *scale = signed_integers(p + 32 * g);
        *second = signed_integers(p + 32 * g + 16);
    }
}

// `bytes` [8, ROWS] times a factor, as pairs of 16 bits: pairs[i] has those of groups 2 i and 2 i + 1.
INLINE void pairs_of(const uint8_t *bytes, int factor, vi pairs[4]) {
    for (int i = 0; i < 4; i++) pairs[i] = integers(bytes + 32 * i) * factor | integers(bytes + 32 * i + 16) * factor << 16;
}

// The last factors of a unit's sums: of products, and of shifts with their integers.
typedef struct {
    vf d, m;
    vi shifts[4];
} factors;

INLINE factors factors_of(int scales, const uint8_t *p) {
    factors f = {.d = halves(p + 256)};
    if (scales == SUPER) f.m = -halves(p + 288), pairs_of(p + 128, 1, f.shifts);
    return f;
}

// acc + u s in each lane: two integers of 16 bits in a lane of u, and the same two at s for all lanes.
INLINE vi dot2_all(vi acc, vi u, const int16_t *s) {
    __asm__("vpdpwssd %2%{1to16%}, %1, %0" : "+v"(acc) : "v"(u), "m"(*(const word_any *)s));
    return acc;
}

// acc + the sum of x in the groups of a unit, each times an integer.
INLINE vi summed(vi acc, const vi pairs[4], const int16_t *sums) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) acc = dot2_all(acc, pairs[i], sums + 2 * i);
    return acc;
}

// y + a unit's sum of products, and its shifts. by: the scale of x; sums: of x in the unit's groups.
INLINE vf scaled(int scales, const factors *f, const int16_t *sums, float by, vi sum, vf y) {
    vf unit = to_float(sum) * f->d;
    if (scales == SUPER) unit = fma_(to_float(summed((vi){0}, f->shifts, sums)), f->m, unit);
    return fma_(unit, splat(by), y);
}

// y + the products of row t's outliers in unit u of x, with a unit of W at `w`.
INLINE vf with_outliers(int bits, int scales, const uint8_t *w, const factors *f, const outliers *far, int64_t t, int64_t u,
                        int64_t E, vf y) {
    const uint8_t *p = w + 8 * code_bytes(bits);
    const int64_t unit = t * (E / 256) + u;
    vi sum = {0}, shift = {0};
    for (int groups = far->groups[unit]; groups; groups &= groups - 1) {
        const int g = __builtin_ctz((unsigned)groups), zero = zero_of(bits, scales);
        const int8_t *q = far->q + unit * 256 + g * GROUP;
        const int16_t *sums = far->sums + unit * 16 + 2 * g;
        vi dots[2] = {(vi){0} - zero * sums[0], (vi){0} - zero * sums[1]}, scale, second;
        integer_scales(scales, p, g, &scale, &second);
        for (int i = 0; i < 8; i++) dots[i / 4] = dot4_all(dots[i / 4], code(bits, w + g * code_bytes(bits), 0, i), q + 4 * i);
        sum += dots[0] * scale + dots[1] * second;
        if (scales == SUPER) shift += integers(p + 128 + 16 * g) * (sums[0] + sums[1]);
    }
    vf product = to_float(sum) * f->d;
    if (scales == SUPER) product = fma_(to_float(shift), f->m, product);
    return fma_(product, splat(far->scale[unit]), y);
}
#endif
