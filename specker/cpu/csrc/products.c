// Products with few or many rows, over matrices whose rows may be stored in up to three formats.
#include "products.h"
#include "tiles.h"
#include "units.h"
#include <math.h>

#define FIRST_PART 2
#define LATER_PARTS 16

int64_t segment_bytes(int64_t format, int64_t rows, int64_t E) {
    if (format <= BFLOAT16) return rows * E * (format == FLOAT32 ? 4 : 2);
    int bits = KINDS[format].bits, scales = KINDS[format].scales;
    return (rows + ROWS - 1) / ROWS * (E / unit_columns(scales)) * unit_bytes(bits, scales);
}

// --- rows of x

static int64_t eights_bytes(int64_t T, int64_t E) { return T * E + T * (E / GROUP) * 32 + T * (E / 256) * 16 + 7 * 64; }

int64_t rows_bytes(int64_t T, int64_t E) {
    const int64_t far = amx_allowed() ? eights_bytes(T, E) + T * E + T * (E / 256) * 37 + 4 * 64 : 0;
    return eights_bytes(T, E) + far + T * E * 6 + 2 * 64;
}

static void *take(char **at, int64_t bytes) {
    void *p = (void *)(((uintptr_t)*at + 63) / 64 * 64);
    *at = (char *)p + bytes;
    return p;
}

static eights eights_at(char **at, int64_t T, int64_t E) {
    eights e = {.q = take(at, T * E), .scale = take(at, T * (E / GROUP) * 4), .both = take(at, T * (E / GROUP) * 4)};
    e.sums = take(at, T * (E / 256) * 16);
    for (int i = 0; i < 3; i++) e.less[i] = take(at, T * (E / GROUP) * 8);
    return e;
}

rows rows_at(const float *x, int64_t row, void *memory, int64_t T, int64_t E) {
    char *at = memory;
    rows r = {.x = x, .row = row, .T = T};
    r.small = eights_at(&at, T, E);
    if (amx_allowed()) {
        r.large = eights_at(&at, T, E);
        r.far.q = take(&at, T * E);
        r.far.sums = take(&at, T * (E / 16) * 2);
        r.far.scale = take(&at, T * (E / 256) * 4);
        r.far.groups = take(&at, T * (E / 256));
    }
    r.h = take(&at, T * E * 2);
    r.f = take(&at, T * E * 4);
    return r;
}

static int in_pairs(const matrix *m, int64_t format) { // whether bfloat16 instructions multiply it
#if defined(__AVX512BF16__)
    return format == BFLOAT16 && m->activations != AS_FLOAT32 && m->E % 32 == 0;
#else
    return (void)m, (void)format, 0;
#endif
}

static int as_integers(const matrix *m, int64_t format) {
    return format > BFLOAT16 && KINDS[format].bits != FP8 && m->activations == AS_INT8;
}

typedef struct { // where row t0 + row of x lies, and what the parts of a matrix need
    int64_t t0, row, height, G, columns; // the tile of the row; its groups; columns with one scale
    int paired, count;                   // two groups of a row lie side by side
    int part[3], offset[3], halves[3];
} spot;

// Rounds x [columns], unit u of a row, to the nearest integers times `scale`, ties to even; by = 1 / scale.
static void round_unit(const spot *s, const eights *to, int64_t u, const float *x, float scale, float by) {
    const vf magic = splat(12582912.0f); // 1.5 2^23: adding it rounds to an integer, in the last bits
    const int64_t groups = s->columns / GROUP, unit = s->t0 * (s->G / groups) + u * s->height + s->row;
    to->scale[unit] = scale;
    for (int64_t g = u * groups; g < (u + 1) * groups; g++, x += GROUP) {
        const int64_t at = s->t0 * s->G + g * s->height + s->row;
        int8_t *q = to->q + (s->paired ? at - g % 2 * (s->height - 1) + s->row : at) * GROUP;
        int32_t sums[2] = {0, 0};
        for (int i = 0; i < GROUP; i += LANES) {
            vi whole = (vi)(load(x + i) * by + magic) - 0x4b400000;
            narrow_bytes(q + i, whole);
            sums[i / 16] += (int32_t)total(to_float(whole)); // integers: exact in any order
        }
        if (s->columns == GROUP)
            to->both[unit] = scale * (float)(sums[0] + sums[1]);
        else
            to->sums[8 * unit + g % 8] = (int16_t)(sums[0] + sums[1]);
        for (int i = 0; i < s->count; i++) {
            int32_t *less = to->less[s->part[i]] + 2 * at;
            less[0] = -s->offset[i] * (s->halves[i] ? sums[0] : sums[0] + sums[1]);
            less[1] = s->halves[i] ? -s->offset[i] * sums[1] : 0;
        }
    }
}

