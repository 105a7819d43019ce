// The target's own tokens: kernels/sample.py defines them. Each row is one thread's work and independent of the others.
#include "noise.h"
#include "team.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define BINS 2048
#define LINEAR 1024 // bins of 1/64 nat cover 16 nats below the largest logit; then 64 bins for each factor of two
#define STEP 256    // ids whose noise is computed at a time

typedef struct {
    const float *logits; // [T, V]
    const int64_t *positions;
    const double *temperature, *top_p; // of each run of rows
    const int64_t *top_k;              // 0: all
    const uint64_t *seed;
    int64_t T, V, run; // rows that share these numbers
    int64_t *tokens;   // [T]
} sample_call;

typedef struct {
    int64_t count[BINS];
    double mass[BINS];
    float some[]; // [V], the logits of one bin
} tally;

static int64_t tally_bytes(int64_t V) { return ((int64_t)sizeof(tally) + V * 4 + 63) / 64 * 64; }

static int bin(float below) {
    const float x = below * 64.0f, edge = LINEAR;
    int32_t a, b;
    if (x < edge) return (int)x;
    memcpy(&a, &x, 4), memcpy(&b, &edge, 4);
    const int far = LINEAR + ((a - b) >> 17);
    return far < BINS ? far : BINS - 1;
}

// How far z lies below the largest. A NaN, which only a row that nobody reads has, lies lowest.
static float under(float z, float top) { return z == top ? 0 : z == z ? top - z : INFINITY; }

static int descending(const void *a, const void *b) {
    const float x = *(const float *)a, y = *(const float *)b;
    return (x < y) - (x > y);
}

// The logits of one bin that are at least `least`, in descending order.
static int64_t sorted_bin(const float *z, int64_t V, float top, int at, float least, float *out) {
    int64_t n = 0;
    for (int64_t i = 0; i < V; i++)
        if (z[i] >= least && bin(under(z[i], top)) == at) out[n++] = z[i];
    qsort(out, n, 4, descending);
    return n;
}

// The smallest of z [V] that top_k and then top_p keep.
static float least_kept(const float *z, int64_t V, float top, int64_t top_k, double top_p, tally *t) {
    float least = -INFINITY;
    if (top_k > 0 && top_k < V) {
        memset(t->count, 0, sizeof t->count);
        for (int64_t i = 0; i < V; i++) t->count[bin(under(z[i], top))]++;
        int at = 0;
        int64_t before = 0;
        while (before + t->count[at] < top_k) before += t->count[at++];
        const int64_t n = sorted_bin(z, V, top, at, least, t->some), i = top_k - before - 1;
        if (i < n) least = t->some[i]; // otherwise only NaN are left
    }
    if (top_p >= 1) return least;
    double whole = 0, reached = 0;
    memset(t->mass, 0, sizeof t->mass);
    for (int64_t i = 0; i < V; i++)
        if (z[i] >= least) {
            const float below = under(z[i], top);
            t->mass[bin(below)] += expf(-below);
        }
    for (int at = 0; at < BINS; at++) whole += t->mass[at];
    int at = 0;
    while (at < BINS - 1 && reached + t->mass[at] < top_p * whole) reached += t->mass[at++];
    const int64_t n = sorted_bin(z, V, top, at, least, t->some);
    for (int64_t i = 0; i < n; i++) {
        reached += expf(-under(t->some[i], top));
        if (reached >= top_p * whole) return t->some[i];
    }
    return n ? t->some[n - 1] : least; // rounding
}

static int64_t token(const sample_call *c, int64_t t, float *z, tally *room) {
    const int64_t V = c->V, run = t / c->run, k = c->top_k[run];
    const float *logits = c->logits + t * V, by = (float)c->temperature[run];
    const double p = c->top_p[run];
    float best = -INFINITY, noise[STEP];
    int64_t id = 0;
    if (by == 0) {
        for (int64_t i = 0; i < V; i++)
            if (logits[i] > best) best = logits[i], id = i;
        return id;
    }
    for (int64_t i = 0; i < V; i++) z[i] = logits[i] / by;
    if (p < 1 || (k > 0 && k < V)) {
        int64_t ids[STEP];
        float top = -INFINITY;
        for (int64_t i = 0; i < V; i++) top = z[i] > top ? z[i] : top;
        const float least = least_kept(z, V, top, k, p, room);
        for (int64_t i = 0, n = 0; i < V || n; n = 0) {
            for (; i < V && n < STEP; i++)
                if (z[i] >= least) ids[n++] = i;
            gumbel_ids(c->seed[run], c->positions[t], ids, n, noise);
            for (int64_t j = 0; j < n; j++)
                if (z[ids[j]] + noise[j] > best) best = z[ids[j]] + noise[j], id = ids[j];
        }
        return id;
    }
    for (int64_t i = 0; i < V; i += STEP) {
        const int64_t n = V - i < STEP ? V - i : STEP;
        float top = -INFINITY;
        gumbel_run(c->seed[run], c->positions[t], i / 4, (n + 3) / 4, noise);
        for (int64_t j = 0; j < n; j++) noise[j] += z[i + j];
        for (int64_t j = 0; j < n; j++) top = noise[j] > top ? noise[j] : top;
        if (top > best)
            for (int64_t j = 0; j < n; j++)
                if (noise[j] > best) best = noise[j], id = i + j;
    }
    return id;
}

static int64_t row_bytes(int64_t V) { return (V * 4 + 63) / 64 * 64 + tally_bytes(V); }

static void run_sample(const member *m, void *arg) {
    const sample_call *c = arg;
    float *z = (float *)(m->scratch + m->me * row_bytes(c->V));
    tally *room = (tally *)(m->scratch + m->me * row_bytes(c->V) + (c->V * 4 + 63) / 64 * 64);
    for (int64_t t = next(m); t < c->T; t = next(m)) c->tokens[t] = token(c, t, z, room);
}

int sample(team *t, sample_call *c, int size) { return team_run(t, run_sample, c, size * row_bytes(c->V)); }
