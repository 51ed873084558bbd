/* The collectives. Each goes in parts of a slot: everybody puts its part, all meet, everybody takes what it wants, all meet.
 * Sums go from rank 0 upwards in float32 (float64 for float64), so they are the same on every rank and in every run. */
#include "nccl.h"
#include <sched.h>

const size_t nccl_sizes[N_TYPES] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};

static uint16_t to_bfloat16(float x) { /* to the nearest, ties to even */
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return (uint16_t)(bits >> 16 | 64);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

#define COMBINE(a, b, op) ((op) == PROD ? (a) * (b) : (op) == MAX ? ((b) > (a) ? (b) : (a)) : (op) == MIN ? ((b) < (a) ? (b) : (a)) : (a) + (b))

/* One element from every slot. wide: what it is added up in; read, write: from and to the element's own type. */
#define REDUCE(type, wide, read, write)                                                                     \
    for (size_t i = 0; i < n; i++) {                                                                        \
        wide all = (wide)(read(((const type *)slots[0])[i]) * factor);                                      \
        for (int rank = 1; rank < ranks; rank++) {                                                          \
            wide one = (wide)(read(((const type *)slots[rank])[i]) * factor);                               \
            all = COMBINE(all, one, op);                                                                    \
        }                                                                                                   \
        if (op == AVG) all = (wide)(all / ranks);                                                           \
        ((type *)out)[i] = write(all);                                                                      \
    }                                                                                                       \
    return NCCL_SUCCESS
#define AS_IS(x) (x)

static int reduce_floats(void *out, char *const *slots, int ranks, size_t n, int type, int op) {
    if (type == FLOAT64) {
        double factor = nccl_factor(op);
        REDUCE(double, double, AS_IS, AS_IS);
    }
    float factor = (float)nccl_factor(op);
    if (type == FLOAT32) { REDUCE(float, float, AS_IS, AS_IS); }
    if (type == BFLOAT16) { REDUCE(uint16_t, float, from_bfloat16, to_bfloat16); }
    REDUCE(_Float16, float, (float), (_Float16));
}

static int reduce(void *out, char *const *slots, int ranks, size_t n, int type, int op) {
    const int factor = 1;
    switch (type) {
    case INT8: REDUCE(int8_t, int64_t, AS_IS, (int8_t));
    case UINT8: REDUCE(uint8_t, int64_t, AS_IS, (uint8_t));
    case INT32: REDUCE(int32_t, int64_t, AS_IS, (int32_t));
    case UINT32: REDUCE(uint32_t, int64_t, AS_IS, (uint32_t));
    case INT64: REDUCE(int64_t, int64_t, AS_IS, AS_IS);
    case UINT64: REDUCE(uint64_t, uint64_t, AS_IS, AS_IS);
    case FLOAT16: case FLOAT32: case FLOAT64: case BFLOAT16: return reduce_floats(out, slots, ranks, n, type, op);
    default: return nccl_failed(NCCL_INVALID_ARGUMENT, "a reduction of a type that is not emulated");
    }
}

enum pattern { ALL_REDUCE, REDUCE_TO_ROOT, BROADCAST, ALL_GATHER, REDUCE_SCATTER };

struct collective {
    ncclComm_t comm;
    enum pattern pattern;
    const char *from;
    char *to;
    size_t n; /* elements: each rank's of what is sent, but of what is received in a reduce-scatter */
    int type, op, root;
};

/* What this rank takes of the part [at, at + n) that is in the slots. `whose`: the block being scattered. */
static int take(const struct collective *c, size_t at, size_t n, int whose) {
    ncclComm_t comm = c->comm;
    size_t size = nccl_sizes[c->type];
    char *slots[MAX_RANKS];
    for (int i = 0; i < comm->ranks; i++) slots[i] = comm->shared->slot[i];
    switch (c->pattern) {
    case BROADCAST: memcpy(c->to + at * size, slots[c->root], n * size); return NCCL_SUCCESS;
    case ALL_GATHER:
        for (int i = 0; i < comm->ranks; i++) memcpy(c->to + ((size_t)i * c->n + at) * size, slots[i], n * size);
        return NCCL_SUCCESS;
    case REDUCE_TO_ROOT: return comm->rank == c->root ? reduce(c->to + at * size, slots, comm->ranks, n, c->type, c->op) : NCCL_SUCCESS;
    case REDUCE_SCATTER: return comm->rank == whose ? reduce(c->to + at * size, slots, comm->ranks, n, c->type, c->op) : NCCL_SUCCESS;
    default: return reduce(c->to + at * size, slots, comm->ranks, n, c->type, c->op);
    }
}

static int run(struct collective c) {
    if (c.type < 0 || c.type >= N_TYPES) return nccl_failed(NCCL_INVALID_ARGUMENT, "a type that is not emulated");
    size_t size = nccl_sizes[c.type], most = SLOT / size;
    int blocks = c.pattern == REDUCE_SCATTER ? c.comm->ranks : 1, status = NCCL_SUCCESS;
    int left_out = c.n * size > settings.copy_max;
    if (left_out) return nccl_barrier(c.comm);
    for (int block = 0; block < blocks; block++)
        for (size_t at = 0; at < c.n && !status; at += most) {
            size_t n = c.n - at < most ? c.n - at : most;
            if (c.pattern != BROADCAST || c.comm->rank == c.root)
                memcpy(c.comm->shared->slot[c.comm->rank], c.from + ((size_t)block * c.n + at) * size, n * size);
            if ((status = nccl_barrier(c.comm))) return status;
            status = take(&c, at, n, block);
            int met = nccl_barrier(c.comm);
            status = status ? status : met;
        }
    return status;
}

API int ncclAllReduce(const void *from, void *to, size_t n, int type, int op, ncclComm_t comm, cudaStream_t stream) {
    return run((struct collective){comm, ALL_REDUCE, from, to, n, type, op, 0});
}
API int ncclReduce(const void *from, void *to, size_t n, int type, int op, int root, ncclComm_t comm, cudaStream_t stream) {
    return run((struct collective){comm, REDUCE_TO_ROOT, from, to, n, type, op, root});
}
API int ncclBroadcast(const void *from, void *to, size_t n, int type, int root, ncclComm_t comm, cudaStream_t stream) {
    return run((struct collective){comm, BROADCAST, from, to, n, type, SUM, root});
}
API int ncclBcast(void *both, size_t n, int type, int root, ncclComm_t comm, cudaStream_t stream) {
    return run((struct collective){comm, BROADCAST, both, both, n, type, SUM, root});
}
API int ncclAllGather(const void *from, void *to, size_t n, int type, ncclComm_t comm, cudaStream_t stream) {
    return run((struct collective){comm, ALL_GATHER, from, to, n, type, SUM, 0});
}
API int ncclReduceScatter(const void *from, void *to, size_t n, int type, int op, ncclComm_t comm, cudaStream_t stream) {
    return run((struct collective){comm, REDUCE_SCATTER, from, to, n, type, op, 0});
}

/* ---- messages */

static int progress(struct message *m) { /* 1 if a part was moved */
    struct shared *s = m->comm->shared;
    int rank = m->comm->rank;
    struct letter *letter = m->sends ? &s->letters[rank][m->peer] : &s->letters[m->peer][rank];
    if (letter->full == m->sends) return 0;
    size_t n = m->left < LETTER ? m->left : LETTER;
    if (m->sends) memcpy(letter->data, m->at, n);
    else memcpy(m->at, letter->data, n);
    m->at += n;
    m->left -= n;
    letter->full = m->sends;
    return 1;
}

/* Whether an earlier message that is not over uses the same letter: messages between two ranks keep their order. */
static int is_behind(const struct message *messages, size_t i) {
    for (size_t j = 0; j < i; j++)
        if (messages[j].left && messages[j].comm == messages[i].comm && messages[j].peer == messages[i].peer &&
            messages[j].sends == messages[i].sends) return 1;
    return 0;
}

int nccl_exchange(struct message *messages, size_t n) {
    for (;;) {
        int moved = 0, over = 1;
        for (size_t i = 0; i < n; i++) {
            if (!messages[i].left) continue;
            over = 0;
            if (messages[i].comm->shared->aborted) return nccl_failed(NCCL_REMOTE_ERROR, "a peer has aborted the communicator");
            if (!is_behind(messages, i)) moved += progress(&messages[i]);
        }
        if (over) return NCCL_SUCCESS;
        if (!moved) sched_yield();
    }
}
