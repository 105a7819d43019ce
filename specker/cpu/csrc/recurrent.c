// Layers with a recurrent state: the gated delta rule over an anchored state (kernels/delta_rows.py), and short convolutions.
//
// A row's sums run in one order, over the columns of its path: a tree's row has the bits of the same token in a chain, and
// a prompt's chunk has those of decoding.
#include "state.h"
#include "vector.h"

#define TILE 8     // rows that read a state or a record together
#define MOST_K 16  // columns that a convolution reads
#define EPS 1e-6f  // of the norm of q and k

// --- the columns of a path

static int64_t at_column(const records *r, int64_t b, int64_t c) {
    return (int64_t)r->table[b * r->pages + c / r->page] * r->page + c % r->page;
}

static int64_t own_rows(const places *p, int64_t b) { return p->cu_rows[b + 1] - p->cu_rows[b]; }

// Whether row i of sequence b sees column `j` of its window.
static int sees(const places *p, int64_t b, int64_t i, int64_t j) {
    return p->words[(p->cu_rows[b] + i) * p->W + j / 64] >> (j % 64) & 1;
}

// The last columns that row i of sequence b sees before its own, at most `most`, the last one first. Returns their number.
static int64_t earlier(const places *p, int64_t b, int64_t i, int64_t *seen, int64_t most) {
    const int64_t before = (int64_t)p->kv_len[b] - p->window[b];
    int64_t n = 0, c = p->kv_len[b] - own_rows(p, b) + i - 1;
    for (; p->words && c >= before && n < most; c--)
        if (sees(p, b, i, c - before)) seen[n++] = c;
    for (; c >= 0 && n < most; c--) seen[n++] = c;
    return n;
}

// The position of row i of sequence b: the number of columns that it sees before its own. Where a draft runs over the end
// of the context, `places.positions` repeat the last one.
static int64_t position(const places *p, int64_t b, int64_t i) {
    const int64_t before = (int64_t)p->kv_len[b] - p->window[b], c = p->kv_len[b] - own_rows(p, b) + i;
    if (!p->words) return c;
    int64_t n = before;
    for (int64_t j = 0; j < c - before; j++) n += sees(p, b, i, j);
    return n;
}

// --- convolutions

// Channels first .. first + count - 1 of all rows of sequence b. Later rows are processed first, because they read the
// inputs of earlier ones, which the outputs replace.
static void convolve(const state *s, int64_t n, const layer *l, int64_t b, int64_t first, int64_t count) {
    const mixing *x = &s->f->model->mix;
    const places *p = s->f->rows;
    const records *past = &p->past;
    const int64_t own = own_rows(p, b), t0 = p->cu_rows[b], start = p->kv_len[b] - own, row = row_of(l), C = x->C;
    float *raw = qkv_of(s, n) + t0 * row + first, *inputs = past->inputs + l->rank * past->count * past->page * C + first;
    for (int64_t i = 0; i < own && x->kind == CONV; i++) {
        float *a = raw + i * row;
        for (int64_t e = 0; e < count; e++) a[e] *= a[2 * C + e];
    }
    for (int64_t i = own - 1; i >= 0; i--) {
        int64_t seen[MOST_K];
        const float *taps[MOST_K];
        const int64_t taken = earlier(p, b, i, seen, x->K - 1) + 1;
        taps[taken - 1] = raw + i * row;
        for (int64_t j = 0; j < taken - 1; j++) {
            const int64_t c = seen[taken - 2 - j];
            taps[j] = c < start ? inputs + at_column(past, b, c) * C : raw + (c - start) * row;
        }
        const float *weight = l->conv + (x->K - taken) * C + first;
        memcpy(inputs + past->slots[t0 + i] * C, raw + i * row, count * 4);
        float *to = x->kind == CONV ? mixed_of(s, n) + (t0 + i) * C + first : raw + i * row;
        for (int64_t e = 0; e < count; e += LANES) {
            vf sum = splat(0);
            for (int64_t j = 0; j < taken; j++) sum = fma_(load(weight + j * C + e), load(taps[j] + e), sum);
            store(to + e, x->kind == CONV ? sum * load(raw + i * row + C + e) : sum);
        }
        if (x->kind == DELTA) weigh_silu(to, count);
    }
}

void convolve_all(const state *s, int64_t first, int64_t N) {
    const int64_t C = s->f->model->mix.C, B = s->f->rows->B, part = chunk(C, 4 * s->m->size), parts = (C + part - 1) / part;
    for (int64_t i = next(s->m); i < N * B * parts; i = next(s->m)) {
        const int64_t n = i / (B * parts), from = i % parts * part;
        const layer *l = s->f->model->layers + first + n;
        if (l->recurrent) convolve(s, n, l, i / parts % B, from, part < C - from ? part : C - from);
    }
}

