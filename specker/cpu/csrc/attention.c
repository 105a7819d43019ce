// Attention of rows over the K/V of their sequences.
#include "kept.h"
#include "many.h"
#include "vector.h"
#include <math.h>

#define MIX_T (LANES == 16 ? 6 : 2)
#define FEW_BLOCK 64  // columns whose scores and shares are computed at once
#define SPAN 512      // columns that are summed apart; a multiple of 16
#define NEAR 256      // the last columns that a row sees are in no span; at least as many as a tree's path has nodes
#define SPLIT_ROWS 16 // up to so many rows in all, threads divide the columns

INLINE int64_t size_of(int64_t format) { return format == KEPT_FLOAT32 ? 4 : format == KEPT_INT8 ? 1 : 2; }

// LANES numbers of V from number i on; those of eight bits lack their scale.
INLINE vf numbers(int64_t format, const uint8_t *v, int64_t i) {
    switch (format) {
    case KEPT_FLOAT32: return load(v + 4 * i);
    case KEPT_BFLOAT16: return wide(v + 2 * i);
    case KEPT_FLOAT16: return halves(v + 2 * i);
    default: return signed_bytes(v + i);
    }
}

// y[t, 0..31] += sum over s < S of p[t, s] v[s, i..i + 31], added one by one, so that terms of 0 change nothing. Prefetches
// the bytes `ahead` of those that it reads.
INLINE void mixture(int64_t format, int T, const float *p, int64_t row_p, const uint8_t *v, int64_t row_v, int64_t from,
                    float *y, int64_t row_y, int64_t S, int64_t ahead) {
    vf acc[6][2 * PARTS];
    for (int t = 0; t < T; t++)
        for (int i = 0; i < 2 * PARTS; i++) acc[t][i] = load(y + t * row_y + i * LANES);
    for (int64_t s = 0; s < S; s++) {
        const uint8_t *then = v + s * row_v + size_of(format) * from + ahead;
        prefetch_far(then);
        if (format == KEPT_FLOAT32) prefetch_far(then + 64);
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
    case T: mixture(format, T, p, row_p, v, row_v, from, y, row_y, S, ahead); break;
#if LANES == 16
#define EACH_MIX CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#else
#define EACH_MIX CASE(1) CASE(2)
#endif
INLINE void mix_kept(int64_t format, int64_t T, const float *p, int64_t row_p, const uint8_t *v, int64_t row_v, int64_t from,
                     float *y, int64_t row_y, int64_t S, int64_t ahead) {
    const int64_t tiles = (T + MIX_T - 1) / MIX_T;
    for (int64_t n = 0, count; n < tiles; n++, p += count * row_p, y += count * row_y) {
        count = (n + 1) * T / tiles - n * T / tiles;
        switch (count) { EACH_MIX }
    }
}
#undef CASE

static void mix(int64_t format, int64_t T, const float *p, int64_t row_p, const uint8_t *v, int64_t row_v, int64_t from,
                float *y, int64_t row_y, int64_t S, int64_t ahead) {
    switch (format) {
    case KEPT_FLOAT32: mix_kept(KEPT_FLOAT32, T, p, row_p, v, row_v, from, y, row_y, S, ahead); return;
    case KEPT_BFLOAT16: mix_kept(KEPT_BFLOAT16, T, p, row_p, v, row_v, from, y, row_y, S, ahead); return;
    case KEPT_FLOAT16: mix_kept(KEPT_FLOAT16, T, p, row_p, v, row_v, from, y, row_y, S, ahead); return;
    default: mix_kept(KEPT_INT8, T, p, row_p, v, row_v, from, y, row_y, S, ahead);
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

// The first of the last `sliding_window` columns that row i of sequence b sees (kernels/tree_attention.py); 0 without a window.
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

// What a row has summed over some columns: D sums with V, the sum of its shares, and the exponent of 2 that shares are
// relative to.
#define SUM(D) ((D) + 2)

static void put(float *to, const float *sums, float end, float top, int64_t D) {
    memcpy(to, sums, D * 4);
    to[D] = end, to[D + 1] = top;
}

// Adds to what `put` wrote. Powers of two rescale without error, and what was summed over masked columns changes nothing.
static void add(float *to, const float *sums, float end, float top, int64_t D) {
    const float most = top > to[D + 1] ? top : to[D + 1], by = two_to(to[D + 1] - most), by_new = two_to(top - most);
    for (int64_t e = 0; e < D; e += LANES) store(to + e, load(to + e) * by + load(sums + e) * by_new);
    to[D] = to[D] * by + end * by_new;
    to[D + 1] = most;
}

typedef struct { // rows first .. first + count - 1 of sequence b, for the query heads of KV head h in one layer
    const places *p;
    pool kv;
    int64_t b, h, first, count, heads, rows, D, row_k; // rows: count heads; row_k: bytes of a column
    int64_t length, own, w;    // columns, rows and window of the sequence
    int64_t S, start;          // where the columns that any row sees end and begin, the latter a multiple of 16
    int64_t seen[BLOCK_ROWS];  // where those of each row begin
    int64_t spans[BLOCK_ROWS]; // the spans of each row
    float scale, cap, cap_scale;   // scale: makes scores exponents of 2; cap_scale: the soft cap's
    float *q, *sums, *ends, *tops; // [rows, D], [rows, D], [rows], [rows]: queries, and the sums since the last span ended
    queries x;
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

// Turns y, the scores of row i with columns c .. c + width - 1, into shares; 0 up to a multiple of 16.
static void weigh_row(const block *a, int64_t i, int64_t c, int64_t width, float *y) {
    const int64_t window = a->length - a->w, lanes = (width + 15) / 16 * 16;
    const int64_t end = end_of(a, i / a->heads) - c, *bits = bits_of(a, i / a->heads);
    if (a->cap > 0) soften(y, a->cap_scale, a->cap, lanes);
    for (int64_t j = c > window ? c : window; bits && j < c + width; j++)
        if (!(bits[(j - window) / 64] >> ((j - window) % 64) & 1)) y[j - c] = -INFINITY;
    for (int64_t j = 0; j < a->seen[i / a->heads] - c && j < width; j++) y[j] = -INFINITY;
    for (int64_t j = end < 0 ? 0 : end < width ? end : width; j < lanes; j++) y[j] = -INFINITY;
    vf most = splat(-INFINITY);
    for (int64_t j = 0; j < lanes; j += LANES) most = largest(load(y + j), most);
    const float old = a->tops[i], top = highest(most) * a->scale;
    if (top > old && nearest(top) > old) {
        const float shrink = two_to(old - (a->tops[i] = nearest(top)));
        a->ends[i] *= shrink;
        for (int64_t e = 0; e < a->D; e += LANES) store(a->sums + i * a->D + e, load(a->sums + i * a->D + e) * shrink);
    }
    for (int64_t j = 0; j < lanes; j += LANES) store(y + j, power_below(load(y + j) * a->scale, splat(a->tops[i])));
}

// Sums over the columns from `c` to `end`, a block after another. When a row's largest score rises, what it has summed is
// rescaled by a power of two, so the bits do not depend on where blocks begin. While K is read, V is prefetched, and while
// V is read, the next K.
static void weigh_few(const block *a, int64_t c, int64_t end) {
    const int64_t rows = a->rows, D = a->D, format = a->kv.format;
    float *scores = a->room, *scales = scores + rows * FEW_BLOCK;
    for (int64_t width; c < end; c += width) {
        width = in_page(a->p, c, end);
        width = width < FEW_BLOCK ? width : FEW_BLOCK;
        const uint8_t *k = at(a, a->kv.k, c), *v = at(a, a->kv.v, c);
        const uint8_t *then = c + width < a->S ? at(a, a->kv.k, c + width) : k;
        dot_keys(&a->kv, k, a->row_k, &a->x, width, rows, D, scores, FEW_BLOCK, v - k);
        for (int64_t i = 0; i < rows; i++) weigh_row(a, i, c, width, scores + i * FEW_BLOCK);
        for (int64_t i = 0; i < rows; i += 8) { // adds in column order, like `mixture`; eight rows at once hide the latency
            float one[8] = {0};
            const int64_t n = rows - i < 8 ? rows - i : 8;
            memcpy(one, a->ends + i, n * 4);
            for (int64_t j = 0; j < width; j++)
                for (int64_t r = 0; r < 8; r++) one[r] += scores[(i + (r < n ? r : 0)) * FEW_BLOCK + j];
            memcpy(a->ends + i, one, n * 4);
        }
        if (format == KEPT_INT8) {
            for (int64_t j = 0; j < width; j++) scales[j] = scale_of(v + j * a->row_k, D);
            for (int64_t i = 0; i < rows; i++)
                for (int64_t j = 0; j < width; j++) scores[i * FEW_BLOCK + j] *= scales[j];
        }
        for (int64_t i = 0; i < D; i += 32) mix(format, rows, scores, FEW_BLOCK, v, a->row_k, i, a->sums + i, D, width, then - v);
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

// The same for many rows.
static void weigh_many(const block *a, int64_t c, int64_t end) {
    const int64_t lanes = lanes_of(a->rows), D = a->D;
    float *q = a->room, *y = q + lanes * D, *shrink = y + MANY_BLOCK * lanes, *wide = shrink + lanes;
    int64_t row;
    for (int64_t width; c < end; c += width) {
        width = in_page(a->p, c, end);
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

// How many spans row i of sequence b has. They end before the window, where a tree's rows lie among others.
static int64_t spans_of(const places *p, int64_t b, int64_t i) {
    const int64_t length = p->kv_len[b], own = p->cu_rows[b + 1] - p->cu_rows[b], before = length - p->window[b];
    int64_t columns = p->full ? length : length - own + i + 1;
    if (p->words) {
        columns = before;
        for (int64_t j = 0; j < p->W; j++) columns += __builtin_popcountll(p->words[(p->cu_rows[b] + i) * p->W + j]);
        columns = columns < before + NEAR ? columns : before + NEAR;
    }
    return columns < NEAR ? 0 : (columns - NEAR) / SPAN;
}

static block block_of(const state *s, int64_t at_layer, int64_t b, int64_t first, int64_t count) {
    const stack *d = s->f->model;
    const places *p = s->f->rows;
    block a = {.p = p, .kv = pool_of(p, d, at_layer), .b = b, .first = first, .count = count};
    a.D = d->layers[at_layer].D, a.heads = d->Hq / d->layers[at_layer].Hkv;
    a.rows = count * a.heads, a.row_k = d->layers[at_layer].Hkv * a.kv.head;
    a.length = p->kv_len[b], a.own = p->cu_rows[b + 1] - p->cu_rows[b], a.w = p->window[b];
    a.S = a.start = p->words || p->full ? a.length : a.length - a.own + first + count;
    for (int64_t i = 0; i < count; i++) {
        a.seen[i] = first_seen(p, b, first + i, d->layers[at_layer].sliding_window);
        a.spans[i] = spans_of(p, b, first + i);
        a.start = a.seen[i] < a.start ? a.seen[i] / 16 * 16 : a.start;
    }
    a.scale = (float)((d->cap > 0 ? 1 : d->scale) * 1.4426950408889634), a.cap = (float)d->cap, a.cap_scale = (float)d->scale;
    a.q = s->room, a.sums = a.q + a.rows * a.D, a.ends = a.sums + a.rows * a.D;
    a.tops = a.ends + lanes_of(a.rows), a.room = a.tops + lanes_of(a.rows);
    return a;
}

// Takes the queries of KV head h of the n-th layer, and begins their sums.
static void begin(const state *s, int64_t n, const layer *l, int64_t h, block *a) {
    const stack *d = s->f->model;
    const int64_t row = row_of(l), D = a->D, skipped = d->gated ? d->Hq : 0;
    const float *qkv = qkv_of(s, n) + (a->p->cu_rows[a->b] + a->first) * row;
    a->h = h;
    for (int64_t i = 0; i < a->rows; i++)
        memcpy(a->q + i * D, qkv + i / a->heads * row + (skipped + h * a->heads + i % a->heads) * D, D * 4);
    memset(a->sums, 0, a->rows * D * 4);
    for (int64_t i = 0; i < lanes_of(a->rows); i++) a->ends[i] = 0, a->tops[i] = LOWEST;
    if (in_many(a->rows, a->kv.format))
        spread(a->q, a->rows, D, a->room);
    else
        a->x = prepare(a->kv.format, a->q, a->room + (a->rows + 1) * FEW_BLOCK, a->rows, D);
}

// Sums over the columns from `c` to `end`. What a row sums over a span, and after its spans, is added to `sums` [rows,
// SUM], or put in the place of its number in `sums` [rows, slots, SUM].
static void weigh(const block *a, int64_t c, int64_t end, float *sums, int64_t slots) {
    const int64_t D = a->D;
    for (int64_t stop; c < end; c = stop) {
        stop = (c / SPAN + 1) * SPAN < end ? (c / SPAN + 1) * SPAN : end;
        if (in_many(a->rows, a->kv.format))
            weigh_many(a, c, stop);
        else
            weigh_few(a, c, stop);
        for (int64_t i = 0; i < a->rows; i++) {
            const int64_t spans = a->spans[i / a->heads], whole = stop % SPAN == 0 && stop / SPAN <= spans;
            if (!whole && stop < a->S) continue;
            if (slots)
                put(sums + (i * slots + (whole ? stop / SPAN - 1 : spans)) * SUM(D), a->sums + i * D, a->ends[i], a->tops[i], D);
            else
                add(sums + i * SUM(D), a->sums + i * D, a->ends[i], a->tops[i], D);
            memset(a->sums + i * D, 0, D * 4);
            a->ends[i] = 0, a->tops[i] = LOWEST;
        }
    }
}

// The output of row t's query head in the n-th layer, from what it has summed.
static void finish(const state *s, int64_t n, const layer *l, int64_t t, int64_t head, const float *sum) {
    const stack *d = s->f->model;
    const int64_t D = l->D;
    float *to = mixed_of(s, n) + (t * d->Hq + head) * D, factor = 1.0f / sum[D];
    if (l->sinks) { // relative to the larger one of sink and top
        const float over = l->sinks[head] - sum[D + 1] * 0.69314718f, shrink = expf(-fabsf(over));
        factor = over > 0 ? shrink / (sum[D] * shrink + 1.0f) : 1.0f / (sum[D] + shrink);
    }
    for (int64_t e = 0; e < D; e++) to[e] = sum[e] * factor;
    if (d->gated) {
        float *gate = qkv_of(s, n) + t * row_of(l) + head * D;
        if (l->qkv_bias) grow(gate, l->qkv_bias + head * D, 0, D);
        weigh_sigmoid(to, gate, D);
    }
}

// A row's sums over a span run over the columns in order, spans are added in order, masked columns add 0, and shares are
// relative to a power of two. So a row of a tree has the same bits as the same token in a chain, although other nodes lie
// between its ancestors.
static void attend(const state *s, int64_t n, int64_t at_layer, int64_t b, int64_t h, int64_t first, int64_t count) {
    const layer *l = s->f->model->layers + at_layer;
    block a = block_of(s, at_layer, b, first, count);
    const int64_t D = a.D;
    float *sums = a.room;
    a.room += a.rows * SUM(D);
    begin(s, n, l, h, &a);
    for (int64_t i = 0; i < a.rows; i++) put(sums + i * SUM(D), a.sums + i * D, a.ends[i], a.tops[i], D);
    weigh(&a, a.start, a.S, sums, 0);
    for (int64_t i = 0; i < a.rows; i++)
        finish(s, n, l, a.p->cu_rows[b] + first + i / a.heads, h * a.heads + i % a.heads, sums + i * SUM(D));
}

// Floats of work space for some rows of a sequence, whatever the format of K and V.
int64_t attention_floats(int64_t rows, int64_t D) {
    const int64_t lanes = lanes_of(rows), few = (rows + 1) * FEW_BLOCK + (queries_bytes(rows, D) + 3) / 4;
    const int64_t many = rows < MANY ? 0 : lanes * (D + MANY_BLOCK + 1) + MANY_BLOCK * D;
    return 2 * rows * D + 2 * lanes + rows * SUM(D) + (many > few ? many : few);
}

// The spans that each row of sequence b has at least; 0 without rows.
static int64_t shared_spans(const places *p, int64_t b) {
    int64_t least = INT64_MAX;
    for (int64_t i = 0; i < p->cu_rows[b + 1] - p->cu_rows[b]; i++) {
        const int64_t spans = spans_of(p, b, i);
        least = spans < least ? spans : least;
    }
    return least == INT64_MAX ? 0 : least;
}

// Places for the sums of a row; 0 if threads do not divide columns.
static int64_t slots_of(const places *p) {
    int64_t most = 0;
    for (int64_t b = 0; b < p->B && p->T <= SPLIT_ROWS; b++) most = p->kv_len[b] > most ? p->kv_len[b] : most;
    return most < NEAR + SPAN ? 0 : most / SPAN + 1;
}

// Floats of shared work space for N layers.
int64_t divided_floats(const stack *d, const places *p, int64_t N) { return N * p->T * d->Hq * slots_of(p) * SUM(d->D); }

// For few rows: threads divide the columns, so that each reads its part of memory from end to end, for all heads if there
// are enough parts. Then the spans are added.
static void attend_divided(const state *s, int64_t first, int64_t N) {
    const stack *d = s->f->model;
    const places *p = s->f->rows;
    const int64_t slots = slots_of(p), each = d->Hq * slots * SUM(d->D); // each: floats of a row
    int64_t all = 0, i = next(s->m);
    for (int64_t b = 0; b < p->B; b++) all += shared_spans(p, b) + 1;
    const int64_t apart = all < 4 * s->m->size ? d->Hkv : 1; // with few spans, their heads are apart
    for (int64_t b = 0, before = 0; b < p->B; b++) {
        const int64_t spans = shared_spans(p, b), items = 1 + spans, own = p->cu_rows[b + 1] - p->cu_rows[b];
        for (; i < before + items * N * apart; i = next(s->m)) {
            const int64_t n = (i - before) / apart % N, k = spans - (i - before) / apart / N; // the last, longest part first
            const layer *l = d->layers + first + n;
            if (l->recurrent) continue;
            block a = block_of(s, first + n, b, 0, own);
            const int64_t c = k * SPAN > a.start ? k * SPAN : a.start, end = k < spans ? (k + 1) * SPAN : a.S;
            for (int64_t h = apart > 1 ? (i - before) % apart : 0; h < l->Hkv; h += apart) {
                float *sums = s->divided + n * p->T * each + (p->cu_rows[b] * d->Hq + h * a.rows) * slots * SUM(l->D);
                begin(s, n, l, h, &a);
                weigh(&a, c, end, sums, slots);
            }
        }
        before += items * N * apart;
    }
    meet(s->m);
    i = next(s->m);
    for (int64_t b = 0, before = 0; b < p->B; b++) {
        const int64_t own = p->cu_rows[b + 1] - p->cu_rows[b];
        for (; i < before + N * d->Hq * own; i = next(s->m)) {
            const int64_t n = (i - before) / (d->Hq * own), at = (i - before) % (d->Hq * own);
            const layer *l = d->layers + first + n;
            if (l->recurrent) continue;
            const int64_t D = l->D, heads = d->Hq / l->Hkv, t = at % (own * heads) / heads;
            const block a = block_of(s, first + n, b, 0, own);
            float *sum = s->divided + n * p->T * each + (p->cu_rows[b] * d->Hq + at) * slots * SUM(D);
            float *more = sum + a.spans[t] * SUM(D);
            int64_t k = a.start / SPAN;
            if (k < a.spans[t]) {
                float *to = sum + k * SUM(D);
                for (k++; k <= a.spans[t]; k++) add(to, sum + k * SUM(D), sum[k * SUM(D) + D], sum[k * SUM(D) + D + 1], D);
                more = to;
            }
            finish(s, n, l, p->cu_rows[b] + t, at / (own * heads) * heads + at % heads, more);
        }
        before += N * d->Hq * own;
    }
}

void attend_all(const state *s, int64_t first, int64_t N) {
    const places *p = s->f->rows;
    const int64_t Hkv = s->f->model->Hkv;
    if (slots_of(p)) {
        attend_divided(s, first, N);
        return;
    }
    int64_t before = 0, i = next(s->m);
    for (int64_t b = 0; b < p->B; b++) { // later rows see more columns, so they are processed first
        const int64_t own = p->cu_rows[b + 1] - p->cu_rows[b], blocks = (own + BLOCK_ROWS - 1) / BLOCK_ROWS, items = N * Hkv * blocks;
        for (; i < before + items; i = next(s->m)) {
            const int64_t block = blocks - 1 - (i - before) / (N * Hkv), n = (i - before) / Hkv % N;
            const int64_t count = own - block * BLOCK_ROWS;
            const layer *l = s->f->model->layers + first + n;
            if (l->recurrent || (i - before) % Hkv >= l->Hkv) continue;
            attend(s, n, first + n, b, (i - before) % Hkv, block * BLOCK_ROWS, count < BLOCK_ROWS ? count : BLOCK_ROWS);
        }
        before += items;
    }
}
