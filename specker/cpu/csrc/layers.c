// Whole decoder layers, in one call for a decoding step, a verify pass or a chunk of a prompt.
//
// With few rows, every thread keeps its own copy of the residual stream and rounds its own copy of each product's input,
// which costs less than a barrier. With many rows, the threads share one copy of each and divide the rows.
#include "kept.h"
#include "vector.h"
#include <math.h>

#define FEW 16384 // up to this many numbers in the rows, every thread processes all rows itself

static int64_t layout(const forward *f, int size, int me, char *base, state *s) {
    const stack *d = f->model;
    const int64_t T = f->rows->T, E = d->E, heads = d->heads, wide = d->entry ? 2 * E : E;
    int64_t N = 1, at = 0, most = wide > d->mixed ? wide : d->mixed;
    for (int64_t g = 0; g + 1 < f->group_count; g++)
        if (f->groups[g + 1] - f->groups[g] > N) N = f->groups[g + 1] - f->groups[g];
    most = most > d->F ? most : d->F;
    state r = {.f = f, .few = T == 1 || T * most <= FEW};
    const int64_t rows = (T < BLOCK_ROWS ? T : BLOCK_ROWS) * heads;
    const int64_t attention = 4 * attention_floats(rows, d->D), delta = delta_bytes(d, f->rows);
    const int64_t own = ((attention > delta ? attention : delta) + 63) / 64 * 64;
    const int64_t each = (T * (E + wide) * 4 + rows_bytes(T, most) + 191) / 64 * 64; // stream, normed, forms
#define TAKE(bytes) (base + (at = (at + 63) / 64 * 64, at += (bytes), at - (bytes)))
    char *private = TAKE(size * own), *copies = TAKE((r.few ? size : 1) * each);
    r.room = (float *)(private + me * own);
    r.stream = (float *)(copies + (r.few ? me * each : 0));
    r.normed = r.stream + T * E;
    r.forms = (char *)(r.normed + T * wide);
    r.divided = (float *)TAKE(4 * divided_floats(d, f->rows, N));
    r.qkv = (float *)TAKE(N * T * d->projected * 4);
    r.mixed = (float *)TAKE(N * T * d->mixed * 4);
    r.added = (float *)TAKE(N * T * E * 4);
    r.gate = (float *)TAKE(T * d->inner * 4);
    r.up = (float *)TAKE(T * d->inner * 4);
    char *mix = TAKE(routing_bytes(d, T, size, me, 0, 0));
    routing_bytes(d, T, size, me, mix, &r.route);
#undef TAKE
    if (s) *s = r;
    return at + 64;
}

int64_t forward_bytes(const forward *f, int size) { return layout(f, size, 0, 0, 0); }

// --- rows

// Normalise a head, unless `norm` is 0, and rotate it by `turn` [2, D] (kernels/kv_calibrate.py).
static void rotate(float *head, const float *norm, const float *turn, int64_t D, float eps) {
    if (norm) normalise(head, norm, head, D, eps);
    for (int64_t d = 0; d < D / 2; d++) {
        float low = head[d], high = head[D / 2 + d];
        head[d] = low * turn[d] + high * turn[D + d];
        head[D / 2 + d] = high * turn[D / 2 + d] + low * turn[D + D / 2 + d];
    }
}

// --- layers

// stream += norm(delta + bias), or delta + bias without a norm.
static void grow_all(const state *s, const float *delta, const float *bias, const float *norm) {
    const int64_t T = s->f->rows->T, E = s->f->model->E;
    for (int64_t t = s->few ? 0 : s->m->me; t < T; t += s->few ? 1 : s->m->size) {
        const float *from = delta + t * E;
        if (norm) {
            float *own = s->normed + t * E; // the next sublayer's input comes there later
            memcpy(own, from, E * 4);
            if (bias) grow(own, bias, 0, E);
            normalise(own, norm, own, E, (float)s->f->model->eps);
            from = own;
        }
        grow(s->stream + t * E, from, norm ? 0 : bias, E);
    }
}

// Sums x [T, E], plus a bias, over the ranks that hold the layers' other parts. Returns the bias that is yet to be added.
static const float *summed(const state *s, communicator *ranks, float *x, const float *bias) {
    if (!ranks) return bias;
    sum_ranks(s->m, ranks, x, bias, s->f->rows->T, s->f->model->E);
    return 0;
}