int64_t scale_columns(int64_t format) { return by_units(format) ? 256 : GROUP; }

static float top_of(const float *x, int64_t count) { // the largest |x|
    vf most = splat(0);
    for (int64_t i = 0; i < count; i += LANES) {
        vf a = load(x + i);
        most = largest(most, largest(a, -a));
    }
    return highest(most);
}

// Moves the numbers of x [256] beyond `limit` to `far`, where x is number `at` of all; near: x with zeros in their places.
// Returns the groups that have some.
static uint8_t keep_far(const outliers *far, int64_t at, const float *x, float limit, float top, float *near) {
    uint8_t groups = 0;
    int8_t q[256];
    far->scale[at / 256] = top / 127.0f;
    for (int i = 0; i < 256; i++) {
        const int is = fabsf(x[i]) > limit;
        near[i] = is ? 0 : x[i], q[i] = is ? (int8_t)nearest(x[i] * (127.0f / top)) : 0;
        groups |= (uint8_t)(is << i / GROUP);
    }
    memcpy(far->q + at, q, 256);
    for (int i = 0; i < 256; i += 16) {
        int sum = 0;
        for (int j = i; j < i + 16; j++) sum += q[j];
        far->sums[(at + i) / 16] = (int16_t)sum;
    }
    return groups;
}

// Rounds row t to int8 for the parts of m for which so many columns have one scale; the largest number of a unit becomes 127.
static void round_int8(const matrix *m, const rows *r, int64_t t, int64_t columns) {
    const int64_t tiles = tiles_of(r->T), n = ((t + 1) * tiles - 1) / r->T, t0 = n * r->T / tiles; // t is in tile n
    spot s = {t0, t - t0, (n + 1) * r->T / tiles - t0, m->E / GROUP, columns, columns > GROUP && r->T >= FEWEST, 0, {0}, {0}, {0}};
    for (int i = 0; i < m->count; i++) {
        const int64_t format = m->parts[i].format;
        if (!as_integers(m, format) || scale_columns(format) != columns) continue;
        const int bits = KINDS[format].bits, scales = KINDS[format].scales;
        s.part[s.count] = i, s.offset[s.count] = columns == GROUP ? offset_of(bits, scales) : 1 << (bits - 1);
        s.halves[s.count++] = columns > GROUP || scales == SIXTEEN;
    }
    if (!s.count) return;
    const float *x = r->x + t * r->row;
    for (int64_t u = 0; u < m->E / columns; u++, x += columns) {
        const float top = top_of(x, columns);
        if (columns == GROUP) {
            round_unit(&s, &r->small, u, x, top / 127.0f, top > 0 ? 127.0f / top : 0);
            continue;
        }
        const float limit = FAR_NUMBER * sqrtf(dot(x, x, 256) / 256);
        uint8_t *groups = r->far.groups + t * (m->E / 256) + u;
        *groups = 0;
        float near[256], low = top;
        if (top > limit) {
            *groups = keep_far(&r->far, t * m->E + u * 256, x, limit, top, near);
            low = top_of(near, 256);
        }
        round_unit(&s, &r->large, u, *groups ? near : x, low / 127.0f, low > 0 ? 127.0f / low : 0);
    }
}

static int as_floats(const matrix *m, int64_t format) { // whether x is rounded to bfloat16, but multiplied as float32
    if (format <= BFLOAT16) return format == BFLOAT16 && m->activations != AS_FLOAT32 && !in_pairs(m, format);
    return !as_integers(m, format) && m->activations != AS_FLOAT32;
}

