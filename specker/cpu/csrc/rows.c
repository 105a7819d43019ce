// Norms and sums of single rows.
#include "layers.h"
#include "vector.h"
#include <math.h>

// y = RMSNorm(x) weight, or x itself without a weight.
void normalise(const float *x, const float *weight, float *y, int64_t E, float eps) {
    if (!weight) {
        memcpy(y, x, E * 4);
        return;
    }
    const float factor = 1.0f / sqrtf(dot(x, x, E) / (float)E + eps);
    for (int64_t e = 0; e < E; e++) y[e] = x[e] * factor * weight[e];
}

// x += delta + bias, or delta alone if the bias is 0.
void grow(float *x, const float *delta, const float *bias, int64_t E) {
    if (bias)
        for (int64_t e = 0; e < E; e++) x[e] += delta[e] + bias[e];
    else
        for (int64_t e = 0; e < E; e++) x[e] += delta[e];
}
