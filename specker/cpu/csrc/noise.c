// Gumbel noise by token id and position; kernels/noise.py defines it. Sixteen blocks of four ids at a time, so that the
// compiler uses vectors.
#include "noise.h"
#include <string.h>

#define N 16
#define STREAM 0x73706563u // kernels/noise.py

typedef float vf __attribute__((vector_size(64)));
typedef int32_t vi __attribute__((vector_size(64)));

static void philox(uint64_t seed, int64_t position, const uint32_t *block, uint32_t x[4][N]) {
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    for (int i = 0; i < N; i++)
        x[0][i] = block[i], x[1][i] = (uint32_t)position, x[2][i] = (uint32_t)((uint64_t)position >> 32), x[3][i] = STREAM;
    for (int round = 0; round < 10; round++, k0 += 0x9E3779B9, k1 += 0xBB67AE85)
        for (int i = 0; i < N; i++) {
            uint64_t a = (uint64_t)x[0][i] * 0xD2511F53, b = (uint64_t)x[2][i] * 0xCD9E8D57;
            uint32_t c1 = x[1][i], c3 = x[3][i];
            x[0][i] = (uint32_t)(b >> 32) ^ c1 ^ k0, x[1][i] = (uint32_t)b;
            x[2][i] = (uint32_t)(a >> 32) ^ c3 ^ k1, x[3][i] = (uint32_t)a;
        }
}

// The natural logarithm of 1 - less > 0; x is 1 - less, rounded.
static inline vf logarithm(vf x, vf less) {
    vi i = (vi)x - 0x3F3504F3; // sqrt(1/2)
    vi whole = i >> 23;
    vf e = __builtin_convertvector(whole, vf), m = (vf)((i & 0x7FFFFF) + 0x3F3504F3) - 1.0f;
    vi near = (whole == 0) & (less < 0.5f);
    m = (vf)(((vi)-less & near) | ((vi)m & ~near));
    vf y = m * 7.0376836292e-2f + -1.1514610310e-1f;
    y = y * m + 1.1676998740e-1f;
    y = y * m + -1.2420140846e-1f;
    y = y * m + 1.4249322787e-1f;
    y = y * m + -1.6668057665e-1f;
    y = y * m + 2.0000714765e-1f;
    y = y * m + -2.4999993993e-1f;
    y = y * m + 3.3333331174e-1f;
    vf square = m * m;
    y = e * -2.12194440e-4f + y * m * square;
    y = square * -0.5f + y;
    return e * 0.693359375f + (m + y);
}

static vf noise(const uint32_t *bits) {
    vf u;
    for (int i = 0; i < N; i++) u[i] = (float)bits[i];
    const vf most = (vf){0} + 0x1.fffffep-1f; // 1 - 2^-24
    u = (u + 0.5f) * 0x1p-32f;
    vi over = u > most;
    u = (vf)(((vi)most & over) | ((vi)u & ~over));
    vf x = -logarithm(1.0f - u, u);
    return -logarithm(x, (vf){0} + 1.0f);
}

static void of(uint64_t seed, int64_t position, const uint32_t *block, float out[4][N]) {
    uint32_t x[4][N];
    philox(seed, position, block, x);
    for (int lane = 0; lane < 4; lane++) {
        vf y = noise(x[lane]);
        memcpy(out[lane], &y, sizeof y);
    }
}

void gumbel_run(uint64_t seed, int64_t position, int64_t first, int64_t blocks, float *out) {
    for (int64_t b = 0; b < blocks; b += N) {
        uint32_t block[N];
        float y[4][N];
        for (int i = 0; i < N; i++) block[i] = (uint32_t)(first + b + i);
        of(seed, position, block, y);
        for (int64_t i = 0; i < N && b + i < blocks; i++)
            for (int lane = 0; lane < 4; lane++) out[4 * (b + i) + lane] = y[lane][i];
    }
}

void gumbel_ids(uint64_t seed, int64_t position, const int64_t *ids, int64_t count, float *out) {
    for (int64_t n = 0; n < count; n += N) {
        uint32_t block[N];
        float y[4][N];
        for (int i = 0; i < N; i++) block[i] = n + i < count ? (uint32_t)(ids[n + i] >> 2) : 0;
        of(seed, position, block, y);
        for (int64_t i = 0; i < N && n + i < count; i++) out[n + i] = y[ids[n + i] & 3][i];
    }
}
