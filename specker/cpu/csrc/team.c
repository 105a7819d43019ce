// Threads sleep between calls. Within a call they spin at barriers, which are microseconds apart. If one of them loses
// its processor to another process, the others soon sleep, so that it can continue on one of their processors.
#define _GNU_SOURCE
#include "team.h"
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>

// Nanoseconds that a thread spins before it sleeps: at a barrier (about the time to wake it), and for the next call.
#define MEET 30000
#define AWAKE 1000000

struct team {
    pthread_mutex_t turn, lock; // turn: one call at a time; lock: guards the fields below
    pthread_cond_t begun, met;
    work *function;
    void *arg;
    char *scratch;
    int64_t room;
    int size, sleeping, closing, count, cpus[1024];
    _Alignas(64) atomic_long call;    // number of the latest call
    _Alignas(64) atomic_long arrived; // threads that have reached the current barrier
    _Alignas(64) atomic_long meeting; // barriers passed
    _Alignas(64) atomic_long taken;   // numbers that `next` has returned
    _Alignas(64) atomic_int waiting;  // threads that sleep at a barrier
};

typedef struct {
    team *t;
    int me;
} start;

int64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

// Spins while *x == old, for some nanoseconds. Returns whether it has changed.
static int spin(atomic_long *x, long old, int64_t most) {
    for (int64_t end = 0;;) {
        for (int n = 0; n < 64; n++) {
            if (atomic_load_explicit(x, memory_order_acquire) != old) return 1;
            pause_();
        }
        if (!end) end = now() + most;
        if (now() > end) return 0;
    }
}

void meet(const member *m) {
    team *t = m->team;
    long meeting = atomic_load_explicit(&t->meeting, memory_order_acquire);
    if (atomic_fetch_add_explicit(&t->arrived, 1, memory_order_acq_rel) == t->size - 1) {
        atomic_store_explicit(&t->taken, 0, memory_order_relaxed);
        atomic_store_explicit(&t->arrived, 0, memory_order_relaxed);
        // Sequentially consistent, like the sleepers' accesses: either they see the new number, or this thread sees them.
        atomic_store(&t->meeting, meeting + 1);
        if (atomic_load(&t->waiting)) {
            pthread_mutex_lock(&t->lock);
            pthread_cond_broadcast(&t->met);
            pthread_mutex_unlock(&t->lock);
        }
        return;
    }
    if (spin(&t->meeting, meeting, MEET)) return;
    pthread_mutex_lock(&t->lock);
    atomic_fetch_add(&t->waiting, 1);
    while (atomic_load(&t->meeting) == meeting) pthread_cond_wait(&t->met, &t->lock);
    atomic_fetch_sub(&t->waiting, 1);
    pthread_mutex_unlock(&t->lock);
}

int64_t next(const member *m) { return atomic_fetch_add_explicit(&m->team->taken, 1, memory_order_relaxed); }

static void *serve(void *arg) {
    start s = *(start *)arg;
    team *t = s.t;
    free(arg);
#ifdef __linux__
    if (t->count) { // OpenMP may have bound the creating thread to one processor
        cpu_set_t set;
        CPU_ZERO(&set);
        for (int i = 0; i < t->count; i++) CPU_SET(t->cpus[i], &set);
        pthread_setaffinity_np(pthread_self(), sizeof set, &set);
    }
#endif
    member m = {t, s.me, t->size, 0};
    for (long seen = 0;; seen++) {
        if (!spin(&t->call, seen, AWAKE)) {
            pthread_mutex_lock(&t->lock);
            t->sleeping++;
            while (atomic_load_explicit(&t->call, memory_order_acquire) == seen) pthread_cond_wait(&t->begun, &t->lock);
            t->sleeping--;
            pthread_mutex_unlock(&t->lock);
        }
        if (t->closing) return 0;
        m.scratch = t->scratch;
        t->function(&m, t->arg);
        meet(&m);
    }
}

int team_run(team *t, work *f, void *arg, int64_t scratch) {
    pthread_mutex_lock(&t->turn);
    if (scratch > t->room) {
        free(t->scratch);
        t->room = 0;
        t->scratch = aligned_alloc(64, (scratch + scratch / 4 + 63) / 64 * 64);
        if (!t->scratch) return pthread_mutex_unlock(&t->turn), 0;
        t->room = scratch + scratch / 4;
    }
    t->function = f, t->arg = arg;
    if (t->size > 1) {
        pthread_mutex_lock(&t->lock);
        atomic_fetch_add_explicit(&t->call, 1, memory_order_release);
        if (t->sleeping) pthread_cond_broadcast(&t->begun);
        pthread_mutex_unlock(&t->lock);
    }
    member m = {t, 0, t->size, t->scratch};
    f(&m, arg);
    meet(&m);
    pthread_mutex_unlock(&t->turn);
    return 1;
}

// A team of `size` threads, the caller of each function included; they may run on `cpus` (count 0: wherever the caller
// may). Returns 0 if the system gives no more threads or memory.
team *team_new(int size, const int *cpus, int count) {
    team *t = aligned_alloc(64, (sizeof(team) + 63) / 64 * 64);
    if (!t) return 0;
    *t = (team){.size = size, .count = count < 1024 ? count : 0};
    for (int i = 0; i < t->count; i++) t->cpus[i] = cpus[i];
    pthread_mutex_init(&t->turn, 0), pthread_mutex_init(&t->lock, 0);
    pthread_cond_init(&t->begun, 0), pthread_cond_init(&t->met, 0);
    for (int n = 1; n < size; n++) {
        start *s = malloc(sizeof(start));
        pthread_t thread;
        *s = (start){t, n};
        if (pthread_create(&thread, 0, serve, s)) {
            free(s);
            t->closing = 1; // the threads that exist end; `t` is not freed, since they use it
            pthread_mutex_lock(&t->lock);
            atomic_fetch_add(&t->call, 1), pthread_cond_broadcast(&t->begun);
            pthread_mutex_unlock(&t->lock);
            return 0;
        }
        pthread_detach(thread);
    }
    return t;
}
