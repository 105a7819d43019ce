// Products of many rows with AMX, whose instructions multiply 16 rows of x by 16 of W over 64 columns.
//
// A tile adds up a unit of 256 columns, so codes are multiplied by their groups' integer scales first. A product does not
// fit eight bits: there are two tiles, of its high and low bits. The codes are unpacked once for all rows of x.
#define _GNU_SOURCE
#include "units.h"
#if defined(__AMX_INT8__)
#include <sys/syscall.h>
#include <unistd.h>

#define HIGH 8    // squares of x, one below another, for which codes are unpacked once
#define WIDE 128  // rows of W in a run, which the second cache holds

typedef struct {
    _Alignas(64) uint8_t codes[2][4][2][16][64]; // of two units: [two groups, high or low, register]
    int32_t sums[2][16][16];                    // of a unit: [high or low, row of x, row of W]
    float all[HIGH][16][16];                    // of all columns so far: [square, row of x, row of W]
} room;

static int allowed;

// Linux gives a process AMX's registers if it asks for them, unless the machine or a thread's signal stack forbids it.
__attribute__((constructor)) static void ask_for_tiles(void) {
    allowed = syscall(SYS_arch_prctl, 0x1023, 18) == 0; // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
}

int amx_allowed(void) { return allowed; }

// Tiles 0 to 3: sums, two pairs of high and low bits; 4: rows of x; 5 and 6: codes.
static void configure(int64_t height) {
    struct {
        uint8_t palette, start, reserved[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } c = {.palette = 1};
    for (int i = 0; i < 7; i++) c.bytes[i] = 64, c.rows[i] = i < 5 ? (uint8_t)height : 16;
    __asm__ volatile("ldtilecfg %0" ::"m"(c));
}

INLINE void clear(int pair) {
    if (pair)
        __asm__ volatile("tilezero %%tmm2\n\ttilezero %%tmm3" ::);
    else
        __asm__ volatile("tilezero %%tmm0\n\ttilezero %%tmm1" ::);
}

INLINE void load_x(const int8_t *q) {
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm4" ::"r"(q), "r"((int64_t)64) : "memory");
}

// A pair's high or low sums += x times codes [16, 64] of two groups. Only SIXTEEN's high codes are signed.
#define TIMES(operation, codes_tile, sum_tile) \
    __asm__ volatile("tileloadd (%0,%1,1), %%" codes_tile "\n\t" operation " %%" codes_tile ", %%tmm4, %%" sum_tile \
                     ::"r"(codes), "r"((int64_t)64) : "memory")
#define ONE_OF_FOUR(operation) \
    if (pair && low) TIMES(operation, "tmm6", "tmm3"); \
    else if (pair) TIMES(operation, "tmm5", "tmm2"); \
    else if (low) TIMES(operation, "tmm6", "tmm1"); \
    else TIMES(operation, "tmm5", "tmm0")
INLINE void multiply(int scales, int pair, int low, const void *codes) {
    if (scales == SIXTEEN && !low) {
        ONE_OF_FOUR("tdpbssd");
    } else {
        ONE_OF_FOUR("tdpbsud");
    }
}

INLINE void keep(int pair, int32_t (*to)[16][16]) {
#define STORE(high, low) \
    __asm__ volatile("tilestored %%" high ", (%0,%2,1)\n\ttilestored %%" low ", (%1,%2,1)" \
                     ::"r"(to[0]), "r"(to[1]), "r"((int64_t)64) : "memory")
    if (pair)
        STORE("tmm2", "tmm3");
    else
        STORE("tmm0", "tmm1");
}

#define LOW_BITS(scales) ((scales) == SIXTEEN ? 8 : 3)

// The codes of group g of a unit times their scales. Codes are unsigned, and less their zero with SIXTEEN.
INLINE void unpack_group(int bits, int scales, const uint8_t *w, int64_t g, uint8_t to[2][16][64]) {
    const uint8_t *from = w + g * code_bytes(bits), *p = w + 8 * code_bytes(bits);
    uint8_t(*high)[64] = to[0] + g % 2 * 8, (*low)[64] = to[1] + g % 2 * 8;
    vi scale, second;
    integer_scales(scales, p, g, &scale, &second);
    if (scales == SUPER) { // scale = 8 a + b: a code times a, or times b, fits a byte, so one product of 16 bits makes two
        const vh a = (vh)(scale >> 3 | scale >> 3 << 16), b = (vh)((scale & 7) | (scale & 7) << 16);
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) {
            const vh q = code(bits, from, 0, i);
            store(high[i], (vf)(q * a)), store(low[i], (vf)(q * b));
        }
        return;
    }
    const __m512i byte = _mm512_set1_epi16(0xff);
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
        const vi s = (half ? second : scale) & 0xff;
        const __m512i even = (__m512i)(s | s << 16), odd = _mm512_slli_epi16(even, 8);
        const __m512i zero = _mm512_slli_epi16(_mm512_srai_epi16(odd, 8), bits - 1); // of codes, times the scale
#pragma GCC unroll 4
        for (int i = 4 * half; i < 4 * half + 4; i++) {
            const __m512i q = (__m512i)code(bits, from, 0, i);
            const __m512i m = _mm512_sub_epi16(_mm512_maddubs_epi16(q, even), zero);
            const __m512i n = _mm512_sub_epi16(_mm512_maddubs_epi16(q, odd), zero);
            // 0xca: the second where a bit of `byte` is 1, else the third
            store(high[i], (vf)_mm512_ternarylogic_epi32(byte, _mm512_srli_epi16(m, 8), n, 0xca));
            store(low[i], (vf)_mm512_ternarylogic_epi32(byte, m, _mm512_slli_epi16(n, 8), 0xca));
        }
    }
}

