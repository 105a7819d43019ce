#pragma once
#include <stdint.h>
// The noise of ids 4 b .. 4 b + 3, for `blocks` consecutive b from `first`: out [blocks, 4].
void gumbel_run(uint64_t seed, int64_t position, int64_t first, int64_t blocks, float *out);
void gumbel_ids(uint64_t seed, int64_t position, const int64_t *ids, int64_t count, float *out); // the noise of any ids
