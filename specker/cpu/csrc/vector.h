// Vector registers of 16, 8 or 4 float32 lanes, and the few instructions that C cannot express. The level is chosen by
// the compiler flags (build.py): AVX-512, AVX2, NEON with dot products, or portable C.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define LANES 16
#elif defined(__AVX2__)
#define LANES 8
#else
#define LANES 4
#endif
#define SIZE (4 * LANES)     // bytes of a register
#define ROWS 16              // rows of a weight that are interleaved (packed.py)
#define PARTS (ROWS / LANES) // registers for one number of each interleaved row
#define INLINE static inline __attribute__((always_inline))

typedef float vf __attribute__((vector_size(SIZE)));
typedef int32_t vi __attribute__((vector_size(SIZE)));
typedef uint32_t vu __attribute__((vector_size(SIZE)));
typedef uint16_t vh __attribute__((vector_size(SIZE)));
typedef int32_t word_any __attribute__((aligned(1), may_alias));
typedef vf vf_any __attribute__((aligned(1), may_alias));
typedef vi vi_any __attribute__((aligned(1), may_alias));
typedef vh vh_any __attribute__((aligned(1), may_alias));

INLINE vf load(const void *p) { return *(const vf_any *)p; }
INLINE void store(void *p, vf x) { *(vf_any *)p = x; }
INLINE vh bytes(const void *p) { return *(const vh_any *)p; }
INLINE vi lanes(const void *p) { return *(const vi_any *)p; }
INLINE vf splat(float x) { return x - (vf){0}; }
INLINE int32_t word(const void *p) {
    int32_t x;
    memcpy(&x, p, 4);
    return x;
}

// a b + c with one rounding where the processor can. Contraction is off, so every build rounds in the same places.
INLINE vf fma_(vf a, vf b, vf c) {
#if LANES == 16
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif LANES == 8
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

INLINE vf to_float(vi x) { return __builtin_convertvector(x, vf); }
INLINE vi to_integer(vf x) { return __builtin_convertvector(x, vi); } // towards zero

INLINE vf largest(vf a, vf b) {
#if LANES == 16
    return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif LANES == 8
    return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#else
    vi more = a > b;
    return (vf)(((vi)a & more) | ((vi)b & ~more));
#endif
}

// The sum of the lanes: adds the halves until one lane is left.
INLINE float total(vf x) {
#if LANES >= 8
#if LANES == 16
    __m256 eight = _mm256_add_ps(_mm512_castps512_ps256((__m512)x), _mm512_extractf32x8_ps((__m512)x, 1));
#else
    __m256 eight = (__m256)x;
#endif
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
#else
    float a[LANES];
    store(a, x);
    for (int n = LANES / 2; n; n /= 2)
        for (int i = 0; i < n; i++) a[i] += a[i + n];
    return a[0];
#endif
}

// The sum of 16 lanes in PARTS registers, in the same order.
INLINE float total16(const vf *x) {
    vf sum[PARTS];
    for (int p = 0; p < PARTS; p++) sum[p] = x[p];
    for (int n = PARTS / 2; n; n /= 2)
        for (int p = 0; p < n; p++) sum[p] += sum[p + n];
    return total(sum[0]);
}

// The sum of a b [E]; E is a multiple of 16.
__attribute__((unused)) static float dot(const float *a, const float *b, int64_t E) {
    vf sum[PARTS];
    for (int p = 0; p < PARTS; p++) sum[p] = splat(0);
    for (int64_t e = 0; e < E; e += 16)
        for (int p = 0; p < PARTS; p++) sum[p] = fma_(load(a + e + p * LANES), load(b + e + p * LANES), sum[p]);
    return total16(sum);
}

// `total16` of four sums, in the same order of additions; shares the shuffles.
INLINE void totals16(vf x[4][PARTS], float *y) {
#if LANES == 16
#define PAIR(a, b) /* the lower halves of a and b plus the upper ones */ \
    _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xEE))
    __m512 ab = PAIR((__m512)x[0][0], (__m512)x[1][0]), cd = PAIR((__m512)x[2][0], (__m512)x[3][0]);
