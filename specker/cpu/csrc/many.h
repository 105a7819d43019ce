// The parts of attention of many rows over K and V in float32, or widened to it. Rows stand side by side, `lanes` of them
// with those that fill the last register, and columns below one another: y [S, lanes].
#pragma once
#include <stdint.h>

#define MANY 24       // rows from which this is faster
#define MANY_BLOCK 64 // columns whose scores and shares are computed at once: the caches hold them

int64_t lanes_of(int64_t rows);
// Rows x [rows, D] in the order of `scores_of_many`: to [lanes, D].
void spread(const float *x, int64_t rows, int64_t D, float *to);
// y = the products of S columns of K, `row_k` floats apart, with the rows that `spread` wrote.
void scores_of_many(const float *k, int64_t row_k, int64_t S, const float *q, int64_t lanes, int64_t D, float *y);
// top [lanes] = the larger of top and of each row's scale y, rounded; shrink = 2^(top before - top). Returns whether any rose.
int raise_many(const float *y, int64_t S, int64_t lanes, float scale, float *top, float *shrink);
// y = 2^(scale y - top); adds them to sum [lanes] in the order of the columns.
void shares_of_many(float *y, int64_t S, int64_t lanes, const float *top, float scale, float *sum);
// y [rows, D] += the shares p [S, lanes] times V [S, D], in the order of the columns.
void values_of_many(const float *p, const float *v, int64_t row_v, int64_t S, int64_t rows, int64_t D, float *y);
