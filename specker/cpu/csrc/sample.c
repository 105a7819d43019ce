// The target's own tokens: kernels/sample_rows.py defines them. Each row is one thread's work and independent of the others.
#include "noise.h"
#include "team.h"
#include "vector.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define BINS 2048
#define LINEAR 1024 // bins of 1/64 nat cover 16 nats below the largest logit; then 64 bins for each factor of two
#define STEP 256    // ids whose noise is computed at a time
#define NEAR 16.0f  // a filter nearly always keeps only logits within this many nats of the largest
#define RARE 23.0f  // more than any noise, which is at most 33 ln 2

typedef struct {
    const float *logits; // [T, V]
    const int64_t *positions;
    const double *temperature, *top_p; // for each run of rows
    const int64_t *top_k;              // 0: all
    const uint64_t *seed;
    int64_t T, V, run; // run: rows that share these numbers
    int64_t *tokens;   // [T]
} sample_call;

typedef struct {
    int64_t count[BINS];
    double mass[BINS];
    float some[]; // [2 V]: the logits of one bin, and the ones that are near the largest
} tally;

static int64_t tally_bytes(int64_t V) { return ((int64_t)sizeof(tally) + 2 * V * 4 + 63) / 64 * 64; }

static int bin(float below) {
    const float x = below * 64.0f, edge = LINEAR;
    int32_t a, b;
    if (x < edge) return (int)x;
    memcpy(&a, &x, 4), memcpy(&b, &edge, 4);
    const int far = LINEAR + ((a - b) >> 17);
    return far < BINS ? far : BINS - 1;
}

// How far z lies below the largest. A NaN, which only unused rows have, counts as the lowest.
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

// The first id of the largest of z [V].
static int64_t first_of_highest(const float *z, int64_t V, float *top) {
    int64_t where = 0, end;
    *top = -INFINITY;
    for (int64_t i = 0; i < V; i += STEP) {
        const float here = highest_of(z + i, V - i < STEP ? V - i : STEP);
        if (here > *top) *top = here, where = i;
    }
    for (end = where + STEP < V ? where + STEP : V; where < end; where++)
        if (z[where] == *top) return where;
    return 0;
}

// The sum of exp(z - top) over the z [V] that are at least `least`.
static double mass_of(const float *z, int64_t V, float top, float least) {
    double sum = 0;
    int64_t i = 0;
    for (int64_t end; i + LANES <= V; i = end) {
        vf some = splat(0);
        for (end = i; end + LANES <= V && end < i + 64 * LANES; end += LANES) {
            vf x = load(z + end);
            vi kept = x >= splat(least), same = x == splat(top); // the latter also if both are infinite
            some += (vf)((vi)power((vf)((vi)(x - top) & ~same)) & kept);
        }
        sum += total(some);
    }
    for (; i < V; i++)
        if (z[i] >= least) sum += expf(-under(z[i], top));
    return sum;
}

// Copies the logits that are at least `least`, in order.
static int64_t copied(const float *z, int64_t V, float least, float *out) {
    int64_t n = 0, i = 0;
    for (; i + LANES <= V; i += LANES)
        for (unsigned m = at_least(load(z + i), least); m; m &= m - 1) out[n++] = z[i + __builtin_ctz(m)];
    for (; i < V; i++)
        if (z[i] >= least) out[n++] = z[i];
    return n;
}

// The smallest of z [V] that top_k and then top_p keep.
static float least_kept(const float *z, int64_t V, float top, int64_t top_k, double top_p, tally *t) {
    const int some_only = top_k > 0 && top_k < V;
    float least = -INFINITY, *near = t->some + V;
    int64_t n = copied(z, V, top - NEAR, near);
    if (some_only) {
        if (n < top_k) memcpy(near, z, V * 4), n = V;
        memset(t->count, 0, sizeof t->count);
        for (int64_t i = 0; i < n; i++) t->count[bin(under(near[i], top))]++;
        int at = 0;
        int64_t before = 0;
        while (before + t->count[at] < top_k) before += t->count[at++];
        const int64_t count = sorted_bin(near, n, top, at, least, t->some), i = top_k - before - 1;
        if (i < count) least = t->some[i]; // otherwise only NaNs are left
    }
    if (top_p >= 1) return least;
    double reached = 0;
    const double enough = top_p * (some_only ? mass_of(near, n, top, least) : mass_of(z, V, top, least));
    if (!some_only && mass_of(near, n, top, least) < enough) memcpy(near, z, V * 4), n = V;
    memset(t->mass, 0, sizeof t->mass);
    for (int64_t i = 0; i < n; i++)
        if (near[i] >= least) {
            const float below = under(near[i], top);
            t->mass[bin(below)] += expf(-below);
        }
    int at = 0;
    while (at < BINS - 1 && reached + t->mass[at] < enough) reached += t->mass[at++];
    const int64_t count = sorted_bin(near, n, top, at, least, t->some);
    for (int64_t i = 0; i < count; i++) {
        reached += expf(-under(t->some[i], top));
        if (reached >= enough) return t->some[i];
    }
    return count ? t->some[count - 1] : least; // rounding kept the sum below `enough`
}

