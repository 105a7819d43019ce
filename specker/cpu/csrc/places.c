// Whether what indexes memory lies within it. `run_forward` and the later steps of a chain do not check it again.
#include "layers.h"

static int within(int64_t x, int64_t end) { return (uint64_t)x < (uint64_t)end; }

static int all_within(const int64_t *x, int64_t count, int64_t end) {
    int good = 1;
    for (int64_t i = 0; i < count; i++) good &= within(x[i], end);
    return good;
}

// Whether columns 0 .. columns - 1 of a sequence stand in `count` pages of `page` columns. Later entries may be anything.
static int stand_in(const int32_t *table, int64_t pages, int64_t page, int64_t columns, int64_t count) {
    if (!within(columns, pages * page + 1)) return 0;
    int good = 1;
    for (int64_t i = 0; i < (columns + page - 1) / page; i++) good &= within(table[i], count);
    return good;
}

int columns_fit(const places *p, int64_t b, int64_t columns) {
    const records *r = &p->past;
    return stand_in(p->all.table + b * p->pages, p->pages, p->page, columns, p->all.count) &&
           (!p->near.slots || stand_in(p->near.table + b * p->pages, p->pages, p->page, columns, p->near.count)) &&
           (!r->slots || stand_in(r->table + b * r->pages, r->pages, r->page, columns, r->count));
}

// Whether the rows of sequence b are among its columns, and its window covers what `words` say about them.
static int rows_fit(const stack *d, const places *p, int64_t b) {
    const int64_t own = (int64_t)p->cu_rows[b + 1] - p->cu_rows[b], length = p->kv_len[b], w = p->window[b];
    if (own <= 0) return own == 0 && within(length, p->pages * p->page + 1);
    if (own > length || !columns_fit(p, b, length)) return 0;
    return !p->words || (w >= (d->mix.kind ? own : 0) && w <= length && w <= 64 * p->W);
}

// Whether the layers from `first` to `end` have states of sequence b, at anchors of blocks.
static int states_fit(const stack *d, const places *p, int64_t b, int64_t first, int64_t end) {
    const records *r = &p->past;
    if (!within(r->state_of[b], r->X)) return 0;
    for (int64_t at = first; at < end; at++) {
        const layer *l = d->layers + at;
        const int64_t *anchors = r->anchors + (l->rank * r->X + r->state_of[b]) * d->mix.Hv;
        for (int64_t v = 0; l->recurrent && v < d->mix.Hv; v++)
            if (anchors[v] < 0 || anchors[v] % d->mix.block) return 0;
    }
    return 1;
}

int forward_fits(const forward *f) {
    const stack *d = f->model;
    const places *p = f->rows;
    const records *r = &p->past;
    if (p->cu_rows[0] || p->cu_rows[p->B] != p->T || !all_within(p->positions, p->T, d->positions)) return 0;
    if (!all_within(p->all.slots, p->T, p->all.count * p->page)) return 0;
    if (p->near.slots && !all_within(p->near.slots, p->T, p->near.count * p->page)) return 0;
    if (r->slots && !all_within(r->slots, p->T, r->count * r->page)) return 0;
    for (int64_t b = 0; b < p->B; b++) {
        if (!rows_fit(d, p, b)) return 0;
        if (d->mix.kind == DELTA && !states_fit(d, p, b, f->groups[0], f->groups[f->group_count - 1])) return 0;
    }
    return 1;
}