void round_row(const matrix *m, const rows *r, int64_t t) {
    int integers = 0, pairs = 0, floats = 0;
    for (int i = 0; i < m->count; i++) {
        int64_t format = m->parts[i].format;
        integers |= as_integers(m, format), pairs |= in_pairs(m, format), floats |= as_floats(m, format);
    }
    if (integers) round_int8(m, r, t, GROUP), round_int8(m, r, t, 256);
    const float *x = r->x + t * r->row;
    if (pairs)
        for (int64_t e = 0; e < m->E; e++) r->h[t * m->E + e] = narrow(x[e]);
    if (floats)
        for (int64_t e = 0; e < m->E; e++) {
            uint32_t u = (uint32_t)narrow(x[e]) << 16;
            memcpy(r->f + t * m->E + e, &u, 4);
        }
}

// Computes rows first .. first + count - 1 of an interleaved part; `first` is a multiple of ROWS.
static void interleaved(const matrix *m, int part, const rows *x, int64_t T, int64_t first, int64_t count, float *y,
                        int64_t row_y) {
    const segment *s = &m->parts[part];
    const int64_t E = m->E, size = segment_bytes(s->format, ROWS, E), tiles = tiles_of(T);
    const int integer = as_integers(m, s->format), rounded = as_floats(m, s->format);
    const float *f = rounded ? x->f : x->x;
    const int64_t row_x = rounded ? E : x->row;
#if defined(__AMX_INT8__)
    if (integer && by_units(s->format) && T >= FEWEST) {
        squares(s->format, s->data + first / ROWS * size, count, x, E, y, row_y);
        return;
    }
#endif
    for (int64_t o = 0; o < count; o += ROWS) {
        const uint8_t *w = s->data + (first + o) / ROWS * size;
        const int whole = count - o >= ROWS;
        for (int64_t n = 0; n < tiles; n++) { // tiles of about equal height
            const int64_t t0 = n * T / tiles, t1 = (n + 1) * T / tiles;
            float room[MOST * ROWS], *to = whole ? y + t0 * row_y + o : room;
            const int64_t row = whole ? row_y : ROWS;
#if defined(__AMX_INT8__)
            if (integer && by_units(s->format))
                few_rows(s->format, w, x, part, E, to, row);
            else
#endif
            if (integer)
                INTEGER_TILES[s->format]((int)(t1 - t0), w, x, x->small.less[part], t0, E, to, row);
            else
                FLOAT_TILES[s->format]((int)(t1 - t0), w, f + t0 * row_x, row_x, E, to, row);
            if (!whole)
                for (int64_t t = t0; t < t1; t++)
                    memcpy(y + t * row_y + o, room + (t - t0) * ROWS, (count - o) * 4);
        }
    }
}

// --- matrices

// Computes y[t, o - first] for rows o = first .. first + count - 1. `first` is a multiple of ROWS in its segment, and so
// is `count`, unless the segment ends there.
void product(const matrix *m, const rows *x, int64_t T, int64_t first, int64_t count, float *y, int64_t row_y) {
    int64_t before = 0;
    for (int i = 0; i < m->count; i++) {
        const segment *s = &m->parts[i];
        int64_t from = first > before ? first : before, to = first + count < before + s->rows ? first + count : before + s->rows;
        if (from < to) {
            float *at = y + from - first;
            int64_t o = from - before, n = to - from;
            if (s->format > BFLOAT16) {
                interleaved(m, i, x, T, o, n, at, row_y);
#if defined(__AVX512BF16__)
            } else if (in_pairs(m, s->format)) {
                plain_pairs((const uint16_t *)s->data + o * m->E, m->E, x->h, n, T, m->E, at, row_y, 0);
#endif
            } else {
                const int rounded = as_floats(m, s->format), half = s->format == BFLOAT16;
                plain_rows(s->data + o * m->E * (half ? 2 : 4), half ? OF_BFLOAT16 : OF_FLOAT32, m->E, rounded ? x->f : x->x, rounded ? m->E : x->row, n, T,
                           m->E, at, row_y, 0);
            }
        }
        before += s->rows;
    }
}

// How many rows one of `parts` parts of a matrix has: a multiple of ROWS.
int64_t chunk(int64_t O, int64_t parts) {
    int64_t n = (O + parts * ROWS - 1) / (parts * ROWS) * ROWS;
    return n > ROWS ? n : ROWS;
}

void ask(const matrix *m, int64_t first) {
    int64_t before = 0;
    for (int i = 0; i < m->count && first >= before; before += m->parts[i].rows, i++) {
        const segment *s = &m->parts[i];
        if (first < before + s->rows) {
            const uint8_t *p = s->data + segment_bytes(s->format, s->format > BFLOAT16 ? (first - before) / ROWS * ROWS : first - before, m->E);
            for (int n = 0; n < 2048; n += 64) prefetch(p + n);
        }
    }
}