// What happens at once, each part to another square or unit. Without `codes` nothing is multiplied, without `then`
// nothing is unpacked, and without rows nothing is added.
typedef struct {
    const int8_t *q; // [4, .., 64], `row_q` bytes apart
    int64_t row_q;
    const uint8_t (*codes)[2][16][64];
    const uint8_t *then; // a unit of W
    uint8_t (*to)[2][16][64];
    int64_t rows, row_y;
    const float *by;     // scales of x
    const int16_t *sums; // of x
    const float *before; // [rows, 16]: what sums are added to; 0: nothing
    float *y;            // where they go, `row_y` floats apart
    const uint8_t *w;    // the unit of W that was multiplied; unit u of x, its first row, and the outliers
    int64_t u, first, E;
    const outliers *far;
} turn;

// The processor multiplies while it adds and unpacks if these are mixed.
INLINE void take(int bits, int scales, int pair, const turn *n, const factors *f, room *r) {
    const int64_t lines = unit_bytes(bits, scales) / 512 + 1, part = (n->rows + 4) / 5;
    int64_t t = 0;
    if (n->rows) keep(!pair, r->sums);
    if (n->codes) clear(pair);
#pragma GCC unroll 8
    for (int g = 0; g < 8; g++) {
        if (n->codes) {
            if (g % 2 == 0) load_x(n->q + g / 2 * n->row_q);
            multiply(scales, pair, g % 2, n->codes[g / 2][g % 2]);
        }
        if (n->then) {
            ask_ahead(n->then + g * lines * 64, lines);
            unpack_group(bits, scales, n->then, g, n->to[g / 2]);
        }
        for (const int64_t end = (g - 2) * part < n->rows ? (g - 2) * part : n->rows; t < end; t++) {
            const vi sum = (lanes(r->sums[0][t]) << LOW_BITS(scales)) + lanes(r->sums[1][t]);
            const vf before = n->before ? load(n->before + 16 * t) : splat(0);
            vf y = scaled(scales, f, n->sums + 8 * t, n->by[t], sum, before);
            if (n->far->groups[(n->first + t) * (n->E / 256) + n->u])
                y = with_outliers(bits, scales, n->w, f, n->far, n->first + t, n->u, n->E, y);
            store(n->y + t * n->row_y, y);
        }
    }
}

// What a turn multiplies: square n of x times unit u.
typedef struct {
    int64_t u, n;
} job;