// --- sums of rows

#if LANES == 8
#define MOST_SUMS 6 // rows that are summed at once; two registers each are left
#else
#define MOST_SUMS 12
#endif
#define STEPS 32 // terms added before the next rows get theirs: v stays in the first cache

// y[n, V registers] += sum over s < S of p[n, s] v[s, ..], added one by one.
INLINE void add_tile(int N, int V, int fetch, const float *p, int64_t row_p, const float *v, int64_t row_v, float *y, int64_t row_y,
                     int64_t S) {
    vf sum[MOST_SUMS][8];
    for (int n = 0; n < N; n++)
        for (int i = 0; i < V; i++) sum[n][i] = load(y + n * row_y + i * LANES);
    for (int64_t s = 0; s < S; s++) {
        vf a[8];
#pragma GCC unroll 8
        for (int i = 0; i < V; i++) {
            a[i] = load(v + s * row_v + i * LANES);
            if (fetch && i * LANES % 16 == 0) prefetch(v + (s + STEPS) * row_v + i * LANES);
        }
#pragma GCC unroll 12
        for (int n = 0; n < N; n++) {
            const vf b = splat(p[n * row_p + s]);
#pragma GCC unroll 8
            for (int i = 0; i < V; i++) sum[n][i] = fma_(a[i], b, sum[n][i]);
        }
    }
    for (int n = 0; n < N; n++)
        for (int i = 0; i < V; i++) store(y + n * row_y + i * LANES, sum[n][i]);
}

// `add_tile` of `width` numbers a row, a multiple of 16.
INLINE void add_wide(int N, int V, int fetch, const float *p, int64_t row_p, const float *v, int64_t row_v, float *y, int64_t row_y,
                     int64_t S, int64_t width) {
    int64_t e = 0;
    for (; e + V * LANES <= width; e += V * LANES) add_tile(N, V, fetch, p, row_p, v + e, row_v, y + e, row_y, S);
    for (; e < width; e += LANES) add_tile(N, 1, fetch, p, row_p, v + e, row_v, y + e, row_y, S);
}

// `add_wide` of any number of rows.
static void add_rows(int64_t N, const float *p, int64_t row_p, const float *v, int64_t row_v, float *y, int64_t row_y, int64_t S,
                     int64_t width) {
    const int64_t groups = (N + MOST_SUMS - 1) / MOST_SUMS;
    for (int64_t s = 0; s < S; s += STEPS)
        for (int64_t i = 0; i < groups; i++) {
            const int64_t n = i * N / groups, count = S - s < STEPS ? S - s : STEPS;
            const float *own = p + n * row_p + s, *from = v + s * row_v;
            float *to = y + n * row_y;
#define V(N) (2 * MOST_SUMS / N >= 8 ? 8 : 2 * MOST_SUMS / N >= 4 ? 4 : 2)
#define CASE(N)                                                                                                          \
    case N:                                                                                                              \
        if (i) add_wide(N, V(N), 0, own, row_p, from, row_v, to, row_y, count, width); \
        else add_wide(N, V(N), 1, own, row_p, from, row_v, to, row_y, count, width);   \
        break;
            switch ((i + 1) * N / groups - n) {
                CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#if MOST_SUMS > 6
                CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#endif
            }
#undef CASE
#undef V
        }
}

// --- the gated delta rule

typedef struct { // one key head of one sequence
    const state *s;
    const layer *l;
    int64_t n, b, h;
    float *inputs;            // [T, `row_of`], of the sequence
    float *k, *u, *g;         // the layer's records
    float *keys;              // [2 R, Dk], the normalised keys of R rows, then their queries
    float *sums;              // [2 R, Dv], u and o of these rows
    float *dots, *weights;    // [2 R, wide], keys by columns: `count` from the anchor on, then the R rows
    float *decays;            // [wide], of these columns since the beginning of their block
    int64_t wide, count;
    int64_t *at;              // [wide], rows of the columns' records
    uint8_t *seen, *far;      // [wide], a bit for each row that sees the column; whether it is in the block before
} pass;

static int64_t widest(const stack *d, const places *p) { return (2 * d->mix.block + 64 * p->W + TILE + 31) / 16 * 16; }

int64_t delta_bytes(const stack *d, const places *p) {
    const mixing *x = &d->mix;
    if (x->kind != DELTA) return 0;
    const int64_t wide = widest(d, p);
    return (2 * TILE * (x->Dk + x->Dv + 2 * wide) + wide + 16 * x->block) * 4 + wide * 10 + 64;
}

