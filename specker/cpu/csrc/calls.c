// The functions that Python calls. Their arguments are plain numbers, addresses, structs and the team.
#include "layers.h"
#include "noise.h"

typedef struct {
    const matrix *m;
    const float *x, *norm; // [T, E]; the weight [E] of an RMSNorm before the product, or 0
    float *y;              // [T, O]
    int64_t T;
    double eps;
} product_call;

// Rows per pass: a thread's rounded copies of them stay in its cache.
#define AT_ONCE 512

static void run_product(const member *m, void *arg) {
    const product_call *c = arg;
    const matrix *w = c->m;
    char *forms = m->scratch + (c->norm ? AT_ONCE * w->E * 4 : 0);
    for (int64_t t0 = 0; t0 < c->T; t0 += AT_ONCE) {
        const int64_t T = c->T - t0 < AT_ONCE ? c->T - t0 : AT_ONCE;
        const float *x = c->x + t0 * w->E;
        float *normed = (float *)m->scratch;
        rows r = rows_at(c->norm ? normed : x, w->E, forms, T, w->E);
        for (int64_t t = m->me; t < T; t += m->size) {
            if (c->norm) normalise(x + t * w->E, c->norm, normed + t * w->E, w->E, (float)c->eps);
            round_row(w, &r, t);
        }
        meet(m);
        share(m, w, &r, T, c->y + t0 * w->O, w->O);
        meet(m);
    }
}

int product_of(team *t, product_call *c) {
    const int64_t T = c->T < AT_ONCE ? c->T : AT_ONCE;
    return team_run(t, run_product, c, (c->norm ? AT_ONCE * c->m->E * 4 : 0) + rows_bytes(T, c->m->E));
}

typedef struct {
    const matrix *m;
    const int64_t *ids; // 0: rows 0 .. count - 1
    int64_t count;
    float *y; // [count, E]
} restore_call;

static void run_restore(const member *m, void *arg) {
    const restore_call *c = arg;
    for (int64_t i = next(m) * 16; i < c->count; i = next(m) * 16)
        for (int64_t n = i; n < c->count && n < i + 16; n++) restore_row(c->m, c->ids ? c->ids[n] : n, c->y + n * c->m->E);
}

// The calling thread restores a few rows alone.
int restore(team *t, restore_call *c) {
    if (c->count > 8) return team_run(t, run_restore, c, 0);
    for (int64_t n = 0; n < c->count; n++) restore_row(c->m, c->ids ? c->ids[n] : n, c->y + n * c->m->E);
    return 1;
}

static void run_layers(const member *m, void *arg) { run_forward(m, arg, m->scratch); }

// Returns -1, and has written nothing, if a number points outside of what it is an index into.
int layers(team *t, forward *f, int size) {
    return forward_fits(f) ? team_run(t, run_layers, f, forward_bytes(f, size)) : -1;
}

// The noise of ids 0 .. 4 blocks - 1 at each of T positions: out [T, 4 blocks]. Runs in the calling thread.
void gumbel(uint64_t seed, const int64_t *positions, int64_t T, int64_t blocks, float *out) {
    for (int64_t t = 0; t < T; t++) gumbel_run(seed, positions[t], 0, blocks, out + t * blocks * 4);
}

int64_t bytes_of(int64_t format, int64_t rows, int64_t E) { return segment_bytes(format, rows, E); }
