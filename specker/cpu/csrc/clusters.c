// The best tokens of an LM head over clusters of ids: products with the centroids, then with the rows of each row's best
// clusters. A cluster of a row is one thread's work, so a row's bits depend on no other row.
#include "layers.h"
#include "noise.h"
#include "vector.h"
#include <math.h>

typedef struct {
    const matrix *weight, *centroids; // [C R, E], float32 or bfloat16, ordered by cluster, and [C, E]
    const float *x, *norm;            // [T, E]; the weight [E] of an RMSNorm before the products, or 0
    const int64_t *ids;               // [C, R]
    const int64_t *positions;         // [T]; not read for greedy rows
    const double *temperature;        // for each run of rows; 0: greedy
    const uint64_t *seed;             // for each run of rows
    int64_t T, chosen, k, run;        // chosen: clusters that a row reads; run: rows that share these numbers
    double eps;
    int64_t *best;                    // [T, k] ids
    float *values, *sums;             // [T, k]; [T], log-sums of exponentials, or 0
    int64_t refused;                  // set if an id that is read has more than 32 bits
} clusters;

// One integer that orders by z, then by the lower id (`rank_key` in kernels/vocab_topk.py).
static int64_t key_of(float z, int64_t id) {
    int32_t bits;
    if (z == 0) z = 0; // -0 is 0
    memcpy(&bits, &z, 4);
    bits ^= (bits >> 31) & 0x7FFFFFFF;
    return (int64_t)((uint64_t)(uint32_t)bits << 32 | (uint32_t)~(uint64_t)id);
}

static int64_t id_of(int64_t key) { return (int64_t)(uint32_t)~(uint64_t)key; }

static float value_of(int64_t key) {
    int32_t bits = (int32_t)(key >> 32);
    float z;
    bits ^= (bits >> 31) & 0x7FFFFFFF;
    memcpy(&z, &bits, 4);
    return z;
}

static void none(int64_t *best, int64_t most) {
    for (int64_t i = 0; i < most; i++) best[i] = INT64_MIN;
}

// Puts a key among the `most` largest so far, which descend.
INLINE void keep(int64_t *best, int64_t most, int64_t key) {
    int64_t i = most - 1;
    if (key <= best[i]) return;
    for (; i && best[i - 1] < key; i--) best[i] = best[i - 1];
    best[i] = key;
}

// The sum of exp(z - top) over z [n], whose largest is top; an infinite one counts 1.
static float mass_of(const float *z, int64_t n, float top) {
    vf some = splat(0);
    float sum = 0;
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        vf x = load(z + i);
        vi same = x == splat(top);
        some += power((vf)((vi)(x - top) & ~same));
    }
    for (; i < n; i++) sum += z[i] == top ? 1 : expf(z[i] - top);
    return total(some) + sum;
}

typedef struct {
    char *forms, *alone; // rounded rows, together for the centroids and one by one for the weight
    float *normed, *scores, *z;
    int64_t *chosen, *kept; // [T, chosen]; [T, chosen, least of k and R]
    float *tops, *masses;   // [T, chosen]
} memory;

static int64_t alone_bytes(const clusters *c) { return (rows_bytes(1, c->weight->E) + 63) / 64 * 64; }

static int64_t each_of(const clusters *c) { // candidates of a cluster
    const int64_t R = c->weight->O / c->centroids->O;
    return c->k < R ? c->k : R;
}

static int64_t layout(const clusters *c, int size, char *base, memory *to) {
    const int64_t T = c->T, E = c->weight->E, C = c->centroids->O, parts = T * c->chosen;
    int64_t at = 0;
#define TAKE(bytes) (base + (at = (at + 63) / 64 * 64, at += (bytes), at - (bytes)))
    memory m;
    m.forms = TAKE(rows_bytes(T, E)), m.alone = TAKE(T * alone_bytes(c));
    m.normed = (float *)TAKE(c->norm ? T * E * 4 : 0), m.scores = (float *)TAKE(T * C * 4);
    m.z = (float *)TAKE(size * 2 * (c->weight->O / C) * 4);
    m.chosen = (int64_t *)TAKE(parts * 8), m.kept = (int64_t *)TAKE(parts * each_of(c) * 8);
    m.tops = (float *)TAKE(parts * 4), m.masses = (float *)TAKE(parts * 4);
#undef TAKE
    if (to) *to = m;
    return at + 64;
}

