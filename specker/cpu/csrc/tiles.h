// Interleaved formats: how a group of 32 columns of 16 rows lies in memory, and the tables of tiles over them.
//
// A lane is a row of W, so a sum needs no reduction. Integer dot products of a group are exact, and groups are added in
// order. So a row of y has the same bits in any tile, batch and thread, and on any processor with a fused multiply-add.
#pragma once
#include "products.h"
#include "vector.h"

#define GROUP 32

enum scales { HALF, HALF_SHIFT, FLOAT, FLOAT_SHIFT, POWER, SUPER, SIXTEEN };
enum { E2M1 = 7, FP8 = 9 }; // in place of a number of bits: four and eight bits that are not an integer

#if LANES == 16 && defined(__AVX512VNNI__)
#define MOST 16 // rows of x in a tile: their sums and a group of W fit the registers
#elif LANES == 16
#define MOST 8
#elif LANES == 8
#define MOST 6
#else
#define MOST 2
#endif

INLINE int64_t code_bytes(int bits) { return bits == FP8 ? 512 : bits == E2M1 ? 256 : 64 * bits; } // 16 rows, 32 columns

INLINE int64_t unit_columns(int scales) { return scales >= SUPER ? 256 : 32; }

INLINE int64_t unit_bytes(int bits, int scales) {
    switch (scales) {
    case HALF: return code_bytes(bits) + 32;
    case HALF_SHIFT: return code_bytes(bits) + 64;
    case FLOAT: return code_bytes(bits) + 64;
    case FLOAT_SHIFT: return code_bytes(bits) + 128;
    case POWER: return code_bytes(bits) + 16;
    case SUPER: return 8 * code_bytes(bits) + 320;
    default: return 8 * code_bytes(bits) + 320;
    }
}

static const struct {
    int8_t bits, scales;
} KINDS[FORMATS] = {
    [FOUR_HALF] = {4, HALF},
    [FOUR_HALF_SHIFT] = {4, HALF_SHIFT},
    [FOUR_FLOAT_SHIFT] = {4, FLOAT_SHIFT},
    [FOUR_SUPER] = {4, SUPER},
    [FIVE_HALF] = {5, HALF},
    [FIVE_HALF_SHIFT] = {5, HALF_SHIFT},
    [FIVE_SUPER] = {5, SUPER},
    [SIX_SIXTEEN] = {6, SIXTEEN},
    [EIGHT_HALF] = {8, HALF},
    [EIGHT_HALF_SHIFT] = {8, HALF_SHIFT},
    [EIGHT_FLOAT] = {8, FLOAT},
    [EIGHT_FLOAT_SHIFT] = {8, FLOAT_SHIFT},
    [FP8_HALF] = {FP8, HALF},
    [FP8_FLOAT] = {FP8, FLOAT},
    [E2M1_POWER] = {E2M1, POWER},
};

