// A rank writes to its slot and then counts the exchange; the others wait for the count and read the slot. Exchanges use
// the two slots of a rank in turn: a rank that sends exchange n + 2 has received n + 1, which the others sent after they
// had received n.
#define _GNU_SOURCE
#include "communicator.h"
#include <fcntl.h>
#include <sched.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

// Who waits spins, so many nanoseconds, then lets other threads have the processor, and then naps.
#define SPINNING 20000
#define YIELDING 1000000
#define NAP 50000
#define LINE 128 // bytes: no two ranks write to one, nor to neighbours that are fetched together

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

static atomic_llong *count_of(const communicator *c, int64_t rank) { return (atomic_llong *)(c->memory + rank * LINE); }

static char *slot(const communicator *c, int64_t exchange, int64_t rank) {
    return c->memory + c->size * LINE + (exchange % 2 * c->size + rank) * c->room;
}

static int has_sent(const communicator *c, int64_t exchange, int64_t rank) {
    return atomic_load_explicit(count_of(c, rank), memory_order_acquire) > exchange;
}

static void send_slot(communicator *c, int64_t exchange) {
    c->sent = exchange + 1;
    atomic_store_explicit(count_of(c, c->rank), exchange + 1, memory_order_release);
}

// Whether the rank's process has ended: the system then releases its lock.
static int has_ended(const communicator *c, int64_t rank) {
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = rank, .l_len = 1};
    return fcntl((int)c->file, F_GETLK, &lock) == 0 && lock.l_type == F_UNLCK;
}

// Waits until all ranks have sent the exchange.
static void receive(communicator *c, int64_t exchange) {
    const struct timespec nap = {0, NAP};
    int64_t begun = 0;
    for (int64_t r = 0; r < c->size; r++)
        while (!has_sent(c, exchange, r)) {
            if (atomic_load_explicit(&c->lost, memory_order_relaxed)) return;
            for (int i = 0; i < 32; i++) pause_();
            const int64_t time = now(), waited = begun ? time - begun : 0;
            if (!begun) begun = time;
            if (waited < SPINNING) continue;
            if (waited < YIELDING) {
                sched_yield();
                continue;
            }
            if (waited > c->limit || (has_ended(c, r) && !has_sent(c, exchange, r))) atomic_store(&c->lost, 1);
            nanosleep(&nap, 0);
        }
}

void sum_ranks(const member *m, communicator *c, float *x, const float *bias, int64_t T, int64_t E) {
    const int64_t most = c->room / (E * 4), part = (E / m->size + 31) / 16 * 16; // rows at once; columns of a thread
    const int64_t first = least(m->me * part, E), count = least(part, E - first);
    int64_t exchange = c->sent;
    for (int64_t t0 = 0; t0 < T; t0 += most, exchange++) {
        const int64_t rows = least(most, T - t0);
        float *to = x + t0 * E + first, *own = (float *)slot(c, exchange, c->rank) + first;
        for (int64_t t = 0; t < rows; t++) {
            memcpy(own + t * E, to + t * E, count * 4);
            for (int64_t e = 0; bias && e < count; e++) own[t * E + e] += bias[first + e];
        }
        meet(m);
        if (m->me == 0) send_slot(c, exchange);
        receive(c, exchange);
        for (int64_t r = 0; r < c->size; r++) {
            const float *from = (float *)slot(c, exchange, r) + first;
            for (int64_t t = 0; t < rows; t++)
                if (r)
                    for (int64_t e = 0; e < count; e++) to[t * E + e] += from[t * E + e];
                else
                    memcpy(to + t * E, from + t * E, count * 4);
        }
    }
    meet(m);
}

int64_t part_of(const communicator *c, int64_t rank, int64_t N) { return (rank * N + c->size - 1) / c->size; }

void share_parts(const member *m, communicator *c, float *x, int64_t N, int64_t count) {
    const int64_t most = (N + c->size - 1) / c->size * count, room = c->room / 4; // numbers of a rank; numbers at once
    int64_t exchange = c->sent;
    for (int64_t at = 0; at < most; at += room, exchange++) {
        for (int received = 0; received < 2; received++) {
            for (int64_t r = 0; r < c->size; r++) {
                if ((r == c->rank) == received) continue;
                const int64_t begin = part_of(c, r, N) * count + at, end = part_of(c, r + 1, N) * count;
                const int64_t numbers = least(room, end - begin), part = numbers / m->size + 1, first = m->me * part;
                if (first >= numbers) continue;
                float *here = x + begin + first, *there = (float *)slot(c, exchange, r) + first;
                memcpy(received ? here : there, received ? there : here, least(part, numbers - first) * 4);
            }
            if (received) continue;
            meet(m);
            if (m->me == 0) send_slot(c, exchange);
            receive(c, exchange);
        }
    }
    meet(m);
}

void gather_ranks(communicator *c, const void *x, int64_t bytes, void *out) {
    for (int64_t at = 0; at < bytes; at += c->room) {
        const int64_t exchange = c->sent, count = least(c->room, bytes - at);
        memcpy(slot(c, exchange, c->rank), (const char *)x + at, count);
        send_slot(c, exchange);
        receive(c, exchange);
        for (int64_t r = 0; r < c->size; r++) memcpy((char *)out + r * bytes + at, slot(c, exchange, r), count);
    }
}
