// A draft chain in one call: for each token a forward, the final norm, the (trimmed) LM head, the best candidate under the
// target's noise, and the rule that ends the draft. A model's first forward is that of the committed tokens which its
// cache lacks. A head that reads a target first forwards the pairs that wait, or begins with its outputs for them; later
// it gets its last output as the next feature.
#include "layers.h"
#include "noise.h"
#include "vector.h"
#include <math.h>

typedef struct { // runtime/control/policy.py, StopRule; of zeros: the sequence does not count
    const float *joint, *scales;
    int64_t joint_count, scale_count;
    double token;
} rule;

typedef struct {
    const stack *model;
    const matrix *embed, *head;
    communicator *ranks; // that hold the head's other rows; 0: all are here
    double scale, cap;   // factor of the embedding's rows; soft cap of the logits, 0: none
    const float *norm;   // the final norm; 0: `forward` has applied it
    const int64_t *ids;  // token ids of the head's rows; 0: the rows' numbers
    const int64_t *own;  // the model's id of each of these ids, if its tokenizer is not the target's; 0: the same
    const places *first; // the rows of the first forward, those of each sequence together
    const int64_t *tokens;                  // [T] token ids of `first`, each sequence's last one last; 0: no first forward
    const float *features;                  // [T, E], of a head's pairs with these tokens
    float *output;                          // [B, E], a head's outputs of the last pairs, which a first forward writes
    const int64_t *groups, *later_groups;   // groups of layers, for the first forward and for later ones
    int64_t group_count, later_count;
    int64_t raw;                            // the features lack the target's final norm
    const int64_t *columns;                 // [B], cache column of each sequence's first draft token
    const int64_t *further;                 // [B], by how much the target's positions are greater
    int64_t last_position, steps;           // at most `steps` tokens
    const double *temperature;              // [B]; 0: greedy
    const uint64_t *seed;                   // [B]
    const rule *rules;                      // [B]; 0: draft all tokens
    int64_t *drafted;                       // [steps, B], ids
    float *probability;                     // [steps, B], of each drafted token among the head's rows
    int64_t done;                           // tokens drafted
} chain;

typedef struct {
    float best, sum; // the largest value and the sum of exp(value - best)
    int64_t id;
} part;

typedef struct {
    char *forward, *forms;
    float *x, *out, *normed, *logits;
    int64_t *positions, *slots, *past, *tokens; // slots of K/V, and of records
    int32_t *bounds, *lengths;
    float *joint;
    part *parts; // [B, size]
    part *own, *every; // of sequences: [B] the best of this rank, [ranks, B] of all ranks
    int64_t *more;
} memory;

static int64_t layout(const chain *c, int size, char *base, memory *to) {
    const int64_t B = c->first->B, T = c->first->T > B ? c->first->T : B, E = c->model->E, K = c->head->O;
    // The later forwards have one row a sequence, and the last one the longest contexts: it needs more room for sums over
    // spans, also than a first forward whose rows are too many for threads to divide the columns (attention.c).
    int32_t lengths[B];
    for (int64_t b = 0; b < B; b++) lengths[b] = (int32_t)(c->columns[b] + c->steps);
    places later = *c->first;
    later.T = B, later.W = 0, later.words = 0, later.kv_len = lengths;
    const forward f = {.model = c->model, .rows = c->first, .row = E, .groups = c->groups, .group_count = c->group_count};
    const forward g = {.model = c->model, .rows = &later, .row = E, .groups = c->later_groups, .group_count = c->later_count};
    const int64_t here = forward_bytes(&f, size), then = forward_bytes(&g, size), need = here > then ? here : then;
    int64_t at = 0;
#define TAKE(bytes) (base + (at = (at + 63) / 64 * 64, at += (bytes), at - (bytes)))
    memory m;
    m.forward = TAKE(need);
    m.forms = TAKE(rows_bytes(B, E));
    m.x = (float *)TAKE(T * E * 4), m.out = (float *)TAKE(T * E * 4), m.normed = (float *)TAKE(B * E * 4);
    m.logits = (float *)TAKE(B * (K + 16) * 4);
    m.positions = (int64_t *)TAKE(B * 8), m.slots = (int64_t *)TAKE(B * 8), m.past = (int64_t *)TAKE(B * 8), m.tokens = (int64_t *)TAKE(B * 8);
    m.bounds = (int32_t *)TAKE((B + 1) * 4), m.lengths = (int32_t *)TAKE(B * 4), m.joint = (float *)TAKE(B * 4);
    m.parts = (part *)TAKE(B * size * sizeof(part)), m.more = (int64_t *)TAKE(8);
    m.own = (part *)TAKE(B * sizeof(part)), m.every = (part *)TAKE((c->ranks ? c->ranks->size : 0) * B * sizeof(part));
#undef TAKE
    if (to) *to = m;
    return at + 64;
}

