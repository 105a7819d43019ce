// A team of threads that run one function together and meet at barriers.
#pragma once
#include <stdint.h>

typedef struct team team;
typedef struct {
    team *team;
    int me, size;
    char *scratch; // shared memory of this call
} member;
typedef void work(const member *m, void *arg);

// Every member runs f; returns when all have. `scratch`: bytes of memory for the call. Returns 0 if memory is too small.
int team_run(team *t, work *f, void *arg, int64_t scratch);
void meet(const member *m);                 // waits for all members, then the counter of `next` is 0
int64_t next(const member *m);              // 0, 1, 2, ..: a number that no other member gets before the next `meet`

static inline void pause_(void) { // between two looks at a number that another thread writes
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

int64_t now(void); // nanoseconds
