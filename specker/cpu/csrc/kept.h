// K and V in the formats of `enum kept`: heads that are written, and the products of queries with them.
#pragma once
#include "state.h"

// Query rows in the form that a format multiplies K with: rounded to bfloat16, or rotated and rounded to eight bits.
typedef struct {
    const float *x; // [T, D]
    uint16_t *h;    // [T, D]
    int8_t *q;      // [T, padded D]
    float *scale, *sum; // [T]; sum: of q
} queries;

void keep_head(int64_t format, int key, float *x, uint8_t *to, int64_t D); // x is overwritten; `key`: it is K's
int64_t queries_bytes(int64_t T, int64_t D); // memory for `prepare`
queries prepare(int64_t format, float *x, void *memory, int64_t T, int64_t D);
// y[t, r] = query row t times K of R columns, `row_k` bytes apart. Prefetches the bytes `ahead` of those of K.
void dot_keys(const pool *kv, const uint8_t *k, int64_t row_k, const queries *x, int64_t R, int64_t T, int64_t D, float *y,
              int64_t row_y, int64_t ahead);

// The scale of a head of KEPT_INT8.
static inline float scale_of(const uint8_t *head, int64_t D) {
    float x;
    __builtin_memcpy(&x, head + D, 4);
    return x;
}