#undef PAIR
    __m512 four = _mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xDD));
    __m512 two = _mm512_add_ps(four, _mm512_permute_ps(four, 0x4E));
    __m512 one = _mm512_add_ps(two, _mm512_permute_ps(two, 0xB1));
    _mm_storeu_ps(y, _mm512_castps512_ps128(_mm512_maskz_compress_ps(0x1111, one)));
#elif LANES == 8
#define HALF(i) ((__m256)(x[i][0] + x[i][1]))
#define PAIR(a, b) _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31))
    __m256d ab = _mm256_castps_pd(PAIR(HALF(0), HALF(1))), cd = _mm256_castps_pd(PAIR(HALF(2), HALF(3)));
#undef PAIR
#undef HALF
    __m256 low = _mm256_castpd_ps(_mm256_unpacklo_pd(ab, cd)), high = _mm256_castpd_ps(_mm256_unpackhi_pd(ab, cd));
    __m256 two = _mm256_add_ps(low, high), one = _mm256_add_ps(two, _mm256_permute_ps(two, 0xB1)); // 0, 2 | 1, 3
    __m128 even = _mm256_castps256_ps128(one), odd = _mm256_extractf128_ps(one, 1);
    _mm_storeu_ps(y, _mm_unpacklo_ps(_mm_shuffle_ps(even, even, 0xE8), _mm_shuffle_ps(odd, odd, 0xE8)));
#else
    for (int i = 0; i < 4; i++) y[i] = total16(x[i]);
#endif
}

INLINE float highest(vf x) {
#if LANES == 16
    return _mm512_reduce_max_ps((__m512)x);
#else
    float a[LANES], top;
    store(a, x);
    top = a[0];
    for (int i = 1; i < LANES; i++) top = a[i] > top ? a[i] : top;
    return top;
#endif
}

// exp(x) for x <= 0 within 2e-7; 0 below -87. 2^f on [-0.5, 0.5] is a fit at Chebyshev nodes.
INLINE vf power(vf x) {
    const vf magic = splat(12582912.0f); // 1.5 2^23: adding it rounds to an integer
    vf t = largest(x * 1.4426950408889634f, splat(-127.0f)), n = t + magic;
    vi whole = (vi)n - 0x4b400000;
    vf f = t - (n - magic), p = splat(1.5469732e-4f);
    p = fma_(p, f, splat(1.3400432e-3f));
    p = fma_(p, f, splat(9.6180256e-3f));
    p = fma_(p, f, splat(5.5503272e-2f));
    p = fma_(p, f, splat(2.4022651e-1f));
    p = fma_(p, f, splat(6.9314721e-1f));
    p = fma_(p, f, splat(1.0f));
    return p * (vf)((whole + 127) << 23);
}

#define LOWEST (-1e6f) // an exponent below all of scores

// The nearest integer to x, ties to even, for |x| < 2^22.
INLINE float nearest(float x) { return x + 12582912.0f - 12582912.0f; }

// 2^(x - top) for integers `top` that are no less than x, rounded; 0 below 2^-126. The bits of the result's mantissa do
// not depend on `top`, so what was summed under a lower one can be rescaled without error.
INLINE vf power_below(vf x, vf top) {
    const vf magic = splat(12582912.0f);
    vf t = largest(x, top - 127.0f), n = t + magic, whole = n - magic, f = t - whole, p = splat(1.5469732e-4f);
    p = fma_(p, f, splat(1.3400432e-3f));
    p = fma_(p, f, splat(9.6180256e-3f));
    p = fma_(p, f, splat(5.5503272e-2f));
    p = fma_(p, f, splat(2.4022651e-1f));
    p = fma_(p, f, splat(6.9314721e-1f));
    p = fma_(p, f, splat(1.0f));
    return p * (vf)(((vi)(whole - top + magic) - (0x4b400000 - 127)) << 23);
}

// 2^n for whole n <= 0; 0 below 2^-126.
INLINE float two_to(float n) {
    const union { uint32_t u; float f; } x = {.u = n < -126 ? 0 : (uint32_t)((int32_t)n + 127) << 23};
    return x.f;
}

// A bit for each lane of x that is at least `least`; none for a NaN.
INLINE unsigned at_least(vf x, float least) {
#if LANES == 16
    return _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(least), _CMP_GE_OQ);
