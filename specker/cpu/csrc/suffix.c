// The index of strategy `lookup`. suffixes.py says what it finds, and has the same in Python.
//
// Texts lie end to end in one array; a negative number ends each. A place is the position of a token, and the n-gram
// before it is what it follows. For each of a few lengths n, a table with open addressing has the latest place after each
// n-gram, and `before` leads from there to the earlier ones, as in LZ77. The table compares the tokens themselves, so two
// n-grams never share a chain.
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { LENGTHS = 4, SLOTS = 64, PLACES = 256, NODES = 255 };

typedef struct {
    int64_t n, used, bits; // tokens of a gram; entries of the table, which has 2^bits slots
    int32_t *latest;       // [2^bits], 0: free, since no gram stands before place 0
    int32_t *before;       // [capacity], 0: the place is the first one after its gram
} grams;

typedef struct {
    int32_t *tokens;
    int64_t count, capacity, run, lengths; // run: tokens since the last end of a text
    grams grams[LENGTHS];                  // by n, ascending
} suffix_index;

typedef struct {
    int32_t place, matched;
} match;

static uint64_t slot_of(const grams *g, const int32_t *gram) {
    uint64_t h = 0;
    for (int64_t i = 0; i < g->n; i++) {
        h = (h ^ (uint32_t)gram[i]) * 0x9E3779B97F4A7C15u;
        h ^= h >> 29;
    }
    return (h * 0x9E3779B97F4A7C15u) >> (64 - g->bits);
}

// The slot of a gram, or the free one where it belongs.
static int32_t *slot(const suffix_index *x, const grams *g, const int32_t *gram) {
    const uint64_t mask = (1ull << g->bits) - 1;
    uint64_t i = slot_of(g, gram);
    while (g->latest[i] && memcmp(x->tokens + g->latest[i] - g->n, gram, g->n * 4)) i = (i + 1) & mask;
    return g->latest + i;
}

static int widen(suffix_index *x, grams *g) {
    int32_t *old = g->latest;
    const int64_t size = old ? 1ll << g->bits : 0;
    g->latest = calloc(size ? 2 * size : SLOTS, 4);
    if (!g->latest) {
        g->latest = old;
        return 0;
    }
    while (1ll << g->bits < (size ? 2 * size : SLOTS)) g->bits++;
    for (int64_t i = 0; i < size; i++)
        if (old[i]) *slot(x, g, x->tokens + old[i] - g->n) = old[i];
    free(old);
    return 1;
}

static int longer(int32_t **array, int64_t capacity) {
    int32_t *grown = realloc(*array, capacity * 4);
    if (grown) *array = grown;
    return grown != NULL;
}

static int reserve(suffix_index *x, int64_t count) {
    if (count > INT32_MAX) return 0;
    if (count > x->capacity) {
        const int64_t more = x->capacity + x->capacity / 4, capacity = count > more ? count : more;
        if (!longer(&x->tokens, capacity)) return 0;
        for (int64_t i = 0; i < x->lengths; i++)
            if (!longer(&x->grams[i].before, capacity)) return 0;
        x->capacity = capacity;
    }
    return 1;
}

void suffix_free(suffix_index *x) {
    for (int64_t i = 0; i < x->lengths; i++) {
        free(x->grams[i].latest);
        free(x->grams[i].before);
    }
    free(x->tokens);
    free(x);
}

// lengths: up to LENGTHS lengths of grams, ascending. NULL without memory.
suffix_index *suffix_new(const int64_t *lengths, int64_t count) {
    suffix_index *x = calloc(1, sizeof(suffix_index));
    if (!x) return NULL;
    x->lengths = count;
    int sound = 1;
    for (int64_t i = 0; i < count; i++) {
        x->grams[i].n = lengths[i];
        sound = sound && widen(x, x->grams + i);
    }
    if (sound) return x;
    suffix_free(x);
    return NULL;
}

// Appends tokens; a negative one ends a text. The grams before each are indexed, so the last gram of the text is not: it
// must not find itself. 0 without memory, or beyond 2^31 tokens.
int suffix_append(suffix_index *x, const int32_t *tokens, int64_t count) {
    if (!reserve(x, x->count + count)) return 0;
    for (int64_t i = 0; i < count; i++) {
        const int64_t place = x->count;
        for (int64_t j = 0; tokens[i] >= 0 && j < x->lengths; j++) {
            grams *g = x->grams + j;
            if (x->run < g->n) break;
            if (4 * g->used > 3ll << g->bits && !widen(x, g)) return 0;
            int32_t *latest = slot(x, g, x->tokens + place - g->n);
            g->used += !*latest;
            g->before[place] = *latest;
            *latest = (int32_t)place;
        }
        x->tokens[x->count++] = tokens[i];
        x->run = tokens[i] < 0 ? 0 : x->run + 1;
    }
    return 1;
}

int64_t suffix_bytes(const suffix_index *x) {
    int64_t bytes = sizeof(suffix_index) + x->capacity * 4 * (1 + x->lengths);
    for (int64_t i = 0; i < x->lengths; i++) bytes += 4ll << x->grams[i].bits;
    return bytes;
}

