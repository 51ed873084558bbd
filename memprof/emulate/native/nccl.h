/* What nccl.c (communicators, groups) and collectives.c (moving and reducing) share: NCCL between processes, over shared
 * memory. Every call waits for its peers at once, where NCCL's would wait on the stream. */
#ifndef MEMPROF_EMULATOR_NCCL_H
#define MEMPROF_EMULATOR_NCCL_H

#include "emulator.h"
#include <stdatomic.h>

enum { MAX_RANKS = 16, SLOT = 1 << 20, LETTER = 1 << 18 };
enum { NCCL_SUCCESS, NCCL_UNHANDLED, NCCL_SYSTEM_ERROR, NCCL_INTERNAL, NCCL_INVALID_ARGUMENT, NCCL_INVALID_USAGE, NCCL_REMOTE_ERROR };
enum { INT8, UINT8, INT32, UINT32, INT64, UINT64, FLOAT16, FLOAT32, FLOAT64, BFLOAT16, N_TYPES };
enum { SUM, PROD, MAX, MIN, AVG, FIRST_CUSTOM };

/* From one rank to another: at most one part of a message at a time. */
struct letter {
    _Atomic int full;
    char data[LETTER];
};

/* The file that a communicator's processes share. */
struct shared {
    _Atomic unsigned arrived, generation; /* of the barrier */
    _Atomic int aborted;
    int color[MAX_RANKS], key[MAX_RANKS]; /* of a split */
    int card[MAX_RANKS];                  /* that each rank is on */
    char slot[MAX_RANKS][SLOT];
    struct letter letters[MAX_RANKS][MAX_RANKS]; /* [from][to] */
};

typedef struct communicator {
    struct shared *shared;
    int ranks, rank, device, splits;
    char name[96];
} *ncclComm_t;

extern const size_t nccl_sizes[N_TYPES];
int nccl_failed(int status, const char *why);
int nccl_barrier(ncclComm_t comm);          /* NCCL_SUCCESS, or that a peer has gone */
double nccl_factor(int op);                 /* what a custom reduction multiplies by */

static inline float from_bfloat16(uint16_t x) {
    uint32_t bits = (uint32_t)x << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

struct message { ncclComm_t comm; int peer, sends; char *at; size_t left; };
int nccl_exchange(struct message *messages, size_t n); /* moves all of them, in any order that makes progress */

#endif
