// Mixtures of experts: a row's feed-forward is the weighted sum of the outputs of the few experts that its router chooses.
//
// Rows are sorted by expert. A thread takes parts of an expert's matrices and multiplies them with all rows of the expert,
// so a chosen expert is read once, whatever the number of its rows, and the others are not read.
#include "state.h"
#include "vector.h"
#include <math.h>

#define EACH_PARTS 16 // parts for each thread, of all chosen experts together
#define MOST_ROWS 256 // rows of an expert that are multiplied at once

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

static int64_t padded(int64_t X) { return (X + 15) / 16 * 16; }

int64_t routing_bytes(const stack *d, int64_t T, int size, int me, char *base, routing *to) {
    const int64_t X = d->experts, k = d->chosen, E = d->E, wide = E > d->F ? E : d->F, rows = least(T, MOST_ROWS);
    const int64_t sorted = (T * k * 8 + (3 * X + 1) * 4 + 63) / 64 * 64;
    const int64_t own = (sorted + rows * E * 4 + rows_bytes(rows, wide) + 63) / 64 * 64;
    int64_t at = 0;
    if (!k) return 0;
#define TAKE(bytes) (base + (at = (at + 63) / 64 * 64, at += (bytes), at - (bytes)))
    routing r = {0};
    r.logits = (float *)TAKE(T * padded(X) * 4);
    r.experts = (int32_t *)TAKE(T * k * 4);
    r.scores = (float *)TAKE(T * k * 4);
    r.out = (float *)TAKE(T * k * E * 4);
    r.share = (float *)TAKE(d->shared ? T * 4 : 0);
    r.shared = (float *)TAKE(d->shared ? T * E * 4 : 0);
    char *private = TAKE(size * own) + me * own;
#undef TAKE
    r.order = (int32_t *)private, r.place = r.order + T * k, r.starts = r.place + T * k, r.active = r.starts + X + 1;
    r.ranks = (float *)(r.active + X);
    r.x = (float *)(private + sorted), r.forms = (char *)(r.x + rows * E);
    if (to) *to = r;
    return at + 64;
}

// The k of X numbers that are largest, in falling order; the lower id first among equals, and a NaN before all.
static void take_best(float *x, int64_t X, int64_t k, int32_t *chosen) {
    float last = INFINITY;
    for (int64_t i = 0; i < X; i++) x[i] = x[i] == x[i] ? x[i] : INFINITY;
    for (int64_t j = 0, id = -1; j < k; j++) {
        int64_t best = -1;
        for (int64_t i = 0; i < X; i++)
            if ((x[i] < last || (x[i] == last && i > id)) && (best < 0 || x[i] > x[best])) best = i;
        chosen[j] = (int32_t)(id = best);
        last = x[id];
    }
}

// Chooses by logits, and turns them into probabilities times their sum, which it returns.
static float by_softmax(const stack *d, float *z, int32_t *chosen) {
    take_best(z, d->experts, d->chosen, chosen);
    const float top = z[chosen[0]];
    vf parts[PARTS];
    for (int p = 0; p < PARTS; p++) parts[p] = splat(0);
    for (int64_t i = 0; i < padded(d->experts); i += 16)
        for (int p = 0; p < PARTS; p++) {
            vf e = power(load(z + i + p * LANES) - top);
            store(z + i + p * LANES, e);
            parts[p] += e;
        }
    return total16(parts);
}

static float sigmoid(float x) { return 1 / (1 + expf(-x)); }

// Turns logits into their sigmoids, and chooses by these plus a bias, or without one by the logits.
static void by_sigmoid(const stack *d, const float *bias, float *z, float *ranks, int32_t *chosen) {
    for (int64_t i = 0; i < d->experts; i++) {
        const float p = sigmoid(z[i]);
        ranks[i] = bias ? p + bias[i] : z[i];
        z[i] = p;
    }
    take_best(ranks, d->experts, d->chosen, chosen);
}

