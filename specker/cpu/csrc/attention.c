// Attention of a few rows over the K/V of their sequences.
#include "kept.h"
#include "vector.h"
#include <math.h>

#define MIX_T (LANES == 16 ? 6 : 2)

// LANES numbers of V from number i on; those of eight bits lack their scale.
INLINE vf numbers(int64_t format, const uint8_t *v, int64_t i) {
    switch (format) {
    case KEPT_FLOAT32: return load(v + 4 * i);
    case KEPT_BFLOAT16: return wide(v + 2 * i);
    case KEPT_FLOAT16: return halves(v + 2 * i);
    default: return signed_bytes(v + i);
    }
}

// y[t, 0..31] += sum over s < S of p[t, s] v[s, i..i + 31], added one by one, so that terms of 0 change nothing.
INLINE void mixture(int64_t format, int T, const float *p, int64_t row_p, const uint8_t *v, int64_t row_v, int64_t from,
                    float *y, int64_t row_y, int64_t S) {
    vf acc[6][2 * PARTS];
    for (int t = 0; t < T; t++)
        for (int i = 0; i < 2 * PARTS; i++) acc[t][i] = load(y + t * row_y + i * LANES);
    for (int64_t s = 0; s < S; s++) {
#pragma GCC unroll 8
        for (int i = 0; i < 2 * PARTS; i++) {
            vf a = numbers(format, v + s * row_v, from + i * LANES);
#pragma GCC unroll 6
            for (int t = 0; t < T; t++) acc[t][i] = fma_(a, splat(p[t * row_p + s]), acc[t][i]);
        }
    }
    for (int t = 0; t < T; t++)
        for (int i = 0; i < 2 * PARTS; i++) store(y + t * row_y + i * LANES, acc[t][i]);
}

#define CASE(T) \
    case T: mixture(format, T, p, row_p, v, row_v, from, y, row_y, S); break;
#if LANES == 16
#define EACH_MIX CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#else
#define EACH_MIX CASE(1) CASE(2)
#endif
INLINE void mix_kept(int64_t format, int64_t T, const float *p, int64_t row_p, const uint8_t *v, int64_t row_v, int64_t from,
                     float *y, int64_t row_y, int64_t S) {
    const int64_t tiles = (T + MIX_T - 1) / MIX_T;
    for (int64_t n = 0, count; n < tiles; n++, p += count * row_p, y += count * row_y) {
        count = (n + 1) * T / tiles - n * T / tiles;
        switch (count) { EACH_MIX }
    }
}
#undef CASE

static void mix(int64_t format, int64_t T, const float *p, int64_t row_p, const uint8_t *v, int64_t row_v, int64_t from,
                float *y, int64_t row_y, int64_t S) {
    switch (format) {
    case KEPT_FLOAT32: mix_kept(KEPT_FLOAT32, T, p, row_p, v, row_v, from, y, row_y, S); return;
    case KEPT_BFLOAT16: mix_kept(KEPT_BFLOAT16, T, p, row_p, v, row_v, from, y, row_y, S); return;
    case KEPT_FLOAT16: mix_kept(KEPT_FLOAT16, T, p, row_p, v, row_v, from, y, row_y, S); return;
    default: mix_kept(KEPT_INT8, T, p, row_p, v, row_v, from, y, row_y, S);
    }
}

// Where column c of sequence b stands in a layer's K or V, in rows.
static int64_t column(const places *p, const pool *kv, int64_t b, int64_t c) {
    return (int64_t)kv->table[b * p->pages + c / p->page] * p->page + c % p->page;
}

// The columns from c on that lie in its page and before S.
static int64_t in_page(const places *p, int64_t c, int64_t S) {
    const int64_t left = p->page - c % p->page;
    return left < S - c ? left : S - c;
}

// The first of the last `sliding_window` columns that row i of sequence b sees (kernels/attention.py); 0 without a window.
static int64_t first_seen(const places *p, int64_t b, int64_t i, int64_t sliding_window) {
    const int64_t length = p->kv_len[b], own = p->cu_rows[b + 1] - p->cu_rows[b], w = p->window[b];
    int64_t end = p->full ? length : length - own + i + 1;
    if (!sliding_window) return 0;
    if (p->words) {
        const int64_t *bits = p->words + (p->cu_rows[b] + i) * p->W;
        for (int64_t j = w - 1; j >= 0; j--)
            if (bits[j / 64] >> (j % 64) & 1 && --sliding_window == 0) return length - w + j;
        end = length - w;
    }
    return end > sliding_window ? end - sliding_window : 0;
}

