// K and V in fewer bits. A head is rounded when its column is written, to the nearest, ties to even. Products with K
// round the queries, too, as products with weights round activations: to bfloat16 for bfloat16, and to eight bits with
// one scale for eight bits, where the sum of integers is exact. V is widened in registers (attention.c).
//
// In eight bits K and the queries are rotated first, which changes no product: a Hadamard matrix spreads the few large
// numbers of a head over all of it, so that the scale is smaller (QuaRot, arXiv 2404.00456).
#include "kept.h"
#include "vector.h"

#define TALL (LANES == 8 ? 1 : 4) // columns in a tile of eight bits
#define WIDE_T (LANES >= 8 ? 6 : 1)

INLINE int64_t padded(int64_t D) { return (D + 63) / 64 * 64; }

// Rounds x [D] to eight bits with the scale largest |x| / 127, and returns the scale.
static float round_head(const float *x, int8_t *q, int64_t D, float *sum) {
    const vf magic = splat(12582912.0f); // 1.5 2^23: adding it rounds to an integer, in the last bits
    vf most = splat(0);
    float all = 0;
    for (int64_t i = 0; i < D; i += LANES) {
        vf a = load(x + i);
        most = largest(largest(a, -a), most);
    }
    const float top = highest(most), by = top > 1e-30f ? 127.0f / top : 0;
    for (int64_t i = 0; i < D; i += LANES) {
        vi n = (vi)(load(x + i) * by + magic) - 0x4b400000;
        narrow_bytes(q + i, n);
        all += total(to_float(n)); // integers: exact in any order
    }
    *sum = all;
    return top / 127.0f;
}

// Blocks of x [D], as long as the largest power of two that divides D, times a Hadamard matrix of entries 1 and -1.
// Returns the length of a block, by which two such products enlarge x.
static int64_t rotate(float *x, int64_t D) {
    const int64_t block = D & -D;
    for (int64_t h = 1; h < block; h *= 2)
        for (int64_t i = 0; i < D; i += 2 * h)
            for (int64_t j = i; j < i + h; j++) {
                const float a = x[j], b = x[j + h];
                x[j] = a + b, x[j + h] = a - b;
            }
    return block;
}

// Larger numbers become the largest one.
static uint16_t half(float x) {
    const float most = 65504.0f;
    union { float f; uint32_t u; } a = {.f = x > most ? most : x < -most ? -most : x};
    const uint32_t sign = a.u >> 16 & 0x8000;
    a.u &= 0x7fffffff;
    if (a.u < 0x38800000) { // subnormal: multiples of 2^-24, the last bit of 0.5
        a.f += 0.5f;
        return (uint16_t)(sign | (a.u - 0x3f000000));
    }
    return (uint16_t)(sign | (a.u - (112u << 23) + 0xfff + (a.u >> 13 & 1)) >> 13);
}

void keep_head(int64_t format, int key, float *x, uint8_t *to, int64_t D) {
    float sum, scale;
    uint16_t two;
    switch (format) {
    case KEPT_FLOAT32: memcpy(to, x, D * 4); return;
    case KEPT_BFLOAT16:
        for (int64_t d = 0; d < D; d++) two = narrow(x[d]), memcpy(to + 2 * d, &two, 2);
        return;
    case KEPT_FLOAT16:
        for (int64_t d = 0; d < D; d++) two = half(x[d]), memcpy(to + 2 * d, &two, 2);
        return;
    default:
        if (key) rotate(x, D);
        scale = round_head(x, (int8_t *)to, D, &sum);
        memcpy(to + D, &scale, 4);
    }
}

int64_t queries_bytes(int64_t T, int64_t D) { return T * (2 * padded(D) + 8) + 256; }

queries prepare(int64_t format, float *x, void *memory, int64_t T, int64_t D) {
    char *at = (char *)(((uintptr_t)memory + 63) / 64 * 64);
    queries r = {.x = x, .h = (uint16_t *)at, .q = (int8_t *)at};
    r.scale = (float *)(at + 2 * T * padded(D)), r.sum = r.scale + T;
    for (int64_t t = 0; t < T; t++, x += D) {
        if (format == KEPT_BFLOAT16)
            for (int64_t d = 0; d < D; d++) {
                const uint32_t u = (uint32_t)(r.h[t * D + d] = narrow(x[d])) << 16;
                memcpy(x + d, &u, 4);
            }
        if (format == KEPT_INT8) {
            const int64_t larger = rotate(x, D);
            memset(r.q + t * padded(D), 0, padded(D));
            r.scale[t] = round_head(x, r.q + t * padded(D), D, r.sum + t) / (float)larger;
        }
    }
    return r;
}

