// The feed-forward's gate, and its activations, which are within a few units in the last place of z.
#include "state.h"
#include "vector.h"
#include <math.h>

// z up sigmoid(x)
INLINE vf swish(vf z, vf up, vf x) {
    vf e = power(-largest(x, -x)), one = splat(1);
    vi positive = x >= splat(0);
    vf top = (vf)(((vi)one & positive) | ((vi)e & ~positive));
    return z * up * top / (one + e);
}

// gelu(z) = max(z, 0) - |z| Phi(-|z|), where Phi(-a) = exp(-a a / 2) t p(t) with t = 4 / (4 + a). p is a minimax fit for a
// up to 14, within 1e-8; beyond, the exponential is 0.
INLINE vf gelu(vf z) {
    vf a = largest(z, -z), t = splat(4) / (a + 4.0f), p = splat(1.65803223e-02f);
    p = fma_(p, t, splat(-6.27956990e-02f));
    p = fma_(p, t, splat(5.16603633e-02f));
    p = fma_(p, t, splat(2.84256350e-02f));
    p = fma_(p, t, splat(1.27198548e-02f));
    p = fma_(p, t, splat(8.66528718e-02f));
    p = fma_(p, t, splat(7.20006999e-02f));
    p = fma_(p, t, splat(9.55154703e-02f));
    p = fma_(p, t, splat(9.94925832e-02f));
    p = fma_(p, t, splat(9.97479024e-02f));
    return largest(z, splat(0)) - a * (t * p * power(a * a * -0.5f));
}

// x, but not above `most`; a NaN stays one.
INLINE vf atmost(vf x, float most) {
    vi over = x > splat(most);
    return (vf)(((vi)splat(most) & over) | ((vi)x & ~over));
}

INLINE void each(int activation, float *gate, const float *up, int64_t count) {
    const float twice = 1.5957691216f; // 2 sqrt(2 / pi): 1 + tanh(x) = 2 sigmoid(2 x)
    for (int64_t i = 0; i < count; i += LANES) {
        vf z = load(gate + i), u = load(up + i);
        if (activation == SILU)
            store(gate + i, swish(z, u, z));
        else if (activation == GELU_TANH)
            store(gate + i, swish(z, u, z * fma_(z * z, splat(twice * 0.044715f), splat(twice))));
        else if (activation == CLAMPED_SILU) {
            z = atmost(z, 7.0f), u = -atmost(-atmost(u, 7.0f), 7.0f);
            store(gate + i, swish(z, splat(1), z * 1.702f) * (u + 1.0f));
        } else
            store(gate + i, gelu(z) * u);
    }
}

// gate = activation(gate) up, for `count` numbers, a multiple of 16.
void gated(int64_t activation, float *gate, const float *up, int64_t count) {
    switch (activation) {
    case SILU: each(SILU, gate, up, count); break;
    case GELU_TANH: each(GELU_TANH, gate, up, count); break;
    case CLAMPED_SILU: each(CLAMPED_SILU, gate, up, count); break;
    default: each(GELU, gate, up, count);
    }
}

void soften(float *x, float scale, float cap, int64_t count) {
    const float by = scale / cap;
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        vf z = load(x + i) * by, e = power(largest(z, -z) * -2.0f), one = splat(1), t = (one - e) / (one + e) * cap;
        vi positive = z >= splat(0);
        store(x + i, (vf)(((vi)t & positive) | ((vi)-t & ~positive)));
    }
    for (; i < count; i++) x[i] = cap * tanhf(x[i] * by);
}

void weigh_silu(float *x, int64_t count) {
    for (int64_t i = 0; i < count; i += LANES) store(x + i, swish(load(x + i), splat(1), load(x + i)));
}

void weigh_sigmoid(float *x, const float *gate, int64_t count) {
    for (int64_t i = 0; i < count; i += LANES) store(x + i, swish(load(x + i), splat(1), load(gate + i)));
}

void gate_times(const state *s, const matrix *w, const rows *x, const float *by, int64_t row) {
    const int64_t P = w->O, part = chunk(P, s->m->size), i = s->m->me * part, n = part < P - i ? part : P - i;
    if (i >= P) return;
    product(w, x, s->f->rows->T, i, n, s->gate + i, P);
    for (int64_t t = 0; t < s->f->rows->T; t++) gated(s->f->model->activation, s->gate + t * P + i, by + t * row + i, n);
}

void gate_up(const state *s, const matrix *w, const float *bias, const rows *x) {
    const int64_t T = s->f->rows->T, F = w->O / 2, size = s->m->size;
    const int64_t most = chunk(F, 2 * size), part = chunk(F, 16 * size);
    int64_t i = s->m->me * most, count = most;
    while (i < F) {
        const int64_t then = size * most + next(s->m) * part, n = count < F - i ? count : F - i;
        ask(w, F + i);
        product(w, x, T, i, n, s->gate + i, F);
        ask(w, then);
        product(w, x, T, F + i, n, s->up + i, F);
        for (int64_t t = 0; t < T; t++) {
            float *a = s->gate + t * F + i, *b = s->up + t * F + i;
            if (bias) grow(a, bias + i, 0, n), grow(b, bias + F + i, 0, n);
            gated(s->f->model->activation, a, b, n);
        }
        i = then, count = part;
    }
}