// Begins the stream. With an entry, the pairs' embeddings and features stand side by side in `normed`.
static void begin(const state *s) {
    const forward *f = s->f;
    const stack *d = f->model;
    const entry *in = d->entry;
    const int64_t T = f->rows->T, E = d->E, step = s->few ? 1 : s->m->size;
    for (int64_t t = s->few ? 0 : s->m->me; t < T; t += step) {
        float *stream = s->stream + t * E, *pair = s->normed + t * 2 * E;
        if (!in) {
            memcpy(stream, f->x + t * f->row, E * 4);
            continue;
        }
        normalise(f->x + t * f->row, in->embed_norm, pair, E, (float)d->eps);
        normalise(f->features + t * E, f->raw ? in->final_norm : 0, stream, E, (float)in->final_eps);
        normalise(stream, in->hidden_norm, pair + E, E, (float)d->eps);
        if (!in->residual) memcpy(stream, pair + E, E * 4);
    }
    if (in && in->fc) {
        rows x = prepared(s, in->fc, s->normed);
        share(s->m, in->fc, &x, T, s->added, E);
        meet(s->m);
        for (int64_t t = s->few ? 0 : s->m->me; t < T; t += step) {
            memset(s->stream + t * E, 0, E * 4);
            grow(s->stream + t * E, s->added + t * E, in->fc_bias, E);
        }
    }
}

// to [T, E] = the feed-forward of `normed`; asks for the matrix `then`, unless it is 0.
static void feed(const state *s, const layer *l, float *to, const matrix *then) {
    const int64_t T = s->f->rows->T, E = s->f->model->E, size = s->m->size;
    rows x = prepared(s, &l->gate_up, s->normed);
    gate_up(s, &l->gate_up, l->gate_up_bias, &x);
    ask(&l->down, s->m->me * chunk(E, 2 * size));
    meet(s->m);
    x = prepared(s, &l->down, s->gate);
    share(s->m, &l->down, &x, T, to, E);
    if (then) ask(then, s->m->me * chunk(then->O, 2 * size));
    meet(s->m);
}

// stream += norm(out(activation(gate(stream)) x)), where x are the numbers that layer `at` reads of each row's token.
static void feed_per_layer(const state *s, const layer *l, int64_t at, float *to) {
    const int64_t T = s->f->rows->T, E = s->f->model->E;
    rows x = prepared(s, &l->ple_gate, s->stream);
    gate_times(s, &l->ple_gate, &x, s->f->x + E + at * l->ple_gate.O, s->f->row);
    meet(s->m);
    x = prepared(s, &l->ple_out, s->gate);
    share(s->m, &l->ple_out, &x, T, to, E);
    meet(s->m);
    grow_all(s, to, 0, l->norm_ple);
}

static void scale_all(const state *s, float by) {
    const int64_t T = s->f->rows->T, E = s->f->model->E;
    for (int64_t t = s->few ? 0 : s->m->me; t < T; t += s->few ? 1 : s->m->size)
        for (int64_t e = 0; e < E; e++) s->stream[t * E + e] *= by;
}

// Adds the biases of qkv, and normalises q and k over all their heads.
static void normalise_whole(const state *s, int64_t first, int64_t N) {
    const stack *d = s->f->model;
    const int64_t T = s->f->rows->T, Q = d->Hq * d->D, K = d->Hkv * d->D;
    for (int64_t i = s->m->me; i < N * T; i += s->m->size) {
        const layer *l = d->layers + first + i / T;
        float *q = qkv_of(s, i / T) + i % T * row_of(l);
        if (l->recurrent) continue;
        if (l->qkv_bias) grow(q, l->qkv_bias, 0, l->qkv.O);
        normalise(q, l->q_norm, q, Q, (float)d->eps);
        normalise(q + Q, l->k_norm, q + Q, K, (float)d->eps);
    }
    meet(s->m);
}

// Writes a head of V to the cache; `head` may change.
static void keep_value(const state *s, const layer *l, int64_t format, float *head, uint8_t *to) {
    if (l->v_norm) normalise(head, l->v_norm, head, l->D, (float)s->f->model->eps);
    keep_head(format, 0, head, to, l->D);
}

// Rotates queries and keys, and writes keys and values to the cache.
static void place(const state *s, int64_t first, int64_t N) {
    const stack *d = s->f->model;
    const places *p = s->f->rows;
    const int64_t T = p->T, H = d->Hq + 2 * d->Hkv, gates = d->gated ? d->Hq : 0;
    for (int64_t i = s->m->me; i < N * T * H; i += s->m->size) {
        const int64_t n = i / (T * H), t = i / H % T, h = i % H;
        const layer *l = d->layers + first + n;
        const int64_t D = l->D, k = h - d->Hq, v = l->projects == K_AND_V ? k - l->Hkv : -1;
        if (l->recurrent || k >= (2 - l->projects) * l->Hkv) continue;
        const pool kv = pool_of(p, d, first + n);
        const int64_t to = kv.slots[t] * l->Hkv;
        float *head = qkv_of(s, n) + t * row_of(l) + (gates + h) * D;
        const float *turn = l->rope + p->positions[t] * 2 * D;
        if (l->qkv_bias && !d->whole) grow(head, l->qkv_bias + (gates + h) * D, 0, D);
        if (k >= 0 && l->projects == K_ALONE) {
            memcpy(s->room, head, D * 4);
            keep_value(s, l, kv.format, s->room, kv.v + (to + k) * kv.head);
        }
        if (v < 0) rotate(head, d->whole ? 0 : k < 0 ? l->q_norm : l->k_norm, turn, D, (float)d->eps);
        if (v >= 0)
            keep_value(s, l, kv.format, head, kv.v + (to + v) * kv.head);
        else if (k >= 0)
            keep_head(kv.format, 1, head, kv.k + (to + k) * kv.head, D);
    }
}