// Twice a number of e2m1, plus 12: an integer, which products take like a code of five bits.
static const uint8_t TWICE[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

// A code stands for the number code - zero: formats without shifts are symmetric.
INLINE int zero_of(int bits, int scales) {
    if (bits == 8) return 128;
    if (bits == E2M1) return 12;
    return scales == HALF_SHIFT || scales == FLOAT_SHIFT || scales == SUPER || bits == FP8 ? 0 : 1 << (bits - 1);
}

// What codes exceed their numbers by when they are multiplied: the sum of a group begins with -offset times the sum of x.
INLINE int offset_of(int bits, int scales) { return bits == 8 ? ZERO8 : zero_of(bits, scales); }

#define EACH_KIND(X) \
    X(FOUR_HALF, 4, HALF) \
    X(FOUR_HALF_SHIFT, 4, HALF_SHIFT) \
    X(FOUR_FLOAT_SHIFT, 4, FLOAT_SHIFT) \
    X(FOUR_SUPER, 4, SUPER) \
    X(FIVE_HALF, 5, HALF) \
    X(FIVE_HALF_SHIFT, 5, HALF_SHIFT) \
    X(FIVE_SUPER, 5, SUPER) \
    X(SIX_SIXTEEN, 6, SIXTEEN) \
    X(EIGHT_HALF, 8, HALF) \
    X(EIGHT_HALF_SHIFT, 8, HALF_SHIFT) \
    X(EIGHT_FLOAT, 8, FLOAT) \
    X(EIGHT_FLOAT_SHIFT, 8, FLOAT_SHIFT) \
    X(E2M1_POWER, E2M1, POWER)

// Codes of a group in LANES rows: byte c of lane r is that of row r, column 4 i + c.
INLINE vh code(int bits, const uint8_t *w, int part, int i) {
    w += part * SIZE;
    if (bits >= 8) return bytes(w + 64 * i);
    vh low = bytes(w + 64 * (i % 4));
    low = (i < 4 ? low : low >> 4) & 0x0f0f;
    if (bits == 5) {
        vh high = bytes(w + 256);
        return low | ((i < 4 ? high << (4 - i) : high >> (i - 4)) & 0x1010);
    }
    if (bits == 6) {
        vh high = bytes(w + 256 + 64 * (i / 4));
        int n = 2 * (i % 4);
        return low | ((n < 4 ? high << (4 - n) : high >> (n - 4)) & 0x3030);
    }
    return bits == E2M1 ? looked_up(TWICE, low) : low;
}

INLINE void codes(int bits, const uint8_t *w, int part, vh *q) {
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) q[i] = code(bits, w, part, i);
}

// Scales and shifts of a group in LANES rows. `unit`: where its unit begins; g: the group within it. SIXTEEN has two
// scales and no shift.
INLINE void scales_of(int bits, int scales, const uint8_t *unit, int g, int part, vf *scale, vf *shift) {
    const uint8_t *p = unit + code_bytes(bits) * (scales >= SUPER ? 8 : 1);
    int lane = part * LANES;
    if (scales == HALF || scales == HALF_SHIFT) {
        *scale = halves(p + 2 * lane);
        if (scales == HALF_SHIFT) *shift = halves(p + 32 + 2 * lane);
    } else if (scales == FLOAT || scales == FLOAT_SHIFT) {
        *scale = load(p + 4 * lane);
        if (scales == FLOAT_SHIFT) *shift = load(p + 64 + 4 * lane);
    } else if (scales == POWER) {
        vi power = integers(p + lane) << 23; // 2^-127 is subnormal
        *scale = (vf)(power | ((power == 0) & 0x400000)) * 0.5f;
    } else if (scales == SUPER) {
        *scale = unsigned_bytes(p + 16 * g + lane) * halves(p + 256 + 2 * lane);
        *shift = -(unsigned_bytes(p + 128 + 16 * g + lane) * halves(p + 288 + 2 * lane));
    } else {
        vf d = halves(p + 256 + 2 * lane);
        *scale = signed_bytes(p + 32 * g + lane) * d;
        *shift = signed_bytes(p + 32 * g + 16 + lane) * d;
    }
    if (bits == FP8) *scale *= 256.0f; // see `fp8`
}

// Asks for weights after those at `w`, of so many cache lines: into the second cache early enough for memory, into the first
// one for the next group.
INLINE void ask_ahead(const uint8_t *w, int64_t lines) {
    for (int64_t i = 0; i < 64 * lines; i += 64) prefetch_far(w + 16384 + i), prefetch(w + 2048 + i);
}

// x [T, E] is cut into tiles of about equal height: tile n has rows n T / tiles .. (n + 1) T / tiles - 1.
INLINE int64_t tiles_of(int64_t T) { return (T + MOST - 1) / MOST; }

// One tile: rows t0 .. t0 + T - 1 of x, T <= MOST, times 16 rows of W at `w`: y[t * row_y + lane]. less: `less` of
// these rows of W.
typedef void integer_tile(int T, const uint8_t *w, const rows *x, const int32_t *less, int64_t t0, int64_t E, float *y,
                          int64_t row_y);

typedef void float_tile(int T, const uint8_t *w, const float *x, int64_t row_x, int64_t E, float *y, int64_t row_y);
extern integer_tile *const INTEGER_TILES[FORMATS];
extern float_tile *const FLOAT_TILES[FORMATS];