static pass begin(const state *s, int64_t n, const layer *l, int64_t b, int64_t h) {
    const mixing *x = &s->f->model->mix;
    const places *p = s->f->rows;
    const int64_t rows = l->rank * p->past.count * p->past.page, wide = widest(s->f->model, p);
    pass r = {.s = s, .l = l, .n = n, .b = b, .h = h, .wide = wide};
    r.inputs = qkv_of(s, n) + p->cu_rows[b] * row_of(l);
    r.k = p->past.k + rows * x->Hk * x->Dk, r.u = p->past.u + rows * x->Hv * x->Dv, r.g = p->past.g + rows * x->Hv * 4;
    r.keys = s->room, r.sums = r.keys + 2 * TILE * x->Dk, r.dots = r.sums + 2 * TILE * x->Dv;
    r.weights = r.dots + 2 * TILE * wide, r.decays = r.weights + 2 * TILE * wide;
    r.at = (int64_t *)(r.decays + wide + 16 * x->block); // `fold` uses what lies between
    r.seen = (uint8_t *)(r.at + wide), r.far = r.seen + wide;
    return r;
}

static float power_of(float x) { return power(splat(x))[0]; }

static void fetch(const float *x, int64_t count) {
    for (int64_t i = 0; i < count; i += 16) prefetch(x + i);
}

// The number of columns from index i on, at most `end`, whose records follow one another.
static int64_t run_of(const int64_t *at, int64_t i, int64_t end) {
    int64_t n = 1;
    while (i + n < end && at[i + n] == at[i] + n) n++;
    return n;
}

// The state at `to` of anchor A + block, from the one at `from` of anchor A and the records between.
static void fold(const pass *r, int64_t v, int64_t A, const float *from, float *to) {
    const mixing *x = &r->s->f->model->mix;
    const int64_t block = x->block, row_k = x->Hk * x->Dk, row_u = x->Hv * x->Dv;
    float *factors = r->decays + r->wide; // [16, block], of 16 rows of the state
    for (int64_t j = 0; j < block; j++) r->at[j] = at_column(&r->s->f->rows->past, r->b, A + j);
    const float total = r->g[(r->at[block - 1] * x->Hv + v) * 4], kept = power_of(total);
    for (int64_t j = 0; j < block; j++) r->decays[j] = power_of(total - r->g[(r->at[j] * x->Hv + v) * 4]);
    for (int64_t e = 0; e < x->Dk; e += 16) {
        for (int64_t j = 0; j < block; j++)
            for (int64_t i = 0; i < 16; i++)
                factors[i * block + j] = r->decays[j] * r->k[r->at[j] * row_k + r->h * x->Dk + e + i];
        for (int64_t i = e * x->Dv; i < (e + 16) * x->Dv; i++) to[i] = kept * from[i];
        for (int64_t j = 0, n; j < block; j += n) {
            n = run_of(r->at, j, block);
            add_rows(16, factors + j, block, r->u + r->at[j] * row_u + v * x->Dv, row_u, to + e * x->Dv, x->Dv, n, x->Dv);
        }
    }
}

// Lists the columns that rows i .. i + R - 1 see from column A on, and these rows.
static void list(pass *r, int64_t i, int64_t R, int64_t A, int64_t block) {
    const mixing *x = &r->s->f->model->mix;
    const places *p = r->s->f->rows;
    const int64_t here = p->kv_len[r->b] - own_rows(p, r->b) + i, before = (int64_t)p->kv_len[r->b] - p->window[r->b];
    const int64_t end = p->words && before < here ? before : here; // all rows see the columns up to here
    int64_t n = 0;
    for (int64_t c = A; c < end; c++, n++)
        r->at[n] = at_column(&p->past, r->b, c), r->seen[n] = 0xff, r->far[n] = c / x->block != block;
    for (int64_t c = end; c < here + R; c++) {
        uint8_t seen = 0;
        for (int64_t t = 0; t < R; t++)
            if (here + t > c && (!p->words || sees(p, r->b, i + t, c - before))) seen |= (uint8_t)(1 << t);
        if (c < here) { // other rows have not been written, perhaps
            if (!seen) continue;
            r->at[n] = at_column(&p->past, r->b, c);
            const int64_t at = (int64_t)r->g[(r->at[n] * x->Hv + r->h * (x->Hv / x->Hk)) * 4 + 2];
            if (at < A) continue;
            r->far[n] = at / x->block != block;
        } else {
            if (c == here) r->count = n;
            r->far[n] = 0;
        }
        r->seen[n++] = seen;
    }
    for (int64_t j = 0; j < r->count; j++) { // the processor does not foresee that records of a head lie so far apart
        prefetch(r->g + (r->at[j] * x->Hv + r->h * (x->Hv / x->Hk)) * 4);
        fetch(r->k + (r->at[j] * x->Hk + r->h) * x->Dk, x->Dk);
    }
}