// qkv -> mixed, of N layers from `first` on.
static void mix(const state *s, int64_t first, int64_t N) {
    const layer *l = s->f->model->layers + first;
    int64_t recurrent = 0;
    for (int64_t n = 0; n < N; n++) recurrent += l[n].recurrent;
    if (recurrent < N) place(s, first, N);
    if (recurrent) convolve_all(s, first, N);
    ask(&l->o, s->m->me * chunk(s->f->model->E, 2 * s->m->size));
    meet(s->m);
    if (recurrent < N) {
        attend_all(s, first, N);
        meet(s->m);
    }
    if (recurrent && s->f->model->mix.kind == DELTA) {
        delta_all(s, first, N);
        meet(s->m);
    }
}

static void keep(const state *s, float *out, const float *norm) {
    const int64_t T = s->f->rows->T, E = s->f->model->E;
    if (s->few && s->m->me) return;
    for (int64_t t = s->few ? 0 : s->m->me; t < T; t += s->few ? 1 : s->m->size)
        normalise(s->stream + t * E, norm, out + t * E, E, (float)s->f->model->eps);
}

void run_forward(const member *m, const forward *f, char *scratch) {
    state state_, *s = &state_;
    layout(f, m->size, m->me, scratch, s);
    s->m = m;
    const stack *d = f->model;
    const int64_t T = f->rows->T, E = d->E;
    const int joined = d->entry && !d->entry->fc; // the first layer reads the pairs
    int32_t *routed = f->routed;
    begin(s);
    for (int64_t g = 0; g + 1 < f->group_count; g++) {
        const int64_t first = f->groups[g], N = f->groups[g + 1] - first;
        const layer *l = d->layers + first;
        for (int64_t i = 0; i < f->aux_count; i++)
            if (f->aux_layers[i] == first) keep(s, f->out + (1 + i) * T * E, 0);
        communicator *beside = N > 1 ? d->beside : 0;
        const int64_t own = beside ? part_of(beside, beside->rank, N) : 0; // the layers that attend here, and how many
        const int64_t count = beside ? part_of(beside, beside->rank + 1, N) - own : N;
        for (int64_t n = 0; n < count; n++) {
            const layer *a = l + own + n;
            if (!joined || first + n) normalise_all(s, a->norm_in);
            rows x = prepared(s, &a->qkv, s->normed);
            share(m, &a->qkv, &x, T, qkv_of(s, n), row_of(a));
            meet(m);
            if (a->gates.O) {
                x = prepared(s, &a->gates, s->normed);
                share(m, &a->gates, &x, T, qkv_of(s, n) + a->qkv.O, row_of(a));
                meet(m);
            }
        }
        if (d->whole) normalise_whole(s, first + own, count);
        if (count) mix(s, first + own, count);
        for (int64_t n = 0; n < count; n++) {
            const layer *a = l + own + n;
            rows x = prepared(s, &a->o, mixed_of(s, n));
            share(m, &a->o, &x, T, s->added + (own + n) * T * E, E);
            if (a->router.O)
                ask(&a->router, m->me * chunk(d->experts, 2 * m->size));
            else
                ask(&a->gate_up, m->me * chunk(a->down.E, 2 * m->size));
            meet(m);
        }
        if (beside) share_parts(m, beside, s->added, N, T * E);
        const int together = d->mixing && !l->o_bias; // one sum for all layers of the group
        if (together) sum_ranks(m, d->mixing, s->added, 0, N * T, E);
        for (int64_t n = 0; n < N; n++) {
            float *added = s->added + n * T * E;
            grow_all(s, added, summed(s, together ? 0 : d->mixing, added, l[n].o_bias), l[n].norm_o);
            normalise_all(s, l[n].norm_post);
            if (l[n].router.O) {
                feed_experts(s, l + n, added, routed);
                routed += routed ? d->experts + 1 : 0;
            } else {
                feed(s, l + n, added, first + n + 1 < f->groups[f->group_count - 1] ? &l[n + 1].qkv : 0);
            }
            grow_all(s, added, summed(s, d->ranks, added, l[n].router.O ? 0 : l[n].down_bias), l[n].norm_down);
            if (l[n].ple_gate.O) feed_per_layer(s, l + n, first + n, added);
            if (l[n].scalar) scale_all(s, *l[n].scalar);
        }
    }
    keep(s, f->out, d->entry ? d->entry->norm_out : 0);
    for (int64_t i = 0; i < f->aux_count; i++)
        if (f->aux_layers[i] == f->groups[f->group_count - 1]) keep(s, f->out + (1 + i) * T * E, 0);
}
