// Attention of many rows over K and V as floats: lanes are query rows, side by side, so that nothing is added across a
// register. A score is the 16 partial sums of `dot`, added like `total16`, and everything else is added column by column:
// a row has the same bits as in attention.c.
#include "many.h"
#include "vector.h"

#define WIDTH 6  // columns in a tile of scores

// The order in which `total16` needs the 16 partial sums when it adds each two results as soon as they are there.
static const int8_t ORDER[16] = {0, 8, 4, 12, 2, 10, 6, 14, 1, 9, 5, 13, 3, 11, 7, 15};

int64_t lanes_of(int64_t rows) { return (rows + LANES - 1) / LANES * LANES; }

void spread(const float *x, int64_t rows, int64_t D, float *to) {
    const int64_t all = lanes_of(rows);
    for (int64_t t0 = 0; t0 < all; t0 += 2 * LANES) {
        const int64_t height = all - t0 < 2 * LANES ? all - t0 : 2 * LANES;
        for (int m = 0; m < 16; m++)
            for (int64_t d = ORDER[m]; d < D; d += 16, to += height)
                for (int64_t t = 0; t < height; t++) to[t] = t0 + t < rows ? x[(t0 + t) * D + d] : 0;
    }
}

int raise_many(const float *y, int64_t S, int64_t lanes, float scale, float *top, float *shrink) {
    int more = 0;
    for (int64_t t = 0; t < lanes; t += LANES) {
        vf most = load(y + t);
        for (int64_t s = 1; s < S; s++) most = largest(load(y + s * lanes + t), most);
        const vf magic = splat(12582912.0f), old = load(top + t);
        most = largest(largest(most * scale, splat(LOWEST)) + magic - magic, old);
        store(top + t, most);
        store(shrink + t, power_below(old, most));
        more |= memcmp(&most, &old, sizeof old) != 0;
    }
    return more;
}

void shares_of_many(float *y, int64_t S, int64_t lanes, const float *top, float scale, float *sum) {
    for (int64_t t = 0; t < lanes; t += LANES) {
        const vf most = load(top + t);
        vf all = load(sum + t);
        for (int64_t s = 0; s < S; s++) {
            const vf p = power_below(load(y + s * lanes + t) * scale, most);
            store(y + s * lanes + t, p);
            all += p;
        }
        store(sum + t, all);
    }
}

// y[c, 0 .. R LANES - 1] = column c of K times R registers of rows.
INLINE void tile_scores(int C, int R, const float *k, int64_t row_k, const float *q, int64_t D, float *y, int64_t row_y) {
    vf sums[5][WIDTH][2]; // of 1, 2, 4, 8 and 16 partial sums
#pragma GCC unroll 1
    for (int m = 0; m < 16; m++) {
        const float *from = k + ORDER[m];
        vf acc[WIDTH][2];
        for (int c = 0; c < C; c++)
            for (int r = 0; r < R; r++) acc[c][r] = splat(0);
#pragma GCC unroll 1
        for (int64_t d = 0; d < D; d += 16, from += 16, q += R * LANES) {
            vf a[2];
#pragma GCC unroll 2
            for (int r = 0; r < R; r++) a[r] = load(q + r * LANES);
#pragma GCC unroll 6
            for (int c = 0; c < C; c++) {
                const vf b = splat(from[c * row_k]);
#pragma GCC unroll 2
                for (int r = 0; r < R; r++) acc[c][r] = fma_(b, a[r], acc[c][r]);
            }
        }
        int n = 0;
        for (; m >> n & 1; n++)
#pragma GCC unroll 6
            for (int c = 0; c < C; c++)
                for (int r = 0; r < R; r++) acc[c][r] = sums[n][c][r] + acc[c][r];
#pragma GCC unroll 6
        for (int c = 0; c < C; c++)
            for (int r = 0; r < R; r++) sums[n][c][r] = acc[c][r];
    }
#pragma GCC unroll 6
    for (int c = 0; c < C; c++)
        for (int r = 0; r < R; r++) store(y + c * row_y + r * LANES, sums[4][c][r]);
}

#define EACH_C(X, R) X(1, R) X(2, R) X(3, R) X(4, R) X(5, R) X(6, R)
#define CASE(C, R) case 2 * C + R - 1: tile_scores(C, R, k, row_k, q, D, y, row_y); break;
static void some_scores(int C, int R, const float *k, int64_t row_k, const float *q, int64_t D, float *y, int64_t row_y) {
    switch (2 * C + R - 1) { EACH_C(CASE, 1) EACH_C(CASE, 2) }
}
#undef CASE

void scores_of_many(const float *k, int64_t row_k, int64_t S, const float *q, int64_t lanes, int64_t D, float *y) {
    const int64_t tiles = (S + WIDTH - 1) / WIDTH;
    for (int64_t t = 0; t < lanes; t += 2 * LANES) {
        const int R = lanes - t > LANES ? 2 : 1;
        for (int64_t n = 0; n < tiles; n++) {
            const int64_t c = n * S / tiles;
            some_scores((int)((n + 1) * S / tiles - c), R, k + c * row_k, row_k, q + t * D, D, y + c * lanes + t, lanes);
        }
    }
}

// y[t, 0 .. 2 LANES - 1] += sum over s < S of p[s, t] v[s], one by one.
INLINE void tile_values(int T, const float *p, int64_t row_p, const float *v, int64_t row_v, float *y, int64_t row_y, int64_t S) {
    vf acc[WIDTH][2];
    for (int t = 0; t < T; t++)
        for (int i = 0; i < 2; i++) acc[t][i] = load(y + t * row_y + i * LANES);
#pragma GCC unroll 1
    for (int64_t s = 0; s < S; s++) {
        vf a[2];
#pragma GCC unroll 2
        for (int i = 0; i < 2; i++) a[i] = load(v + s * row_v + i * LANES);
#pragma GCC unroll 6
        for (int t = 0; t < T; t++) {
            const vf b = splat(p[s * row_p + t]);
#pragma GCC unroll 2
            for (int i = 0; i < 2; i++) acc[t][i] = fma_(a[i], b, acc[t][i]);
        }
    }
    for (int t = 0; t < T; t++)
        for (int i = 0; i < 2; i++) store(y + t * row_y + i * LANES, acc[t][i]);
}

#define CASE(T) case T: tile_values(T, p, row_p, v, row_v, y, row_y, S); break;
static void some_values(int T, const float *p, int64_t row_p, const float *v, int64_t row_v, float *y, int64_t row_y, int64_t S) {
    switch (T) { CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) }
}
#undef CASE

void values_of_many(const float *p, const float *v, int64_t row_v, int64_t S, int64_t rows, int64_t D, float *y) {
    const int64_t row_p = lanes_of(rows), tiles = (rows + WIDTH - 1) / WIDTH;
    for (int64_t d = 0; d < D; d += 2 * LANES)
        for (int64_t n = 0; n < tiles; n++) {
            const int64_t t = n * rows / tiles;
            some_values((int)((n + 1) * rows / tiles - t), p + t, row_p, v + d, row_v, y + t * D + d, D, S);
        }
}