// Attention of rows first .. first + count - 1 of sequence b, for the query heads of KV head h in layer n of a group.
//
// A row's sums run over the columns in order, and masked columns add 0. So a row of a tree has the same bits as the same
// token in a chain, although other nodes lie between its ancestors.
static void attend(const state *s, int64_t n, int64_t at, int64_t b, int64_t h, int64_t first, int64_t count) {
    const stack *d = s->f->model;
    const places *p = s->f->rows;
    const int64_t D = d->D, heads = d->Hq / d->Hkv, rows = count * heads, wide = s->wide;
    const int64_t row = row_of(d->layers + at);
    const float *qkv = qkv_of(s, n);
    float *mixed = mixed_of(s, n);
    const int64_t length = p->kv_len[b], own = p->cu_rows[b + 1] - p->cu_rows[b], w = p->window[b];
    const int64_t t0 = p->cu_rows[b] + first;
    const pool kv = pool_of(p, d, at);
    const int64_t row_k = d->Hkv * kv.head; // bytes of a column
    const int64_t S = p->words || p->full ? length : length - own + first + count; // columns that any row sees end here
    int64_t start = S, seen[BLOCK_ROWS]; // where those of any and of each row begin; `start` is a multiple of 16
    for (int64_t i = 0; i < count; i++) {
        seen[i] = first_seen(p, b, first + i, d->layers[at].sliding_window);
        start = seen[i] < start ? seen[i] / 16 * 16 : start;
    }
    float *q = s->room, *sums = q + rows * D, *scores = sums + rows * D, *ends = scores + rows * wide;
    float *tops = ends + rows, *scales = tops + rows;
    for (int64_t i = 0; i < rows; i++) {
        const float *from = qkv + (t0 + i / heads) * row + ((d->gated ? d->Hq : 0) + h * heads + i % heads) * D;
        memcpy(q + i * D, from, D * 4);
        memset(sums + i * D, 0, D * 4);
    }
    const queries x = prepare(kv.format, q, scales + wide, rows, D);
    for (int64_t c = start, width; c < S; c += width) {
        const uint8_t *k = kv.k + column(p, &kv, b, c) * row_k + h * kv.head;
        width = in_page(p, c, S);
        dot_keys(&kv, k, row_k, &x, width, rows, D, scores + c, wide);
    }
    const float scale = d->cap ? 1 : (float)d->scale, *sinks = d->layers[at].sinks;
    for (int64_t i = 0; i < rows; i++) {
        float *a = scores + i * wide;
        int64_t end = S; // columns from here on are masked
        if (d->cap) soften(a + start, (float)d->scale, (float)d->cap, (S + 15) / 16 * 16 - start);
        if (p->words) {
            const int64_t *bits = p->words + (t0 + i / heads) * p->W;
            for (int64_t j = 0; j < w; j++)
                if (!(bits[j / 64] >> (j % 64) & 1)) a[length - w + j] = -INFINITY;
        } else if (!p->full) {
            end = length - own + first + i / heads + 1;
        }
        for (int64_t j = start; j < seen[i / heads]; j++) a[j] = -INFINITY;
        for (int64_t j = end; j < (S + 15) / 16 * 16; j++) a[j] = -INFINITY;
        vf top = splat(-INFINITY);
        for (int64_t j = start; j < end; j += LANES) top = largest(load(a + j), top);
        const float most = highest(top);
        tops[i] = most * scale;
        for (int64_t j = start; j < (S + 15) / 16 * 16; j += LANES) store(a + j, power((load(a + j) - most) * scale));
    }
    for (int64_t i = 0; i < rows; i += 8) { // adds in column order, like `mixture`; eight rows at once hide the latency
        float one[8] = {0};
        const int64_t n = rows - i < 8 ? rows - i : 8;
        for (int64_t j = start; j < S; j++)
            for (int64_t r = 0; r < 8; r++) one[r] += scores[(i + (r < n ? r : 0)) * wide + j];
        memcpy(ends + i, one, n * 4);
    }
    for (int64_t c = start, width; c < S; c += width) {
        const uint8_t *v = kv.v + column(p, &kv, b, c) * row_k + h * kv.head;
        width = in_page(p, c, S);
        if (kv.format == KEPT_INT8) {
            for (int64_t j = 0; j < width; j++) scales[j] = scale_of(v + j * row_k, D);
            for (int64_t i = 0; i < rows; i++)
                for (int64_t j = 0; j < width; j++) scores[i * wide + c + j] *= scales[j];
        }
        for (int64_t i = 0; i < D; i += 32) mix(kv.format, rows, scores + c, wide, v, row_k, i, sums + i, D, width);
    }
    for (int64_t i = 0; i < rows; i++) {
        const int64_t head = h * heads + i % heads;
        float *to = mixed + ((t0 + i / heads) * d->Hq + head) * D, factor = 1.0f / ends[i];
        if (sinks) { // relative to the larger one of sink and top
            const float over = sinks[head] - tops[i], shrink = expf(-fabsf(over));
            factor = over > 0 ? shrink / (ends[i] * shrink + 1.0f) : 1.0f / (ends[i] + shrink);
        }
        for (int64_t e = 0; e < D; e++) to[e] = sums[i * D + e] * factor;
        if (d->gated) weigh_sigmoid(to, qkv + (t0 + i / heads) * row + head * D, D);
    }
}

void attend_all(const state *s, int64_t first, int64_t N) {
    const places *p = s->f->rows;
    const int64_t Hkv = s->f->model->Hkv;
    int64_t before = 0, i = next(s->m);
    for (int64_t b = 0; b < p->B; b++) { // later rows see more columns, so they are processed first
        const int64_t own = p->cu_rows[b + 1] - p->cu_rows[b], blocks = (own + BLOCK_ROWS - 1) / BLOCK_ROWS, items = N * Hkv * blocks;
        for (; i < before + items; i = next(s->m)) {
            const int64_t block = blocks - 1 - (i - before) / (N * Hkv), n = (i - before) / Hkv % N;
            const int64_t count = own - block * BLOCK_ROWS;
            if (s->f->model->layers[first + n].recurrent) continue;
            attend(s, n, first + n, b, (i - before) % Hkv, block * BLOCK_ROWS, count < BLOCK_ROWS ? count : BLOCK_ROWS);
        }
        before += items;
    }
}
