// What one call of `run_forward` works on; each thread has a copy.
#pragma once
#include "layers.h"

#define BLOCK_ROWS 16 // rows of a sequence that attend together

typedef struct { // the choices of T rows, k each of X experts; from `order` on a thread has its own
    float *logits;    // [T, X], its rows padded to a multiple of 16
    int32_t *experts; // [T, k]
    float *scores;    // [T, k]
    float *out;       // [T k, E], by expert
    float *share;     // [T], the factor of the shared expert's output
    float *shared;    // [T, E], its output
    int32_t *order;   // [T k], choices t k + j by expert
    int32_t *place;   // [T k], where a choice stands in `order`
    int32_t *starts;  // [X + 1], where an expert's choices begin
    int32_t *active;  // [count], experts that have any
    float *ranks;     // [X], by which a row chooses
    float *x;         // rows of one expert
    char *forms;      // their rounded copies
    int64_t count;
} routing;

typedef struct {
    const member *m;
    const forward *f;
    int few;
    float *stream; // [T, E]
    float *normed; // [T, E], with an entry [T, 2 E]
    char *forms;   // rounded copies of a product's rows
    float *room;   // attention's work space
    float *divided; // what rows have summed over parts of their columns, for all threads
    float *qkv;    // [N, T, `row_of`], N layers `stack.projected` T apart
    float *mixed;  // [N, T, o.E], N layers `stack.mixed` T apart
    float *added;  // [N, T, E]
    float *gate, *up; // [T, F], of experts [T k, F]
    routing route;
} state;

// Floats between the rows of a layer's qkv.
static inline int64_t row_of(const layer *l) { return (l->qkv.O + l->gates.O + 15) / 16 * 16; }

static inline float *qkv_of(const state *s, int64_t n) { return s->qkv + n * s->f->rows->T * s->f->model->projected; }
static inline float *mixed_of(const state *s, int64_t n) { return s->mixed + n * s->f->rows->T * s->f->model->mixed; }

// The pool of layer `at`, whose k and v begin with that layer.
static inline pool pool_of(const places *p, const stack *d, int64_t at) {
    const layer *l = d->layers + at;
    const int64_t n = p->near.slots || d->mix.kind ? l->rank : l->place;
    pool kv = p->near.slots && l->sliding_window ? p->near : p->all;
    kv.k += n * kv.stride, kv.v += n * kv.stride;
    return kv;
}

// normed = norm(stream), of this thread's rows, or of all if they are few.
static inline void normalise_all(const state *s, const float *weight) {
    const int64_t T = s->f->rows->T, E = s->f->model->E;
    for (int64_t t = s->few ? 0 : s->m->me; t < T; t += s->few ? 1 : s->m->size)
        normalise(s->stream + t * E, weight, s->normed + t * E, E, (float)s->f->model->eps);
}

// x [T, m->E] rounded for m, by all threads.
static inline rows prepared(const state *s, const matrix *m, const float *x) {
    const int64_t T = s->f->rows->T;
    rows r = rows_at(x, m->E, s->forms, T, m->E);
    for (int64_t t = s->few ? 0 : s->m->me; t < T; t += s->few ? 1 : s->m->size) round_row(m, &r, t);
    if (!s->few) meet(s->m);
    return r;
}

// Of N layers from `first` on, qkv -> mixed: of those that attend, of the convolutions, and of the gated delta nets after
// them. A convolution ends in qkv if a gated delta net follows.
int64_t attention_floats(int64_t rows, int64_t D);                          // a thread's work space of up to so many rows
int64_t divided_floats(const stack *d, const places *p, int64_t N); // that all share
void attend_all(const state *s, int64_t first, int64_t N);
void convolve_all(const state *s, int64_t first, int64_t N);
void delta_all(const state *s, int64_t first, int64_t N);
int64_t delta_bytes(const stack *d, const places *p); // a thread's work space

// Memory of the experts of a pass; sets `to` for thread `me`, unless it is 0.
int64_t routing_bytes(const stack *d, int64_t T, int size, int me, char *base, routing *to);
// gate [T, P] = activation(w x) by, for w [P, E]; `by` has `row` numbers from a row to the next.
void gate_times(const state *s, const matrix *w, const rows *x, const float *by, int64_t row);
// gate = activation(gate(x)) up(x) for w [2 F, E], the gate's rows, then those of up, and its bias [2 F] or 0.
void gate_up(const state *s, const matrix *w, const float *bias, const rows *x);
// to [T, E] = the layer's experts over `normed`. Also writes where each expert's choices begin, unless `starts` is 0.
void feed_experts(state *s, const layer *l, float *to, int32_t *starts);
