// Biases, penalties and min_p: kernels/adjust_rows.py defines them. Each row is one thread's work and independent of the others.
#include "team.h"
#include "vector.h"
#include <math.h>
#include <string.h>

typedef struct {
    const float *logits;                    // [T, V]
    const int64_t *text, *prompt, *length;  // [B, text_stride], [B], [B]
    const int64_t *window, *parents, *places; // [B, R]; [B, R - 1], 0: chains; [T], 0: all of [B, R] in order
    const float *numbers;                   // [B, 4]
    const int64_t *bias_ids;                // [B, K]
    const float *bias;                      // [B, K]
    int64_t T, V, B, C, R, K, text_stride, window_stride, parents_stride, floors;
    float *out;      // [T, V]
    int64_t refused; // set if a number points outside of the others
} adjust_call;

static int within(int64_t x, int64_t end) { return (uint64_t)x < (uint64_t)end; }

// `count` holds for each id twice its occurrences after the prompt, and 1 more if it occurs at all. An id is changed once,
// which sets its count to 0.
static void penalise(float *z, int32_t *count, int64_t id, float repetition, float presence, float frequency) {
    const int32_t seen = count[id];
    if (!seen) return;
    count[id] = 0;
    z[id] = z[id] > 0 ? z[id] / repetition : z[id] * repetition;
    if (seen > 1) z[id] -= presence + frequency * (float)(seen >> 1);
}

static int64_t parent(const adjust_call *c, int64_t b, int64_t row) {
    const int64_t up = c->parents ? c->parents[b * c->parents_stride + row - 1] : row - 1;
    return up < row ? up : row - 1;
}

// 0: a number of the row points outside. Ids are checked where they are counted, and all of them before any is changed.
static int adjust_row(const adjust_call *c, int64_t t, int32_t *count) {
    const int64_t V = c->V, place = c->places ? c->places[t] : t, b = place / c->R, row = place % c->R;
    if (!within(place, c->B * c->R) || !within(c->length[b], c->C + 1) || !within(c->prompt[b], c->length[b] + 1)) return 0;
    const int64_t *text = c->text + b * c->text_stride, *window = c->window + b * c->window_stride;
    const float *numbers = c->numbers + b * 4, repetition = numbers[0], presence = numbers[1], frequency = numbers[2];
    float *z = c->out + t * V;
    memcpy(z, c->logits + t * V, V * 4);
    for (int64_t k = b * c->K; k < (b + 1) * c->K; k++) {
        const int64_t id = c->bias_ids[k];
        if (id >= V) return 0;
        if (id >= 0) z[id] += c->bias[k];
    }
    if (repetition != 1 || presence != 0 || frequency != 0) {
        const int64_t prompt = c->prompt[b], length = c->length[b], begin = repetition == 1 ? prompt : 0;
        for (int64_t i = begin; i < length; i++) {
            if (!within(text[i], V)) return 0;
            count[text[i]] = (count[text[i]] + (i < prompt ? 0 : 2)) | 1;
        }
        for (int64_t r = row; r > 0; r = parent(c, b, r)) {
            if (!within(window[r], V)) return 0;
            count[window[r]] = (count[window[r]] + 2) | 1;
        }
        for (int64_t i = begin; i < length; i++) penalise(z, count, text[i], repetition, presence, frequency);
        for (int64_t r = row; r > 0; r = parent(c, b, r)) penalise(z, count, window[r], repetition, presence, frequency);
    }
    if (!c->floors || numbers[3] == INFINITY) return 1;
    const float least = highest_of(z, V) - numbers[3];
    for (int64_t i = 0; i < V; i++) z[i] = z[i] < least ? -INFINITY : z[i];
    return 1;
}

static int64_t count_bytes(int64_t V) { return (V * 4 + 63) / 64 * 64; }

static void run_adjust(const member *m, void *arg) {
    adjust_call *c = arg;
    int32_t *count = (int32_t *)(m->scratch + m->me * count_bytes(c->V));
    memset(count, 0, c->V * 4);
    for (int64_t t = next(m); t < c->T; t = next(m))
        if (!adjust_row(c, t, count)) __atomic_store_n(&c->refused, 1, __ATOMIC_RELAXED);
}

// 1; 0: too little memory; -1: a number points outside of the others.
int adjust(team *t, adjust_call *c, int size) {
    if (!team_run(t, run_adjust, c, size * count_bytes(c->V))) return 0;
    return c->refused ? -1 : 1;
}