// The experts of row t and their scores (kernels/expert_route.py).
static void choose(const state *s, const layer *l, int64_t t) {
    const stack *d = s->f->model;
    const int64_t X = d->experts, k = d->chosen;
    float *z = s->route.logits + t * padded(X), *scores = s->route.scores + t * k, sum = 0, whole = 1;
    int32_t *chosen = s->route.experts + t * k;
    for (int64_t i = X; i < padded(X); i++) z[i] = -INFINITY;
    for (int64_t i = 0; l->router_bias && d->scoring == SOFTMAX && i < X; i++) z[i] += l->router_bias[i];
    if (d->scoring == SIGMOID)
        by_sigmoid(d, l->router_bias, z, s->route.ranks, chosen);
    else
        whole = by_softmax(d, z, chosen);
    for (int64_t j = 0; j < k; j++) sum += scores[j] = z[chosen[j]];
    sum = d->normalised ? sum + (float)d->score_eps : whole;
    for (int64_t j = 0; j < k; j++) scores[j] = scores[j] / sum * (float)d->score_scale;
    for (int64_t j = 0; l->router_scale && j < k; j++) scores[j] *= l->router_scale[chosen[j]];
}

// Sorts the choices by expert, and within an expert by row.
static void sort(state *s) {
    routing *x = &s->route;
    const int64_t X = s->f->model->experts, choices = s->f->rows->T * s->f->model->chosen;
    int32_t *starts = x->starts;
    memset(starts, 0, (X + 1) * 4);
    for (int64_t c = 0; c < choices; c++) starts[x->experts[c] + 1]++;
    x->count = 0;
    for (int64_t e = 0; e < X; e++) {
        if (starts[e + 1]) x->active[x->count++] = (int32_t)e;
        starts[e + 1] += starts[e];
    }
    for (int64_t c = 0; c < choices; c++) {
        const int32_t p = starts[x->experts[c]]++;
        x->order[p] = (int32_t)c, x->place[c] = p;
    }
    memmove(starts + 1, starts, X * 4);
    starts[0] = 0;
}

static rows rounded(const state *s, const matrix *w, const float *x, int64_t count) {
    rows r = rows_at(x, w->E, s->route.forms, count, w->E);
    for (int64_t t = 0; t < count; t++) round_row(w, &r, t);
    return r;
}

// This thread's parts of all chosen experts: of down, or of gate and up with the activation.
static void multiply(const state *s, const layer *l, int down) {
    const stack *d = s->f->model;
    const routing *x = &s->route;
    const int64_t T = s->f->rows->T, E = d->E, F = l->down.E, O = down ? E : F, each = down ? E : 2 * F;
    const int64_t part = chunk(O, 1 + EACH_PARTS * s->m->size / (x->count + 1)), parts = (O + part - 1) / part;
    const matrix *w = down ? &l->down : &l->gate_up;
    rows r;
    for (int64_t i = next(s->m), then, held = -1; i < x->count * parts; i = then) {
        const int64_t e = x->active[i / parts], o = i % parts * part, n = least(part, O - o);
        then = next(s->m);
        if (then < x->count * parts) ask(w, x->active[then / parts] * each + then % parts * part);
        for (int64_t p = x->starts[e]; p < x->starts[e + 1]; p += MOST_ROWS) {
            const int64_t count = least(MOST_ROWS, x->starts[e + 1] - p);
            const int64_t which = !down && count == T ? T * d->chosen : p; // all rows are the same for every expert
            if (which != held) {
                for (int64_t t = 0; t < count && !down; t++)
                    memcpy(x->x + t * E, s->normed + x->order[p + t] / d->chosen * E, E * 4);
                r = rounded(s, w, down ? s->gate + p * F : x->x, count);
                held = which;
            }
            if (down) {
                product(w, &r, count, e * E + o, n, x->out + p * E + o, E);
                for (int64_t t = 0; l->down_bias && t < count; t++)
                    grow(x->out + (p + t) * E + o, l->down_bias + e * E + o, 0, n);
                continue;
            }
            float *gate = s->gate + p * F + o, *up = s->up + p * F + o;
            product(w, &r, count, e * 2 * F + o, n, gate, F);
            product(w, &r, count, e * 2 * F + F + o, n, up, F);
            for (int64_t t = 0; t < count; t++) {
                if (l->gate_up_bias) {
                    const float *bias = l->gate_up_bias + e * 2 * F + o;
                    grow(gate + t * F, bias, 0, n), grow(up + t * F, bias + F, 0, n);
                }
                gated(d->activation, gate + t * F, up + t * F, n);
            }
        }
    }
    meet(s->m);
}

