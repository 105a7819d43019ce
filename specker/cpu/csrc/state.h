// What one call of `run_forward` works on; each thread has a copy.
#pragma once
#include "layers.h"

#define BLOCK_ROWS 16 // rows of a sequence that attend together

typedef struct {
    const member *m;
    const forward *f;
    int few;
    int64_t wide;  // the longest sequence, rounded up to 16
    float *stream; // [T, E]
    float *normed; // [T, E], with an entry [T, 2 E]
    char *forms;   // rounded copies of a product's rows
    float *room;   // attention's work space
    float *qkv;    // [N, T, (Hq + 2 Hkv) D]
    float *mixed;  // [N, T, Hq D]
    float *added;  // [N, T, E]
    float *gate, *up; // [T, F]
} state;

// The pool of layer `at`, whose k and v begin with that layer.
static inline pool pool_of(const places *p, const stack *d, int64_t at) {
    const layer *l = d->layers + at;
    const int64_t n = p->near.slots ? l->rank : at;
    pool kv = p->near.slots && l->reach ? p->near : p->all;
    kv.k += n * kv.stride, kv.v += n * kv.stride;
    return kv;
}

void attend_all(const state *s, int64_t first, int64_t N); // of N layers from `first` on: qkv -> mixed
