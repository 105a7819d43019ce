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

void attend_all(const state *s, int64_t first, int64_t N); // of N layers from `first` on: qkv -> mixed