// The factor of the shared expert's output for row t.
static void choose_share(const state *s, const layer *l, int64_t t) {
    const int64_t E = s->f->model->E;
    s->route.share[t] = sigmoid(dot(s->normed + t * E, l->shared_gate, E));
}

// The expert that every row reads.
static void share_expert(const state *s, const layer *l) {
    rows x = prepared(s, &l->shared_gate_up, s->normed);
    gate_up(s, &l->shared_gate_up, 0, &x);
    meet(s->m);
    x = prepared(s, &l->shared_down, s->gate);
    share(s->m, &l->shared_down, &x, s->f->rows->T, s->route.shared, s->f->model->E);
    meet(s->m);
}

// to [T, E]: each row's outputs times their scores, added in the order of its choices, the shared expert's last. A thread
// has some of the columns.
static void weigh(const state *s, const layer *l, float *to) {
    const stack *d = s->f->model;
    const routing *x = &s->route;
    const int64_t T = s->f->rows->T, E = d->E, k = d->chosen, part = chunk(E, s->m->size);
    const int64_t first = least(s->m->me * part, E), end = least(first + part, E);
    for (int64_t t = 0; t < T; t++) {
        for (int64_t j = 0; j < k; j++) {
            const float *from = x->out + x->place[t * k + j] * E, score = x->scores[t * k + j];
            float *y = to + t * E;
            if (j)
                for (int64_t e = first; e < end; e++) y[e] += score * from[e];
            else
                for (int64_t e = first; e < end; e++) y[e] = score * from[e];
        }
        for (int64_t e = first; l->shared_gate && e < end; e++) to[t * E + e] += x->share[t] * x->shared[t * E + e];
    }
    meet(s->m);
}

// to [T, E] = norm(shared) + norm(to), for experts beside a feed-forward.
static void join(const state *s, const layer *l, float *to) {
    const int64_t T = s->f->rows->T, E = s->f->model->E;
    const float eps = (float)s->f->model->eps;
    for (int64_t t = s->m->me; t < T; t += s->m->size) {
        float *mixed = to + t * E, *shared = s->route.shared + t * E;
        normalise(mixed, l->norm_mixed, mixed, E, eps);
        normalise(shared, l->norm_shared, shared, E, eps);
        grow(mixed, shared, 0, E);
    }
    meet(s->m);
}

void feed_experts(state *s, const layer *l, float *to, int32_t *starts) {
    const int64_t T = s->f->rows->T, X = s->f->model->experts;
    const int beside = l->router_norm != 0;
    if (beside) { // what the experts read takes the place of what the feed-forward reads
        share_expert(s, l);
        normalise_all(s, l->router_norm);
    }
    rows x = prepared(s, &l->router, s->normed);
    share(s->m, &l->router, &x, T, s->route.logits, padded(X));
    meet(s->m);
    if (beside) normalise_all(s, l->norm_experts);
    for (int64_t t = s->m->me; t < T; t += s->m->size) {
        choose(s, l, t);
        if (l->shared_gate) choose_share(s, l, t);
    }
    meet(s->m);
    sort(s);
    if (starts && s->m->me == 0) memcpy(starts, s->route.starts, (X + 1) * 4);
    multiply(s, l, 0);
    multiply(s, l, 1);
    if (l->shared_gate) share_expert(s, l);
    weigh(s, l, to);
    if (beside) join(s, l, to);
}