// The places after the suffixes of tail [length], up to `walk` for each length of grams, the longest and then the latest
// first. `all`: also those of shorter grams, if a longer one has places.
static int64_t places_of(
    const suffix_index *x, const int32_t *tail, int64_t length, int64_t most, int64_t walk, int all, match *out
) {
    int64_t count = 0, above = most + 1; // matches of `above` tokens or more were seen with longer grams
    for (int64_t j = x->lengths - 1; j >= 0 && (all || !count); j--) {
        const grams *g = x->grams + j;
        if (g->n > length) continue;
        int64_t left = walk;
        for (int32_t p = *slot(x, g, tail + length - g->n); p && left; p = g->before[p], left--) {
            int64_t m = g->n;
            while (m < most && m < length && m < p && x->tokens[p - 1 - m] == tail[length - 1 - m]) m++;
            if (m < above) out[count++] = (match){p, (int32_t)m};
        }
        above = g->n;
    }
    return count;
}

typedef struct {
    int32_t parent, token, depth, begin, end; // a possible node; places[begin..end) follow its path, the latest first
} branch;

typedef struct {
    const suffix_index *x;
    int32_t places[PLACES];
    branch open[PLACES]; // each place is in one of them at most
    int64_t count;
} trie;

// Divides the places that follow a path of `depth` tokens by their next token.
static void divide(trie *t, int32_t row, int32_t depth, int32_t begin, int32_t end) {
    int32_t others[PLACES];
    while (begin < end) {
        const int64_t at = t->places[begin] + (int64_t)depth;
        const int32_t token = at < t->x->count ? t->x->tokens[at] : -1;
        int32_t same = begin, count = 0;
        for (int32_t i = begin; i < end; i++) {
            const int64_t next = t->places[i] + (int64_t)depth;
            const int32_t its = next < t->x->count ? t->x->tokens[next] : -1;
            if (its == token || (its < 0 && token < 0))
                t->places[same++] = t->places[i];
            else
                others[count++] = t->places[i];
        }
        memcpy(t->places + same, others, count * 4);
        if (token >= 0) t->open[t->count++] = (branch){row, token, depth + 1, begin, same};
        begin = same;
    }
}

// The draft after a text that ends with tail [length]: tokens and parents (rows) [nodes]; about: the length of the match
// and its latest place, 0 without one. Returns the number of nodes.
int64_t suffix_draft(
    const suffix_index *x, const int32_t *tail, int64_t length, int64_t most, int64_t walk, int64_t depth, int64_t nodes,
    int64_t width, int32_t *tokens, int32_t *parents, int32_t *about
) {
    match found[PLACES];
    trie t = {.x = x};
    uint8_t continued[NODES + 1] = {0};
    int64_t size = 0, paths = 0;
    const int64_t count = places_of(x, tail, length, most, walk, width > 1, found);
    int32_t longest = 0;
    about[0] = about[1] = 0;
    for (int64_t i = 0; i < count; i++)
        if (found[i].matched > longest) longest = about[0] = found[i].matched, about[1] = found[i].place;
    for (int32_t matched = longest; matched > 0 && size < nodes && (paths < width || !size); matched--) {
        int32_t here = 0;
        for (int64_t i = 0; i < count; i++)
            if (found[i].matched == matched) t.places[here++] = found[i].place;
        t.count = 0;
        divide(&t, 0, 0, 0, here);
        while (t.count && size < nodes) {
            int64_t best = 0;
            for (int64_t i = 1; i < t.count; i++) {
                const int64_t more = (t.open[i].end - t.open[i].begin) - (t.open[best].end - t.open[best].begin);
                if (more > 0 || (!more && t.places[t.open[i].begin] > t.places[t.open[best].begin])) best = i;
            }
            const branch b = t.open[best];
            t.open[best] = t.open[--t.count];
            int64_t row = 1;
            while (row <= size && (parents[row - 1] != b.parent || tokens[row - 1] != b.token)) row++;
            if (row > size) {
                const int forks = continued[b.parent] || (!b.parent && !size);
                if (forks && paths == width) continue;
                paths += forks;
                continued[b.parent] = 1;
                tokens[size] = b.token;
                parents[size++] = b.parent;
            }
            if (b.depth < depth) divide(&t, (int32_t)row, b.depth, b.begin, b.end);
        }
    }
    return size;
}

// Appends the next tokens of the last text, and finds its match: the tokens of the match in the upper half, those of the
// chain of up to `nodes` after it in the lower one. -1 without memory.
int64_t suffix_follow(
    suffix_index *x, const int32_t *tokens, int64_t count, int64_t most, int64_t walk, int64_t nodes
) {
    int32_t chain[NODES], parents[NODES], about[2];
    if (!suffix_append(x, tokens, count)) return -1;
    const int64_t length = x->run < most ? x->run : most, chained = nodes < NODES ? nodes : NODES;
    const int32_t *tail = x->tokens + x->count - length;
    const int64_t size = suffix_draft(x, tail, length, most, walk, chained, chained, 1, chain, parents, about);
    return size ? (int64_t)about[0] << 32 | size : 0;
}
