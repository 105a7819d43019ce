// Tiles over weights in float32 and bfloat16, and attention's scores. Lanes run along the columns: 16 partial sums, whose
// halves are added until one sum is left.
#include "products.h"
#include "vector.h"

#define TALL 4                    // rows of W in a tile; with 16 registers, one
#define WIDE_T (LANES >= 8 ? 6 : 1) // rows of x in a tile

INLINE int64_t size_of(enum type type) { return type == OF_FLOAT32 ? 4 : 2; }
INLINE vf read(enum type type, const void *p) { return type == OF_FLOAT32 ? load(p) : type == OF_BFLOAT16 ? wide(p) : halves(p); }

// How far to prefetch: four tiles. A single row is a stream that the processor finds by itself.
INLINE int64_t following(int64_t count, int64_t row) { return count == 1 ? 0 : 4 * count * row; }

INLINE void tile_plain(int R, int T, enum type type, const uint8_t *w, int64_t row_w, const float *x, int64_t row_x, int64_t E,
                       float *y, int64_t row_y, int64_t ahead) {
    vf acc[6][TALL][PARTS];
    for (int t = 0; t < T; t++)
        for (int r = 0; r < R; r++)
            for (int p = 0; p < PARTS; p++) acc[t][r][p] = splat(0);
    for (int64_t e = 0; e < E; e += 16) {
#pragma GCC unroll 4
        for (int p = 0; p < PARTS; p++) {
            vf a[TALL];
            int64_t at = e + p * LANES;
#pragma GCC unroll 4
            for (int r = 0; r < R; r++) {
                const uint8_t *line = w + (r * row_w + at) * size_of(type);
                a[r] = read(type, line);
                if (R > 1 || ahead) prefetch_far(line + ahead);
            }
#pragma GCC unroll 6
            for (int t = 0; t < T; t++) {
                vf b = load(x + t * row_x + at);
#pragma GCC unroll 4
                for (int r = 0; r < R; r++) acc[t][r][p] = fma_(a[r], b, acc[t][r][p]);
            }
        }
    }
    for (int t = 0; t < T; t++)
        if (R == TALL) {
            totals16(acc[t], y + t * row_y);
        } else if (t + 4 <= T) {
            vf four[4][PARTS];
            float sums[4];
            for (int i = 0; i < 4; i++)
                for (int p = 0; p < PARTS; p++) four[i][p] = acc[t + i][0][p];
            totals16(four, sums);
            for (int i = 0; i < 4; i++) y[(t + i) * row_y] = sums[i];
            t += 3;
        } else {
            y[t * row_y] = total16(acc[t][0]);
        }
}

#if LANES >= 8
#define EACH_WIDE(X, R) X(R, 1) X(R, 2) X(R, 3) X(R, 4) X(R, 5) X(R, 6)
#else
#define EACH_WIDE(X, R) X(R, 1)
#endif

static void plain_tile(int R, int T, enum type type, const uint8_t *w, int64_t row_w, const float *x, int64_t row_x, int64_t E,
                       float *y, int64_t row_y, int64_t ahead) {
#define CASE(R, T)                                                                                                       \
    case R * 8 + T:                                                                                                      \
        if (type == OF_BFLOAT16) tile_plain(R, T, OF_BFLOAT16, w, row_w, x, row_x, E, y, row_y, ahead);                  \
        else if (type == OF_FLOAT16) tile_plain(R, T, OF_FLOAT16, w, row_w, x, row_x, E, y, row_y, ahead);               \
        else tile_plain(R, T, OF_FLOAT32, w, row_w, x, row_x, E, y, row_y, ahead);                                       \
        return;
#if LANES == 8
    switch (R * 8 + T) { EACH_WIDE(CASE, 1) }
#else
    switch (R * 8 + T) { EACH_WIDE(CASE, 1) EACH_WIDE(CASE, 4) }
#endif
#undef CASE
}

// y[t, r] of R rows of W [.., row_w] and T rows of x, as float32; also attention's scores.
void plain_rows(const uint8_t *w, enum type type, int64_t row_w, const float *x, int64_t row_x, int64_t R, int64_t T,
                int64_t E, float *y, int64_t row_y, int64_t ahead) {
    const int64_t tiles = (T + WIDE_T - 1) / WIDE_T, size = size_of(type);
    for (int64_t r = 0; r < R;) { // with few rows of x memory is the limit, and one stream is fastest
        const int64_t count = LANES != 8 && R - r >= TALL && T >= (type == OF_FLOAT32 ? 3 : 6) ? TALL : 1;
        for (int64_t n = 0; n < tiles; n++) {
            const int64_t t0 = n * T / tiles, t1 = (n + 1) * T / tiles;
            plain_tile((int)count, (int)(t1 - t0), type, w + r * row_w * size, row_w, x + t0 * row_x, row_x, E,
                       y + t0 * row_y + r, row_y, ahead ? ahead : following(count, row_w * size));
        }
        r += count;
    }
}

#if defined(__AVX512BF16__)
INLINE void tile_pairs(int R, int T, const uint16_t *w, int64_t row_w, const uint16_t *x, int64_t row_x, int64_t E, float *y,
                       int64_t row_y, int64_t ahead) {
    __m512 acc[6][TALL];
    for (int t = 0; t < T; t++)
        for (int r = 0; r < R; r++) acc[t][r] = _mm512_setzero_ps();
    for (int64_t e = 0; e < E; e += 32) {
        __m512bh a[TALL];
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
            a[r] = (__m512bh)_mm512_loadu_si512(w + r * row_w + e);
            if (R > 1 || ahead) prefetch_far((const uint8_t *)(w + r * row_w + e) + ahead);
        }
#pragma GCC unroll 6
        for (int t = 0; t < T; t++) {
            __m512bh b = (__m512bh)_mm512_loadu_si512(x + t * row_x + e);
#pragma GCC unroll 4
            for (int r = 0; r < R; r++) acc[t][r] = _mm512_dpbf16_ps(acc[t][r], a[r], b);
        }
    }
    for (int t = 0; t < T; t++)
        if (R == TALL)
            totals16((void *)acc[t], y + t * row_y);
        else
            for (int r = 0; r < R; r++) y[t * row_y + r] = total((vf)acc[t][r]);
}

void plain_pairs(const uint16_t *w, int64_t row_w, const uint16_t *x, int64_t R, int64_t T, int64_t E, float *y,
                 int64_t row_y, int64_t ahead) {
    const int64_t tiles = (T + 5) / 6;
    for (int64_t r = 0; r < R;) {
        const int64_t count = R - r >= TALL && T >= 2 ? TALL : 1;
        for (int64_t n = 0; n < tiles; n++) {
            const int64_t t0 = n * T / tiles, t1 = (n + 1) * T / tiles;
            const uint16_t *from = w + r * row_w, *rows = x + t0 * E;
            const int64_t then = ahead ? ahead : following(count, row_w * 2);
            float *to = y + t0 * row_y + r;
#define CASE(R, T) case R * 8 + T: tile_pairs(R, T, from, row_w, rows, E, E, to, row_y, then); break;
            switch (count * 8 + t1 - t0) { EACH_WIDE(CASE, 1) EACH_WIDE(CASE, 4) }
#undef CASE
        }
        r += count;
    }
}
#endif