INLINE void tile_int8(int R, int T, const uint8_t *k, int64_t row_k, const queries *x, int64_t t0, int64_t D, float *y,
                      int64_t row_y, int64_t ahead) {
    const int64_t wide_D = padded(D);
    const int8_t *q = x->q + t0 * wide_D;
    vi acc[6][4][PARTS];
    for (int t = 0; t < T; t++)
        for (int r = 0; r < R; r++)
            for (int p = 0; p < PARTS; p++) acc[t][r][p] = (vi){0};
    for (int64_t d = 0; d < D; d += 64) {
        const uint8_t *from = k + d;
        int64_t row = row_k;
        uint8_t last[4 * 64];
        if (D - d < 64) { // half a block: the bytes behind it are not K's
            memset(last, 0, sizeof last);
            for (int r = 0; r < R; r++) memcpy(last + 64 * r, from + r * row_k, D - d);
            from = last, row = 64;
        }
#pragma GCC unroll 4
        for (int p = 0; p < PARTS; p++) {
            vh a[4];
#pragma GCC unroll 4
            for (int r = 0; r < R; r++) {
                a[r] = bytes(from + r * row + p * SIZE) ^ 0x8080;
                prefetch_far(k + r * row_k + d + p * SIZE + ahead);
            }
#pragma GCC unroll 6
            for (int t = 0; t < T; t++) {
                vi b = (vi)bytes(q + t * wide_D + d + p * SIZE);
#pragma GCC unroll 4
                for (int r = 0; r < R; r++) acc[t][r][p] = dot8(acc[t][r][p], a[r], b);
            }
        }
    }
    float scale[4];
    for (int r = 0; r < R; r++) scale[r] = scale_of(k + r * row_k, D);
#pragma GCC unroll 6
    for (int t = 0; t < T; t++) {
        const float zero = ZERO8 * x->sum[t0 + t], by = x->scale[t0 + t];
        vf four[4][PARTS];
        float sums[4];
        for (int r = 0; r < 4; r++)
            for (int p = 0; p < PARTS; p++) four[r][p] = r < R ? to_float(acc[t][r][p]) : splat(0);
        if (R == 4)
            totals16(four, sums);
        else
            for (int r = 0; r < R; r++) sums[r] = total16(four[r]);
        for (int r = 0; r < R; r++) y[t * row_y + r] = (sums[r] - zero) * (scale[r] * by);
    }
}

#if LANES >= 8
#define EACH_WIDE(X, R) X(R, 1) X(R, 2) X(R, 3) X(R, 4) X(R, 5) X(R, 6)
#else
#define EACH_WIDE(X, R) X(R, 1)
#endif

static void dot_int8(const uint8_t *k, int64_t row_k, const queries *x, int64_t R, int64_t T, int64_t D, float *y,
                     int64_t row_y, int64_t ahead) {
    const int64_t tiles = (T + WIDE_T - 1) / WIDE_T;
    for (int64_t r = 0; r < R;) {
        const int64_t count = R - r >= TALL ? TALL : 1;
        for (int64_t n = 0; n < tiles; n++) {
            const int64_t t0 = n * T / tiles, t1 = (n + 1) * T / tiles;
            float *to = y + t0 * row_y + r;
#define CASE(R, T) case R * 8 + T: tile_int8(R, T, k + r * row_k, row_k, x, t0, D, to, row_y, ahead); break;
#if LANES == 8
            switch (count * 8 + t1 - t0) { EACH_WIDE(CASE, 1) }
#else
            switch (count * 8 + t1 - t0) { EACH_WIDE(CASE, 1) EACH_WIDE(CASE, 4) }
#endif
#undef CASE
        }
        r += count;
    }
}

void dot_keys(const pool *kv, const uint8_t *k, int64_t row_k, const queries *x, int64_t R, int64_t T, int64_t D, float *y,
              int64_t row_y, int64_t ahead) {
    switch (kv->format) {
    case KEPT_FLOAT32: plain_rows(k, OF_FLOAT32, row_k / 4, x->x, D, R, T, D, y, row_y, ahead); return;
    case KEPT_FLOAT16: plain_rows(k, OF_FLOAT16, row_k / 2, x->x, D, R, T, D, y, row_y, ahead); return;
    case KEPT_INT8: dot_int8(k, row_k, x, R, T, D, y, row_y, ahead); return;
    default:
#if defined(__AVX512BF16__)
        plain_pairs((const uint16_t *)k, row_k / 2, x->h, R, T, D, y, row_y, ahead);
#else
        plain_rows(k, OF_BFLOAT16, row_k / 2, x->x, D, R, T, D, y, row_y, ahead);
#endif
    }
}