// Squares a .. b - 1 of x, at most HIGH, times rows 0 .. count - 1 of W.
INLINE void run(int bits, int scales, const uint8_t *w, int64_t count, const rows *x, int64_t a, int64_t b, int64_t E, float *y,
                int64_t row_y) {
    const int64_t T = x->T, tiles = tiles_of(T), size = unit_bytes(bits, scales);
    const int64_t units = E / 256, all = (count + 15) / 16 * units; // of all blocks, one after another
    room r;
    factors f;
#define FIRST(n) ((n) * T / tiles)
#define HEIGHT(n) (FIRST((n) + 1) - FIRST(n))
#define AT(j) (FIRST((j).n) * units + (j).u % units * HEIGHT((j).n)) // of its first row in `scale`
    for (int64_t g = 0; g < 8; g++) unpack_group(bits, scales, w, g, r.codes[0][g / 2]);
    // Each turn adds what the turn before has multiplied; it multiplies the next job; and if that is the unit's last one,
    // it unpacks the unit after it. The first turn has nothing to add.
    job done = {-1, a}, next = {0, a};
    for (int pair = 0; done.u < all; pair ^= 1) {
        turn now = {.row_y = 16};
        const job then = next.n + 1 < b ? (job){next.u, next.n + 1} : (job){next.u + 1, a};
        if (next.u < all) {
            now.q = x->large.q + AT(next) * 256, now.row_q = HEIGHT(next.n) * 64;
            now.codes = (const uint8_t(*)[2][16][64])r.codes[next.u & 1];
            if (then.u > next.u && then.u < all) now.then = w + then.u * size, now.to = r.codes[then.u & 1];
        }
        const int64_t block = done.u / units, whole = count - 16 * block >= 16;
        const int ends = done.u >= 0 && (done.u + 1) % units == 0;
        float *sums = r.all[done.n - a][0], *to = y + FIRST(done.n) * row_y + 16 * block;
        if (done.u >= 0) {
            if (done.n == a) f = factors_of(scales, w + done.u * size + 8 * code_bytes(bits));
            now.rows = HEIGHT(done.n), now.by = x->large.scale + AT(done), now.sums = x->large.sums + 8 * AT(done);
            now.w = w + done.u * size, now.first = FIRST(done.n), now.u = done.u % units, now.far = &x->far, now.E = E;
            now.before = done.u % units ? sums : 0;
            now.y = ends && whole ? to : sums;
            if (ends && whole) now.row_y = row_y;
        }
        if (pair)
            take(bits, scales, 1, &now, &f, &r);
        else
            take(bits, scales, 0, &now, &f, &r);
        if (ends && !whole)
            for (int64_t t = 0; t < now.rows; t++) memcpy(to + t * row_y, sums + 16 * t, (count - 16 * block) * 4);
        done = next, next = then;
    }
#undef FIRST
#undef HEIGHT
#undef AT
}

#define CASE(name, BITS, SCALES) \
    static void run_##name(const uint8_t *w, int64_t count, const rows *x, int64_t a, int64_t b, int64_t E, float *y, \
                           int64_t row_y) { \
        run(BITS, SCALES, w, count, x, a, b, E, y, row_y); \
    }
CASE(FOUR_SUPER, 4, SUPER)
CASE(FIVE_SUPER, 5, SUPER)
CASE(SIX_SIXTEEN, 6, SIXTEEN)

void squares(int64_t format, const uint8_t *w, int64_t count, const rows *x, int64_t E, float *y, int64_t row_y) {
    const int64_t tiles = tiles_of(x->T), parts = (tiles + HIGH - 1) / HIGH;
    const int64_t block = E / 256 * unit_bytes(KINDS[format].bits, KINDS[format].scales);
    configure((x->T + tiles - 1) / tiles);
    for (int64_t o = 0; o < count; o += WIDE)
        for (int64_t i = 0; i < parts; i++) {
            const int64_t a = i * tiles / parts, b = (i + 1) * tiles / parts, n = count - o < WIDE ? count - o : WIDE;
            const uint8_t *from = w + o / 16 * block;
            if (format == FOUR_SUPER)
                run_FOUR_SUPER(from, n, x, a, b, E, y + o, row_y);
            else if (format == FIVE_SUPER)
                run_FIVE_SUPER(from, n, x, a, b, E, y + o, row_y);
            else
                run_SIX_SIXTEEN(from, n, x, a, b, E, y + o, row_y);
        }
    __asm__ volatile("tilerelease");
}
#endif