// The noise of ascending ids [n]. If they lie close together, computing all ids between them is cheaper.
static void noise_of(uint64_t seed, int64_t position, const int64_t *ids, int64_t n, float *noise) {
    float run[2 * STEP];
    const int64_t first = ids[0] / 4, blocks = ids[n - 1] / 4 - first + 1;
    if (4 * blocks > 2 * n || 4 * blocks > 2 * STEP) {
        gumbel_ids(seed, position, ids, n, noise);
        return;
    }
    gumbel_run(seed, position, first, blocks, run);
    for (int64_t j = 0; j < n; j++) noise[j] = run[ids[j] - 4 * first];
}

// The id of the largest z + noise among the z [V] that are at least `least`, the lowest of equal ones; `at`: the first
// id of the largest z. Noise is bounded, so most ids need none.
static int64_t noisiest(const float *z, int64_t V, int64_t at, float least, uint64_t seed, int64_t position) {
    int64_t ids[STEP + LANES], id = at, i = 0;
    float noise[STEP + LANES], best;
    gumbel_ids(seed, position, &at, 1, noise);
    best = z[at] + noise[0];
    while (i < V) {
        const float bound = best - RARE > least ? best - RARE : least;
        int64_t n = 0;
        for (; i + LANES <= V && n < STEP; i += LANES)
            for (unsigned m = at_least(load(z + i), bound); m; m &= m - 1) ids[n++] = i + __builtin_ctz(m);
        if (i + LANES > V)
            for (; i < V && n < STEP; i++)
                if (z[i] >= bound) ids[n++] = i;
        for (int64_t j = 0; j < n; j += STEP) {
            const int64_t count = n - j < STEP ? n - j : STEP;
            noise_of(seed, position, ids + j, count, noise + j);
        }
        for (int64_t j = 0; j < n; j++) {
            const float sum = z[ids[j]] + noise[j];
            if (sum > best || (sum == best && ids[j] < id)) best = sum, id = ids[j];
        }
    }
    return id;
}

static int64_t token(const sample_call *c, int64_t t, float *z, tally *room) {
    const int64_t V = c->V, run = t / c->run, k = c->top_k[run];
    const float *logits = c->logits + t * V, by = (float)c->temperature[run];
    const double p = c->top_p[run];
    float top;
    if (by == 0) return first_of_highest(logits, V, &top);
    for (int64_t i = 0; i < V; i++) z[i] = logits[i] / by;
    const int64_t at = first_of_highest(z, V, &top);
    if (top == -INFINITY) return 0; // all logits are -infinity or NaN
    const float least = p < 1 || (k > 0 && k < V) ? least_kept(z, V, top, k, p, room) : -INFINITY;
    return noisiest(z, V, at, least, c->seed[run], c->positions[t]);
}

static int64_t row_bytes(int64_t V) { return (V * 4 + 63) / 64 * 64 + tally_bytes(V); }

static void run_sample(const member *m, void *arg) {
    const sample_call *c = arg;
    float *z = (float *)(m->scratch + m->me * row_bytes(c->V));
    tally *room = (tally *)(m->scratch + m->me * row_bytes(c->V) + (c->V * 4 + 63) / 64 * 64);
    for (int64_t t = next(m); t < c->T; t = next(m)) c->tokens[t] = token(c, t, z, room);
}

int sample(team *t, sample_call *c, int size) { return team_run(t, run_sample, c, size * row_bytes(c->V)); }