// The approximate sum of exp(z[i] - top), top >= z[i]. Only the probabilities of drafts depend on it.
static float sum_of_powers(const float *z, int64_t n, float top) {
    float sum = 0;
    for (int64_t i = 0; i < n; i++) {
        float t = (z[i] - top) * 1.4426950408889634f;
        t = t > -126.0f ? t : -126.0f;
        float magic = t + 12582912.0f, f = t - (magic - 12582912.0f);
        int32_t e;
        memcpy(&e, &magic, 4);
        e = (e - 0x4b400000 + 127) << 23;
        float scale, p = ((((0.0013400432f * f + 0.0096180256f) * f + 0.0555032720f) * f + 0.2402265100f) * f + 0.6931472100f) * f + 1.0f;
        memcpy(&scale, &e, 4);
        sum += p * scale;
    }
    return sum;
}

// This thread's part of the search for the best candidate of sequence b, whose row stands at `position`.
static part search(const chain *c, float *z, int64_t first, int64_t count, int64_t b, int64_t position) {
    float noise[256];
    part p = {-INFINITY, 0, INT64_MAX};
    if (c->cap) soften(z, 1, (float)c->cap, count);
    if (c->temperature[b] > 0) {
        const float by = (float)(1.0 / c->temperature[b]);
        for (int64_t i = 0; i < count; i += 256) {
            const int64_t n = count - i < 256 ? count - i : 256;
            if (c->ids)
                gumbel_ids(c->seed[b], position, c->ids + first + i, n, noise);
            else
                gumbel_run(c->seed[b], position, (first + i) / 4, (n + 3) / 4, noise);
            for (int64_t j = 0; j < n; j++) z[i + j] = z[i + j] * by + noise[j];
        }
    }
    for (int64_t i = 0; i < count; i++) p.best = z[i] > p.best ? z[i] : p.best;
    for (int64_t i = 0; i < count; i++)
        if (z[i] == p.best) {
            const int64_t id = c->ids ? c->ids[first + i] : first + i;
            p.id = id < p.id ? id : p.id;
        }
    p.sum = sum_of_powers(z, count, p.best);
    return p;
}

// The best of `count` parts, which stand `step` apart.
static part joined(const part *p, int64_t count, int64_t step) {
    part all = {-INFINITY, 0, INT64_MAX};
    for (; count-- > 0; p += step) {
        if (p->id == INT64_MAX) continue;
        const float top = p->best > all.best ? p->best : all.best;
        all.sum = all.sum * expf(all.best - top) + p->sum * expf(p->best - top);
        if (p->best > all.best || (p->best == all.best && p->id < all.id)) all.id = p->id;
        all.best = top;
    }
    return all;
}

// Joins the parts of threads and ranks, writes the tokens of step n and returns whether to draft another one.
static int64_t settle(const chain *c, const memory *s, int size, int64_t n) {
    const int64_t B = c->first->B;
    double worth = 0, count = 0; // of one more token, in prices of one
    for (int64_t b = 0; b < B; b++) s->own[b] = joined(s->parts + b * size, size, 1);
    if (c->ranks) gather_ranks(c->ranks, s->own, B * sizeof(part), s->every);
    for (int64_t b = 0; b < B; b++) {
        part all = c->ranks ? joined(s->every + b, c->ranks->size, B) : s->own[b];
        if (all.id == INT64_MAX) all.id = 0, all.sum = 0; // all NaN: the target rejects the draft
        const float probability = all.sum > 0 ? 1.0f / all.sum : 0; // 0 instead of NaN
        c->drafted[n * B + b] = all.id;
        s->tokens[b] = c->own ? c->own[all.id] : all.id;
        c->probability[n * B + b] = probability;
        if (c->rules && c->rules[b].scale_count) {
            const rule *r = c->rules + b;
            int64_t bucket = (int64_t)(probability * (float)r->scale_count);
            bucket = bucket < r->scale_count ? bucket : r->scale_count - 1;
            const float right = probability * r->scales[bucket];
            s->joint[b] *= right < 1 ? right : 1;
            const float least = r->joint_count ? r->joint[n < r->joint_count ? n : r->joint_count - 1] : 0;
            double own = least > 0 ? (double)s->joint[b] / least : INFINITY;
            if (r->token > 0) own = fmin(own, probability / (double)(float)r->token);
            worth += own, count++;
        }
    }
    return n + 1 < c->steps && (!c->rules || worth >= count);
}

