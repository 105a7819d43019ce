// Attention of rows over the K/V of their sequences.
#include "kept.h"
#include "many.h"
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

static int in_many(int64_t rows, int64_t format) {
    return rows >= MANY && (format == KEPT_FLOAT32 || format == KEPT_FLOAT16);
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

typedef struct { // rows first .. first + count - 1 of sequence b, for the query heads of KV head h in one layer
    const places *p;
    pool kv;
    int64_t b, h, first, count, heads, rows, D, wide, row_k; // rows: count heads; row_k: bytes of a column
    int64_t length, own, w;        // columns, rows and window of the sequence
    int64_t S, start;              // where the columns that any row sees end and begin, the latter a multiple of 16
    int64_t seen[BLOCK_ROWS];      // where those of each row begin
    float scale, cap, cap_scale;   // scale: makes scores exponents of 2; cap_scale: the soft cap's
    float *q, *sums, *ends, *tops; // [rows, D], [rows, D], [rows], [rows]: queries, sums with V, of shares, largest exponents
    float *room;
} block;

// Where the columns of row i that are not masked by the others' end.
static int64_t end_of(const block *a, int64_t i) {
    return a->p->words || a->p->full ? a->S : a->length - a->own + a->first + i + 1;
}

// The bits of row i's window; 0 without words.
static const int64_t *bits_of(const block *a, int64_t i) {
    return a->p->words ? a->p->words + (a->p->cu_rows[a->b] + a->first + i) * a->p->W : 0;
}

static const uint8_t *at(const block *a, const uint8_t *kept, int64_t c) {
    return kept + column(a->p, &a->kv, a->b, c) * a->row_k + a->h * a->kv.head;
}

static void weigh_few(const block *a) {
    const int64_t S = a->S, start = a->start, wide = a->wide, rows = a->rows, D = a->D, format = a->kv.format;
    float *scores = a->room, *scales = scores + rows * wide;
    const queries x = prepare(format, a->q, scales + wide, rows, D);
    for (int64_t c = start, width; c < S; c += width) {
        width = in_page(a->p, c, S);
        dot_keys(&a->kv, at(a, a->kv.k, c), a->row_k, &x, width, rows, D, scores + c, wide);
    }
    for (int64_t i = 0; i < rows; i++) {
        float *y = scores + i * wide;
        const int64_t end = end_of(a, i / a->heads), *bits = bits_of(a, i / a->heads);
        if (a->cap > 0) soften(y + start, a->cap_scale, a->cap, (S + 15) / 16 * 16 - start);
        for (int64_t j = 0; bits && j < a->w; j++)
            if (!(bits[j / 64] >> (j % 64) & 1)) y[a->length - a->w + j] = -INFINITY;
        for (int64_t j = start; j < a->seen[i / a->heads]; j++) y[j] = -INFINITY;
        for (int64_t j = end; j < (S + 15) / 16 * 16; j++) y[j] = -INFINITY;
        vf top = splat(-INFINITY);
        for (int64_t j = start; j < end; j += LANES) top = largest(load(y + j), top);
        const float most = highest(top) * a->scale;
        a->tops[i] = most > LOWEST ? nearest(most) : LOWEST;
        for (int64_t j = start; j < (S + 15) / 16 * 16; j += LANES) store(y + j, power_below(load(y + j) * a->scale, splat(a->tops[i])));
    }
    for (int64_t i = 0; i < rows; i += 8) { // adds in column order, like `mixture`; eight rows at once hide the latency
        float one[8] = {0};
        const int64_t n = rows - i < 8 ? rows - i : 8;
        for (int64_t j = start; j < S; j++)
            for (int64_t r = 0; r < 8; r++) one[r] += scores[(i + (r < n ? r : 0)) * wide + j];
        memcpy(a->ends + i, one, n * 4);
    }
    for (int64_t c = start, width; c < S; c += width) {
        const uint8_t *v = at(a, a->kv.v, c);
        width = in_page(a->p, c, S);
        if (format == KEPT_INT8) {
            for (int64_t j = 0; j < width; j++) scales[j] = scale_of(v + j * a->row_k, D);
            for (int64_t i = 0; i < rows; i++)
                for (int64_t j = 0; j < width; j++) scores[i * wide + c + j] *= scales[j];
        }
        for (int64_t i = 0; i < D; i += 32) mix(format, rows, scores + c, wide, v, a->row_k, i, a->sums + i, D, width);
    }
}

// Masks y [stop - c, lanes], the scores of columns c .. stop - 1.
static void mask_many(const block *a, int64_t c, int64_t stop, int64_t lanes, float *y) {
    const int64_t window = a->length - a->w;
    for (int64_t i = 0; i < a->rows; i++) {
        const int64_t end = end_of(a, i / a->heads), *bits = bits_of(a, i / a->heads);
        for (int64_t j = c > window ? c : window; bits && j < stop; j++)
            if (!(bits[(j - window) / 64] >> ((j - window) % 64) & 1)) y[(j - c) * lanes + i] = -INFINITY;
        for (int64_t j = c; j < a->seen[i / a->heads] && j < stop; j++) y[(j - c) * lanes + i] = -INFINITY;
        for (int64_t j = end > c ? end : c; j < stop; j++) y[(j - c) * lanes + i] = -INFINITY;
    }
}

// The heads of S columns of K or V as floats, `*row` apart: where they are, or widened in `room`.
static const float *widened(const block *a, const uint8_t *kept, int64_t S, float *room, int64_t *row) {
    *row = a->kv.format == KEPT_FLOAT32 ? a->row_k / 4 : a->D;
    if (a->kv.format == KEPT_FLOAT32) return (const float *)kept;
    for (int64_t s = 0; s < S; s++)
        for (int64_t i = 0; i < a->D; i += LANES) store(room + s * a->D + i, halves(kept + s * a->row_k + 2 * i));
    return room;
}

// A block of columns after another. When a row's largest score rises, what it has summed is rescaled by a power of two, so
// the bits do not depend on where blocks begin.
static void weigh_many(const block *a) {
    const int64_t lanes = lanes_of(a->rows), D = a->D;
    float *q = a->room, *y = q + lanes * D, *shrink = y + MANY_BLOCK * lanes, *wide = shrink + lanes;
    int64_t row;
    spread(a->q, a->rows, D, q);
    for (int64_t i = 0; i < lanes; i++) a->tops[i] = LOWEST, a->ends[i] = 0;
    for (int64_t c = a->start, width; c < a->S; c += width) {
        width = in_page(a->p, c, a->S);
        width = width < MANY_BLOCK ? width : MANY_BLOCK;
        const float *k = widened(a, at(a, a->kv.k, c), width, wide, &row);
        scores_of_many(k, row, width, q, lanes, D, y);
        if (a->cap > 0) soften(y, a->cap_scale, a->cap, width * lanes);
        mask_many(a, c, c + width, lanes, y);
        if (raise_many(y, width, lanes, a->scale, a->tops, shrink))
            for (int64_t i = 0; i < a->rows; i++) {
                if (shrink[i] == 1) continue;
                a->ends[i] *= shrink[i];
                for (int64_t e = 0; e < D; e++) a->sums[i * D + e] *= shrink[i];
            }
        shares_of_many(y, width, lanes, a->tops, a->scale, a->ends);
        const float *v = widened(a, at(a, a->kv.v, c), width, wide, &row);
        values_of_many(y, v, row, width, a->rows, D, a->sums);
    }
}

// A row's sums run over the columns in order, masked columns add 0, and shares are relative to a power of two. So a row of a tree has the same bits as the same
// token in a chain, although other nodes lie between its ancestors.
static void attend(const state *s, int64_t n, int64_t layer_, int64_t b, int64_t h, int64_t first, int64_t count) {
    const stack *d = s->f->model;
    const places *p = s->f->rows;
    const layer *l = d->layers + layer_;
    const int64_t D = d->D, heads = d->Hq / d->Hkv, rows = count * heads, row = row_of(l), t0 = p->cu_rows[b] + first;
    const float *qkv = qkv_of(s, n), *sinks = l->sinks;
    block a = {.p = p, .kv = pool_of(p, d, layer_), .b = b, .h = h, .first = first, .count = count, .heads = heads, .rows = rows};
    a.D = D, a.wide = s->wide, a.row_k = d->Hkv * a.kv.head;
    a.length = p->kv_len[b], a.own = p->cu_rows[b + 1] - p->cu_rows[b], a.w = p->window[b];
    a.S = a.start = p->words || p->full ? a.length : a.length - a.own + first + count;
    for (int64_t i = 0; i < count; i++) {
        a.seen[i] = first_seen(p, b, first + i, l->sliding_window);
        a.start = a.seen[i] < a.start ? a.seen[i] / 16 * 16 : a.start;
    }
    a.scale = (float)((d->cap > 0 ? 1 : d->scale) * 1.4426950408889634), a.cap = (float)d->cap, a.cap_scale = (float)d->scale;
    a.q = s->room, a.sums = a.q + rows * D, a.ends = a.sums + rows * D;
    a.tops = a.ends + lanes_of(rows), a.room = a.tops + lanes_of(rows);
    for (int64_t i = 0; i < rows; i++) {
        const float *from = qkv + (t0 + i / heads) * row + ((d->gated ? d->Hq : 0) + h * heads + i % heads) * D;
        memcpy(a.q + i * D, from, D * 4);
        memset(a.sums + i * D, 0, D * 4);
    }
    if (in_many(rows, a.kv.format))
        weigh_many(&a);
    else
        weigh_few(&a);
    for (int64_t i = 0; i < rows; i++) {
        const int64_t head = h * heads + i % heads;
        float *to = mixed_of(s, n) + ((t0 + i / heads) * d->Hq + head) * D, factor = 1.0f / a.ends[i];
        if (sinks) { // relative to the larger one of sink and top
            const float over = sinks[head] - a.tops[i] * 0.69314718f, shrink = expf(-fabsf(over));
            factor = over > 0 ? shrink / (a.ends[i] * shrink + 1.0f) : 1.0f / (a.ends[i] + shrink);
        }
        for (int64_t e = 0; e < D; e++) to[e] = a.sums[i * D + e] * factor;
        if (d->gated) weigh_sigmoid(to, qkv + (t0 + i / heads) * row + head * D, D);
    }
}

// Floats of work space for some rows of a sequence, whatever the format of K and V.
int64_t attention_floats(int64_t rows, int64_t D, int64_t wide) {
    const int64_t lanes = lanes_of(rows), few = rows * wide + wide + (queries_bytes(rows, D) + 3) / 4;
    const int64_t many = rows < MANY ? 0 : lanes * (D + MANY_BLOCK + 1) + MANY_BLOCK * D;
    return 2 * rows * D + 2 * lanes + (many > few ? many : few);
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