static float softplus(float x) { return x > 20 ? x : log1pf(expf(x)); }

// The decays of R rows since the beginning of their block, at the end of `decays`, and of the block before, `e`.
static void decay(const pass *r, int64_t v, int64_t i, int64_t R, const int64_t *at, float *e) {
    const mixing *x = &r->s->f->model->mix;
    const places *p = r->s->f->rows;
    const int64_t here = p->kv_len[r->b] - own_rows(p, r->b) + i;
    const float rate = -expf(r->l->a_log[v]);
    for (int64_t t = 0; t < R; t++) {
        const float a = r->inputs[(i + t) * row_of(r->l) + x->C + x->Hv * (x->Dv + 1) + v];
        const float g = rate * softplus(a + r->l->dt_bias[v]);
        int64_t parent;
        float c = 0, end = 0;
        if (earlier(p, r->b, i + t, &parent, 1)) {
            if (parent < here) {
                const float *record = r->g + (at_column(&p->past, r->b, parent) * x->Hv + v) * 4;
                c = record[0], end = record[1];
            } else {
                c = r->decays[r->count + parent - here], end = e[parent - here];
            }
        }
        r->decays[r->count + t] = at[t] % x->block ? c + g : g;
        e[t] = at[t] % x->block ? end : c;
    }
}

// Value head v of R rows, whose positions are `at`, over the state S.
static void head(const pass *r, int64_t v, int64_t i, int64_t R, const int64_t *at, const float *S, const float *scale) {
    const mixing *x = &r->s->f->model->mix;
    const places *p = r->s->f->rows;
    const int64_t Dv = x->Dv, row = row_of(r->l), row_u = x->Hv * Dv, wide = r->wide, n = r->count, first = p->cu_rows[r->b] + i;
    const int64_t *slots = p->past.slots + first;
    const int64_t group = x->Hv / x->Hk, place = x->tiled ? v % group * x->Hk + v / group : v;
    const float *inputs = r->inputs + i * row;
    float e[TILE], reach[TILE];
    fetch(S, STEPS * Dv);
    for (int64_t j = 0; j < n; j++) r->decays[j] = r->g[(r->at[j] * x->Hv + v) * 4];
    decay(r, v, i, R, at, e);
    for (int64_t t = 0; t < R; t++) {
        const float near = r->decays[n + t], far = near + e[t];
        float *w = r->weights + t * wide, *w_q = w + R * wide, *dots = r->dots + t * wide, *dots_q = dots + R * wide;
        reach[t] = power_of(far);
        for (int64_t j = 0; j < n + R; j++) w[j] = r->seen[j] >> t & 1 ? (r->far[j] ? far : near) - r->decays[j] : -INFINITY;
        for (int64_t j = n + R; j < (n + R + 15) / 16 * 16; j++) w[j] = -INFINITY;
        for (int64_t j = 0; j < n + R; j += LANES) {
            const vf f = power(load(w + j));
            store(w + j, -(f * load(dots + j))), store(w_q + j, f * load(dots_q + j));
        }
    }
    float *u = r->sums, *o = u + R * Dv;
    memset(u, 0, 2 * R * Dv * 4);
    for (int64_t j = 0; j < n; j++) fetch(r->u + r->at[j] * row_u + v * Dv, Dv);
    add_rows(2 * R, r->keys, x->Dk, S, Dv, u, Dv, x->Dk, Dv);
    for (int64_t t = 0; t < R; t++) {
        const float *value = inputs + t * row + 2 * x->Hk * x->Dk + v * Dv;
        for (int64_t d = 0; d < Dv; d++) {
            u[t * Dv + d] = value[d] - reach[t] * u[t * Dv + d];
            o[t * Dv + d] = reach[t] * o[t * Dv + d];
        }
    }
    for (int64_t j = 0, count; j < n; j += count) {
        count = run_of(r->at, j, n);
        add_rows(2 * R, r->weights + j, wide, r->u + r->at[j] * row_u + v * Dv, row_u, u, Dv, count, Dv);
    }
    for (int64_t t = 0; t < R; t++) {
        float *own = u + t * Dv, *out = o + t * Dv, *record = r->g + (slots[t] * x->Hv + v) * 4;
        const float beta = 1 / (1 + expf(-inputs[t * row + x->C + x->Hv * Dv + v]));
        for (int64_t d = 0; d < Dv; d++) own[d] *= beta;
        const float *w = r->weights + n + t, itself = r->dots[(R + t) * wide + n + t];
        for (int64_t d = 0; d < Dv; d += LANES) {
            const vf a = load(own + d);
            store(out + d, fma_(a, splat(itself), load(out + d)));
            for (int64_t later = t + 1; later < R; later++) {
                if (!(r->seen[n + t] >> later & 1)) continue;
                float *y = u + later * Dv + d, *z = o + later * Dv + d;
                store(y, fma_(a, splat(w[later * wide]), load(y)));
                store(z, fma_(a, splat(w[(R + later) * wide]), load(z)));
            }
        }
        memcpy(r->u + slots[t] * row_u + v * Dv, own, Dv * 4);
        record[0] = r->decays[n + t], record[1] = e[t], record[2] = (float)at[t], record[3] = scale[t];
        float *gate = r->inputs + (i + t) * row + x->C + v * Dv;
        normalise(out, r->l->norm_mix, out, Dv, (float)r->s->f->model->eps);
        gated(SILU, gate, out, Dv);
        memcpy(mixed_of(r->s, r->n) + ((first + t) * x->Hv + place) * Dv, gate, Dv * 4);
    }
}

