// An LM head over clusters of ids; kernels/clusters.py defines it.
#pragma once
#include "products.h"

typedef struct {
    const matrix *weight, *centroids;  // [C R, E], ordered by cluster, and [C, E]
    const float *x, *norm;             // [T, E]; the weight [E] of an RMSNorm before the products, or 0
    const int64_t *ids;                // [C, R]
    const int64_t *positions;          // [T]; not read for greedy rows
    const double *temperature;         // for each run of rows; 0: greedy
    const uint64_t *seed;              // for each run of rows
    int64_t T, chosen, k, run;         // chosen: clusters that a row reads; run: rows that share these numbers
    double eps, cap;                   // cap: soft cap of the logits; 0: none
    int64_t *best;                     // [T, k] ids
    float *values, *sums;              // [T, k]; [T], log-sums of exponentials, or 0
    int64_t *refused;                  // set if an id that is read has more than 32 bits; 0: the ids are a model's
} clusters;

int64_t clusters_bytes(const clusters *c, int size); // scratch of a team of `size`
// Every member calls it after a meeting. The results are complete after the next meeting.
void search_clusters(const member *m, const clusters *c, char *scratch);