#elif LANES == 8
    return (unsigned)_mm256_movemask_ps(_mm256_cmp_ps((__m256)x, _mm256_set1_ps(least), _CMP_GE_OQ));
#else
    unsigned bits = 0;
    for (int i = 0; i < LANES; i++) bits |= (unsigned)(x[i] >= least) << i;
    return bits;
#endif
}

// The low bytes of the lanes.
INLINE void narrow_bytes(int8_t *to, vi x) {
#if LANES == 16
    _mm_storeu_si128((__m128i *)to, _mm512_cvtepi32_epi8((__m512i)x));
#else
    for (int i = 0; i < LANES; i++) to[i] = (int8_t)x[i];
#endif
}

INLINE float half_to_float(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, rest = (uint32_t)(h & 0x7fff) << 13;
    union { uint32_t u; float f; } x, scale = {.u = 0x77800000}; // 2^112 moves the exponent
    x.u = rest;
    x.f *= scale.f;
    if ((h & 0x7c00) == 0x7c00) x.u |= 0x7f800000; // infinity and NaN
    x.u |= sign;
    return x.f;
}

// LANES float16 as float32.
INLINE vf halves(const void *p) {
#if LANES == 16
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#elif LANES == 8
    return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
#else
    vf x = {0};
    uint16_t h[LANES];
    memcpy(h, p, sizeof h);
    for (int i = 0; i < LANES; i++) x[i] = half_to_float(h[i]);
    return x;
#endif
}

// LANES bytes as integers.
INLINE vi integers(const void *p) {
#if LANES == 16
    return (vi)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p));
#elif LANES == 8
    return (vi)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p));
#else
    vi x = {0};
    for (int i = 0; i < LANES; i++) x[i] = ((const uint8_t *)p)[i];
    return x;
#endif
}

// The same of signed bytes.
INLINE vi signed_integers(const void *p) {
#if LANES == 16
    return (vi)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p));
#elif LANES == 8
    return (vi)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p));
#else
    vi x = {0};
    for (int i = 0; i < LANES; i++) x[i] = ((const int8_t *)p)[i];
    return x;
#endif
}

INLINE vf unsigned_bytes(const void *p) { return to_float(integers(p)); }
INLINE vf signed_bytes(const void *p) { return to_float(signed_integers(p)); }

// The bytes table[i] for bytes i of 0 to 15.
INLINE vh looked_up(const uint8_t table[16], vh i) {
#if LANES == 16
    return (vh)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)table)), (__m512i)i);
#elif LANES == 8
    return (vh)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)table)), (__m256i)i);
#elif defined(__aarch64__)
    return (vh)vqtbl1q_u8(vld1q_u8(table), (uint8x16_t)i);
#else
    uint8_t x[SIZE];
    memcpy(x, &i, SIZE);
    for (int n = 0; n < SIZE; n++) x[n] = table[x[n]];
    memcpy(&i, x, SIZE);
    return i;
#endif
}

// LANES bfloat16 as float32.
INLINE vf wide(const void *p) {
#if LANES == 16
    return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16);
#elif LANES == 8
    return (vf)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16);
#else
    vu x = {0};
    uint16_t h[LANES];
    memcpy(h, p, sizeof h);
    for (int i = 0; i < LANES; i++) x[i] = (uint32_t)h[i] << 16;
    return (vf)x;
#endif
}