static int64_t at_most(int64_t a, int64_t b) { return a < b ? a : b; }

static void run_chain(const member *m, void *arg) {
    chain *c = arg;
    memory s;
    layout(c, m->size, m->scratch, &s);
    const int64_t B = c->first->B, E = c->model->E, K = c->head->O;
    places later = *c->first;
    later.T = B, later.W = 0, later.words = 0, later.full = 0;
    later.positions = s.positions, later.all.slots = s.slots, later.past.slots = s.past, later.cu_rows = s.bounds, later.kv_len = s.lengths, later.window = s.lengths;
    if (m->me == 0)
        for (int64_t b = 0; b < B; b++) s.joint[b] = 1;
    for (int64_t n = 0;; n++) {
        const int known = !c->tokens && !n; // the rows for the LM head
        const places *at = n ? &later : c->first;
        const int64_t *tokens = n ? s.tokens : c->tokens;
        if (n && m->me == 0)
            for (int64_t b = 0; b < B; b++) {
                const int64_t column = c->columns[b] + n - 1;
                s.positions[b] = at_most(column, c->last_position);
                s.slots[b] = (int64_t)later.all.table[b * later.pages + column / later.page] * later.page + column % later.page;
                if (c->model->mix.kind) {
                    const records *past = &later.past;
                    s.past[b] = (int64_t)past->table[b * past->pages + column / past->page] * past->page + column % past->page;
                }
                s.lengths[b] = (int32_t)(column + 1);
                s.bounds[b] = (int32_t)b, s.bounds[b + 1] = (int32_t)(b + 1);
            }
        if (!known) {
            for (int64_t t = m->me; t < at->T; t += m->size) {
                restore_row(c->embed, tokens[t], s.x + t * E);
                if (c->scale != 1)
                    for (int64_t e = 0; e < E; e++) s.x[t * E + e] *= (float)c->scale;
            }
            meet(m);
            forward f = {.model = c->model, .rows = at, .x = s.x, .row = E, .out = s.out};
            f.features = n == 0 ? c->features : n == 1 ? c->output : s.out, f.raw = !n && c->raw;
            f.groups = n ? c->later_groups : c->groups, f.group_count = n ? c->later_count : c->group_count;
            run_forward(m, &f, s.forward);
            meet(m);
        }
        rows h = rows_at(s.normed, E, s.forms, B, E);
        for (int64_t b = m->me; b < B; b += m->size) {
            const float *row = known ? c->output + b * E : s.out + (at->cu_rows[b + 1] - 1) * E;
            if (c->output && !known && !n) memcpy(c->output + b * E, row, E * 4);
            normalise(row, c->norm, s.normed + b * E, E, (float)c->model->eps);
            round_row(c->head, &h, b);
        }
        meet(m);
        share(m, c->head, &h, B, s.logits, K);
        meet(m);
        const int64_t each = (K / m->size + 3) / 4 * 4, start = m->me * each < K ? m->me * each : K;
        const int64_t count = m->me + 1 < m->size && each < K - start ? each : K - start;
        for (int64_t b = 0; b < B; b++) {
            const int64_t position = at_most(c->columns[b] + n - !c->output, c->last_position) + c->further[b]; // of the target's row
            s.parts[b * m->size + m->me] = search(c, s.logits + b * K + start, start, count, b, position);
        }
        meet(m);
        if (m->me == 0) {
            *s.more = settle(c, &s, m->size, n);
            c->done = n + 1;
        }
        meet(m);
        if (!*s.more) return;
    }
}

// Whether all that the forwards index lies within their memory. The last token's column is not written.
static int fits(const chain *c) {
    const places *p = c->first;
    const forward f = {.model = c->model, .rows = p, .groups = c->groups, .group_count = c->group_count};
    if (c->tokens && !forward_fits(&f)) return 0;
    for (int64_t t = 0; c->tokens && t < p->T; t++)
        if (c->tokens[t] < 0 || c->tokens[t] >= c->embed->O) return 0;
    for (int64_t b = 0; b < p->B && c->steps > 1; b++)
        if (c->columns[b] < 0 || !columns_fit(p, b, c->columns[b] + c->steps - 1)) return 0;
    return c->last_position >= 0 && c->last_position < c->model->positions;
}

// Returns -1, and has written nothing, if a number points outside of what it is an index into.
int draft_chain(team *t, chain *c, int size) { return fits(c) ? team_run(t, run_chain, c, layout(c, size, 0, 0)) : -1; }