// All rows of one key head of sequence b, and of the value heads that share it.
static void delta(const state *s, int64_t n, const layer *l, int64_t b, int64_t h) {
    const mixing *x = &s->f->model->mix;
    const places *p = s->f->rows;
    const int64_t own = own_rows(p, b), Dk = x->Dk, group = x->Hv / x->Hk, half = x->Hv * Dk * x->Dv, size = Dk * x->Dv;
    const int64_t which = l->rank * p->past.X + p->past.state_of[b];
    float *states = p->past.states + which * 2 * half;
    int64_t *anchors = p->past.anchors + which * x->Hv;
    pass r = begin(s, n, l, b, h);
    for (int64_t i = 0, R; i < own; i += R) {
        int64_t at[TILE] = {position(p, b, i)};
        const int64_t block = at[0] / x->block, A = block ? (block - 1) * x->block : 0;
        for (R = 1; R < TILE && i + R < own && (at[R] = position(p, b, i + R)) / x->block == block;) R++;
        for (int64_t v = h * group; v < (h + 1) * group; v++)
            for (; anchors[v] < A; anchors[v] += x->block) {
                const int64_t odd = anchors[v] / x->block % 2;
                fold(&r, v, anchors[v], states + odd * half + v * size, states + !odd * half + v * size);
            }
        float scale[TILE];
        for (int64_t t = 0; t < R; t++) {
            const float *q = r.inputs + (i + t) * row_of(l) + h * Dk, *k = q + x->Hk * Dk;
            float *key = r.keys + t * Dk, *query = key + R * Dk;
            const float by = 1 / sqrtf(dot(q, q, Dk) + EPS) / sqrtf((float)Dk);
            scale[t] = 1 / sqrtf(dot(k, k, Dk) + EPS);
            for (int64_t d = 0; d < Dk; d++) key[d] = k[d] * scale[t], query[d] = q[d] * by;
            memcpy(r.k + (p->past.slots[p->cu_rows[b] + i + t] * x->Hk + h) * Dk, key, Dk * 4);
        }
        list(&r, i, R, A, block);
        for (int64_t j = 0, count; j < r.count; j += count) {
            count = run_of(r.at, j, r.count);
            const float *keys = r.k + (r.at[j] * x->Hk + h) * Dk;
            plain_rows((const uint8_t *)keys, OF_FLOAT32, x->Hk * Dk, r.keys, Dk, count, 2 * R, Dk, r.dots + j, r.wide, 0);
        }
        plain_rows((const uint8_t *)r.keys, OF_FLOAT32, Dk, r.keys, Dk, R, 2 * R, Dk, r.dots + r.count, r.wide, 0);
        for (int64_t v = h * group; v < (h + 1) * group; v++)
            head(&r, v, i, R, at, states + A / x->block % 2 * half + v * size, scale);
    }
}

void delta_all(const state *s, int64_t first, int64_t N) {
    const int64_t B = s->f->rows->B, Hk = s->f->model->mix.Hk;
    for (int64_t i = next(s->m); i < N * B * Hk; i = next(s->m)) {
        const layer *l = s->f->model->layers + first + i / (B * Hk);
        if (l->recurrent) delta(s, i / (B * Hk), l, i / Hk % B, i % Hk);
    }
}