// To the nearest bfloat16, ties to even; NaN is not expected.
INLINE uint16_t narrow(float x) {
    uint32_t u;
    memcpy(&u, &x, 4);
    return (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

#if (LANES == 16 && !defined(__AVX512VNNI__)) || (LANES == 8 && !defined(__AVXVNNI__))
#define BY_PAIRS // no instruction adds four products: add two in 16 bits, which saturate, then add those in 32 bits
INLINE vh pairs(vh u, vi s) {
#if LANES == 16
    return (vh)_mm512_maddubs_epi16((__m512i)u, (__m512i)s);
#else
    return (vh)_mm256_maddubs_epi16((__m256i)u, (__m256i)s);
#endif
}

INLINE vi sum_pairs(vh x) {
#if LANES == 16
    return (vi)_mm512_madd_epi16((__m512i)x, _mm512_set1_epi16(1));
#else
    return (vi)_mm256_madd_epi16((__m256i)x, _mm256_set1_epi16(1));
#endif
}
#endif

// acc + u s in each lane: four unsigned bytes u <= 63 times four signed bytes s, exact.
#if LANES == 4 && !defined(__ARM_FEATURE_DOTPROD)
__attribute__((noinline, unused))
#else
__attribute__((always_inline)) inline
#endif
static vi dot4(vi acc, vh u, vi s) {
#if LANES == 16 && defined(__AVX512VNNI__)
    return (vi)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)u, (__m512i)s);
#elif LANES == 8 && defined(__AVXVNNI__)
    return (vi)_mm256_dpbusd_avx_epi32((__m256i)acc, (__m256i)u, (__m256i)s);
#elif defined(BY_PAIRS)
    return acc + sum_pairs(pairs(u, s));
#elif defined(__ARM_FEATURE_DOTPROD)
    return (vi)vdotq_s32((int32x4_t)acc, (int8x16_t)u, (int8x16_t)s);
#else
    uint8_t a[SIZE];
    int8_t b[SIZE];
    memcpy(a, &u, SIZE), memcpy(b, &s, SIZE);
    for (int i = 0; i < LANES; i++)
        for (int c = 0; c < 4; c++) acc[i] += a[4 * i + c] * b[4 * i + c];
    return acc;
#endif
}

// `dot4` for bytes q + 128 with -128 <= q <= 127. The products are those of q + 128 (ZERO8 is 128), or of q (ZERO8 is 0)
// because not every processor multiplies eight unsigned bits without saturation.
#if (LANES == 16 && defined(__AVX512VNNI__)) || (LANES == 8 && defined(__AVXVNNI__))
#define ZERO8 128
INLINE vi dot8(vi acc, vh u, vi s) { return dot4(acc, u, s); }
#else
#define ZERO8 0
#if LANES == 4 && !defined(__ARM_FEATURE_DOTPROD)
__attribute__((noinline, unused))
#else
__attribute__((always_inline)) inline
#endif
static vi dot8(vi acc, vh u, vi s) {
    vh q = u ^ 0x8080;
#if LANES == 16
    __mmask64 negative = _mm512_movepi8_mask((__m512i)q);
    __m512i t = _mm512_mask_sub_epi8((__m512i)s, negative, _mm512_setzero_si512(), (__m512i)s);
    return dot4(acc, (vh)_mm512_abs_epi8((__m512i)q), (vi)t);
#elif LANES == 8
    __m256i t = _mm256_sign_epi8((__m256i)s, (__m256i)q);
    return dot4(acc, (vh)_mm256_abs_epi8((__m256i)q), (vi)t);
#elif defined(__ARM_FEATURE_DOTPROD)
    return dot4(acc, q, s);
#else
    int8_t a[SIZE], b[SIZE];
    memcpy(a, &q, SIZE), memcpy(b, &s, SIZE);
    for (int i = 0; i < LANES; i++)
        for (int c = 0; c < 4; c++) acc[i] += a[4 * i + c] * b[4 * i + c];
    return acc;
#endif
}
#endif

// `dot4` and `dot8` where all lanes have the same four signed bytes at s.
INLINE vi dot4_all(vi acc, vh u, const int8_t *s) {
#if LANES == 16 && defined(__AVX512VNNI__)
    // gcc loads the number into a register first: twice the instructions, and one register less
    __asm__("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(acc) : "v"(u), "m"(*(const word_any *)s));
    return acc;
#else
    return dot4(acc, u, (vi){0} + word(s));
#endif
}

INLINE vi dot8_all(vi acc, vh u, const int8_t *s) { return ZERO8 ? dot4_all(acc, u, s) : dot8(acc, u, (vi){0} + word(s)); }

// The largest of z [n]; a NaN counts as the lowest.
__attribute__((unused)) static float highest_of(const float *z, int64_t n) {
    vf most = splat(-INFINITY);
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) most = largest(load(z + i), most);
    float top = highest(most);
    for (; i < n; i++) top = z[i] > top ? z[i] : top;
    return top;
}

INLINE void prefetch(const void *p) { __builtin_prefetch(p, 0, 3); }
// For what is read after some thousand cycles: not into the first cache, which other data need until then.
INLINE void prefetch_far(const void *p) { __builtin_prefetch(p, 0, 2); }