// Row t and one of its clusters: the candidates `kept`, and the largest logit with the sum of exponentials relative to it.
// z [2 R] is for its logits and their noise.
static void search(clusters *c, const rows *x, int64_t t, int64_t cluster, float *z, int64_t *kept, float *top, float *mass) {
    const int64_t R = c->weight->O / c->centroids->O, *ids = c->ids + cluster * R;
    float *noise = z + R;
    product(c->weight, x, 1, cluster * R, R, z, R);
    if (c->temperature[t / c->run] > 0) {
        const float by = (float)c->temperature[t / c->run];
        gumbel_ids(c->seed[t / c->run], c->positions[t], ids, R, noise);
        for (int64_t i = 0; i < R; i++) z[i] = z[i] / by + noise[i];
    }
    none(kept, each_of(c));
    int64_t high = 0;
    for (int64_t i = 0; i < R; i++) keep(kept, each_of(c), key_of(z[i], ids[i])), high |= ids[i] >> 32;
    if (high) __atomic_store_n(&c->refused, 1, __ATOMIC_RELAXED);
    *top = value_of(kept[0]);
    *mass = c->sums ? mass_of(z, R, *top) : 0;
}

static void join(const clusters *c, const memory *s, int64_t t) {
    int64_t best[64];
    const int64_t each = each_of(c), *kept = s->kept + t * c->chosen * each;
    none(best, c->k);
    for (int64_t i = 0; i < c->chosen * each; i++) keep(best, c->k, kept[i]);
    for (int64_t i = 0; i < c->k; i++) {
        c->best[t * c->k + i] = id_of(best[i]);
        c->values[t * c->k + i] = value_of(best[i]);
    }
    if (!c->sums) return;
    const float top = value_of(best[0]), *tops = s->tops + t * c->chosen, *masses = s->masses + t * c->chosen;
    float sum = 0;
    for (int64_t j = 0; j < c->chosen; j++) sum += masses[j] * (tops[j] == top ? 1 : expf(tops[j] - top));
    c->sums[t] = top + logf(sum);
}

static void run_clusters(const member *m, void *arg) {
    clusters *c = arg;
    memory s;
    layout(c, m->size, m->scratch, &s);
    const int64_t E = c->weight->E, C = c->centroids->O, R = c->weight->O / C;
    const float *x = c->norm ? s.normed : c->x;
    const rows all = rows_at(x, E, s.forms, c->T, E);
    for (int64_t t = m->me; t < c->T; t += m->size) {
        if (c->norm) normalise(c->x + t * E, c->norm, s.normed + t * E, E, (float)c->eps);
        const rows own = rows_at(x + t * E, E, s.alone + t * alone_bytes(c), 1, E);
        round_row(c->centroids, &all, t), round_row(c->weight, &own, 0);
    }
    meet(m);
    share(m, c->centroids, &all, c->T, s.scores, C);
    meet(m);
    for (int64_t t = next(m); t < c->T; t = next(m)) {
        int64_t *chosen = s.chosen + t * c->chosen;
        none(chosen, c->chosen);
        for (int64_t i = 0; i < C; i++) keep(chosen, c->chosen, key_of(s.scores[t * C + i], i));
        for (int64_t j = 0; j < c->chosen; j++) chosen[j] = id_of(chosen[j]);
    }
    meet(m);
    for (int64_t i = next(m); i < c->T * c->chosen; i = next(m)) {
        const int64_t t = i / c->chosen;
        const rows own = rows_at(x + t * E, E, s.alone + t * alone_bytes(c), 1, E);
        search(c, &own, t, s.chosen[i], s.z + m->me * 2 * R, s.kept + i * each_of(c), s.tops + i, s.masses + i);
    }
    meet(m);
    for (int64_t t = m->me; t < c->T; t += m->size) join(c, &s, t);
}

// Returns -1 for ids of more than 32 bits.
int cluster_topk(team *t, clusters *c, int size) {
    if (!team_run(t, run_clusters, c, layout(c, size, 0, 0))) return 0;
    return c->refused ? -1 : 1;
}
