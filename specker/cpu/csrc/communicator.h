// Exchanges between processes of one machine that hold parts of a model, through memory that all of them map.
#pragma once
#include "team.h"
#include <stdatomic.h>

typedef struct {
    char *memory;       // a line for each rank, then two slots for each
    int64_t rank, size;
    int64_t room;       // bytes of a slot: what a rank sends at once
    int64_t file;       // that is mapped; while a rank lives it holds a lock on the byte of its number
    int64_t limit;      // nanoseconds to wait for a rank
    int64_t sent;       // exchanges so far
    atomic_llong lost;  // a rank ended or did not answer: from then on nothing waits, and what is received is garbage
} communicator;

// x [T, E], plus the bias [E] unless it is 0, = the sum of all ranks' x and biases, in the order of ranks.
void sum_ranks(const member *m, communicator *c, float *x, const float *bias, int64_t T, int64_t E);
// out [size, bytes] = every rank's x. Runs in the calling thread.
void gather_ranks(communicator *c, const void *x, int64_t bytes, void *out);
// Of N parts a rank has the neighbouring ones from `part_of` its number to that of the next rank.
int64_t part_of(const communicator *c, int64_t rank, int64_t N);
// x [N, count]: every rank gets all parts.
void share_parts(const member *m, communicator *c, float *x, int64_t N, int64_t count);