// Computes this thread's parts of y [T, O]. Each part starts with a wait for memory, so the first is long. The later ones
// are short and go to whichever thread is free, because one thread may be slower.
void share(const member *me, const matrix *m, const rows *x, int64_t T, float *y, int64_t row_y) {
    const int64_t most = chunk(m->O, FIRST_PART * me->size), part = chunk(m->O, LATER_PARTS * me->size);
    int64_t first = me->me * most, count = most;
    while (first < m->O) {
        const int64_t then = me->size * most + next(me) * part;
        ask(m, then);
        product(m, x, T, first, count < m->O - first ? count : m->O - first, y + first, row_y);
        first = then, count = part;
    }
}

// --- rows of W

static float fp8_value(uint8_t code) {
    return half_to_float((uint16_t)((code & 0x80) << 8 | (code & 0x7f) << 7)) * 256.0f;
}

static float half_at(const uint8_t *p) {
    uint16_t h;
    memcpy(&h, p, 2);
    return half_to_float(h);
}

// The scales of columns 0 to 15 and 16 to 31 of group g in row r, and their shift; p: where the unit's scales begin.
static void row_scales(int scales, const uint8_t *p, int g, int r, float *scale, float *second, float *shift) {
    *shift = 0;
    switch (scales) {
    case HALF_SHIFT: *shift = half_at(p + 32 + 2 * r); // fall through
    case HALF: *scale = half_at(p + 2 * r); break;
    case FLOAT_SHIFT: memcpy(shift, p + 64 + 4 * r, 4); // fall through
    case FLOAT: memcpy(scale, p + 4 * r, 4); break;
    case POWER: *scale = ldexpf(0.5f, p[r] - 127); break;
    case SUPER:
        *scale = p[16 * g + r] * half_at(p + 256 + 2 * r);
        *shift = -(p[128 + 16 * g + r] * half_at(p + 288 + 2 * r));
        break;
    default:
        *scale = ((const int8_t *)p)[32 * g + r] * half_at(p + 256 + 2 * r);
        *second = ((const int8_t *)p)[32 * g + 16 + r] * half_at(p + 256 + 2 * r);
        return;
    }
    *second = *scale;
}

void restore_row(const matrix *m, int64_t o, float *y) {
    const int64_t E = m->E;
    const segment *s = m->parts;
    for (; o >= s->rows; s++) o -= s->rows;
    if (s->format == FLOAT32) {
        memcpy(y, (const float *)s->data + o * E, E * 4);
        return;
    }
    if (s->format == BFLOAT16) {
        for (int64_t e = 0; e < E; e++) {
            uint32_t u = (uint32_t)((const uint16_t *)s->data)[o * E + e] << 16;
            memcpy(y + e, &u, 4);
        }
        return;
    }
    const int bits = KINDS[s->format].bits, scales = KINDS[s->format].scales, zero = zero_of(bits, scales), r = o % ROWS;
    const int64_t columns = unit_columns(scales), size = unit_bytes(bits, scales), groups = columns / GROUP;
    const uint8_t *w = s->data + o / ROWS * (E / columns) * size;
    for (int64_t u = 0; u < E / columns; u++, w += size) {
        for (int g = 0; g < groups; g++, y += GROUP) {
            const uint8_t *q = w + g * code_bytes(bits) + 4 * r;
            float scale, second, shift;
            row_scales(scales, w + groups * code_bytes(bits), g, r, &scale, &second, &shift);
            for (int i = 0; i < 8; i++) {
                for (int c = 0; c < 4; c++) {
                    int code = bits >= 8 ? q[64 * i + c] : q[64 * (i % 4) + c] >> (i < 4 ? 0 : 4) & 15;
                    if (bits == 5) code |= (q[256 + c] >> i & 1) << 4;
                    if (bits == 6) code |= (q[256 + 64 * (i / 4) + c] >> 2 * (i % 4) & 3) << 4;
                    if (bits == E2M1) code = TWICE[code];
                    const float n = bits == FP8 ? fp8_value((uint8_t)code) : (float)(code - zero);
                    y[4 * i + c] = fmaf(n, i < 4 ? scale : second, shift);
                }
            }
        }
    }
}
