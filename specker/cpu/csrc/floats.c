// Tiles of quantised weights with float32 activations, which are not rounded to eight bits.
#include "tiles.h"

// LANES float8 (e4m3) in the low bytes as float32, 2^8 too small: their bits are read as float16, whose bias differs.
INLINE vf fp8(vi code) {
    vf x;
    uint16_t h[LANES];
    for (int i = 0; i < LANES; i++) h[i] = (uint16_t)((code[i] & 0x80) << 8 | (code[i] & 0x7f) << 7);
    x = halves(h);
    return x;
}

// Column c of a group in register `q`, as numbers without their scale.
INLINE vf column(int bits, int zero, vh q, int c) {
    vi code = (vi)((vu)q >> (8 * c)) & 0xff;
    return bits == FP8 ? fp8(code) : to_float(code - zero);
}

INLINE void tile_floats(int bits, int scales, int T, const uint8_t *w, const float *x, int64_t row_x, int64_t E, float *y,
                        int64_t row_y) {
    const int64_t columns = unit_columns(scales), size = unit_bytes(bits, scales);
    const int zero = zero_of(bits, scales), shifted = scales == HALF_SHIFT || scales == FLOAT_SHIFT || scales == SUPER;
    for (int part = 0; part < PARTS; part++) {
        const uint8_t *at = w;
        vf acc[MOST];
        for (int t = 0; t < T; t++) acc[t] = splat(0);
        for (int64_t u = 0; u < E / columns; u++, at += size) {
#pragma GCC unroll 1
            for (int g = 0; g < columns / GROUP; g++) {
                const float *here = x + (u * (columns / GROUP) + g) * GROUP;
                vh q[8];
                vf scale, shift, sum[MOST];
                codes(bits, at + g * code_bytes(bits), part, q);
                scales_of(bits, scales, at, g, part, &scale, &shift);
                for (int t = 0; t < T; t++) sum[t] = splat(0);
#pragma GCC unroll 8
                for (int i = 0; i < 8; i++)
#pragma GCC unroll 1
                    for (int c = 0; c < 4; c++) {
                        vf by = scales == SIXTEEN && i >= 4 ? shift : scale;
                        vf n = column(bits, zero, q[i], c);
                        vf a = shifted ? fma_(n, by, shift) : n * by;
#pragma GCC unroll 8
                        for (int t = 0; t < T; t++) sum[t] = fma_(a, splat(here[t * row_x + 4 * i + c]), sum[t]);
                    }
                for (int t = 0; t < T; t++) acc[t] += sum[t];
            }
        }
        for (int t = 0; t < T; t++) store(y + t * row_y + part * LANES, acc[t]);
    }
}

#define FEW (MOST < 4 ? MOST : 4) // rows of x in a tile

#define TILE(name, BITS, SCALES) \
    static void tile_##name(int T, const uint8_t *w, const float *x, int64_t row_x, int64_t E, float *y, int64_t row_y) { \
        for (; T >= FEW; T -= FEW, x += FEW * row_x, y += FEW * row_y) \
            tile_floats(BITS, SCALES, FEW, w, x, row_x, E, y, row_y); \
        for (; T; T--, x += row_x, y += row_y) tile_floats(BITS, SCALES, 1, w, x, row_x, E, y, row_y); \
    }
EACH_KIND(TILE) TILE(FP8_HALF, FP8, HALF) TILE(FP8_FLOAT, FP8, FLOAT)

#define ENTRY(name, BITS, SCALES) [name] = tile_##name,
float_tile *const FLOAT_TILES[FORMATS] = {EACH_KIND(ENTRY) ENTRY(FP8_HALF, , ) ENTRY(FP8_FLOAT, , )};
