/* What the emulator's files share: its settings, the table of mapped memory, small helpers.
 *
 * The library answers CUDA's runtime, driver, NVML and a part of cuBLAS, cuDNN, NVRTC and NCCL on a machine that has no
 * GPU. torch's CUDA build runs on it unchanged: the caching allocator, its history, statistics and out-of-memory path are
 * torch's own code. What lies below them is pretended:
 *
 *   memory    is mapped host memory, counted against the card: cudaMalloc fails when the card is full
 *   kernels   do nothing; values/ (a separate library) can compute what they would have computed
 *   copies    are done at once, by memmove
 *   streams   are handles; an event counts as finished a settable time after it was recorded
 *
 * build.py adds stubs for every other function that torch links or looks up.
 */
#ifndef MEMPROF_EMULATOR_H
#define MEMPROF_EMULATOR_H

#define _GNU_SOURCE
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define API __attribute__((visibility("default")))
#ifndef EMULATED_CUDA /* torch's CUDA version, as in CUDART_VERSION; the headers' may be a later one */
#define EMULATED_CUDA CUDART_VERSION
#endif
#define MAX_DEVICES 16
#define DEVICE_PAGE ((size_t)2 << 20) /* the granularity of cudaMalloc's accounting, and of virtual memory */
#define HOST_PAGE ((size_t)4096)

/* ---- settings.c: read once from the environment, by the first call that needs one */

struct settings {
    int devices;               /* those this process sees (CUDA_VISIBLE_DEVICES) */
    int cards;                 /* those in the machine */
    int card_of[MAX_DEVICES];  /* the card that is this process's device i */
    int major, minor;          /* compute capability */
    int sms;                   /* multiprocessors */
    int trace;                 /* report launches, memory and stubs on stderr */
    int wants_values;          /* the values library should be loaded */
    size_t memory;             /* bytes of each card, as the driver reports them */
    size_t context;            /* bytes a process's CUDA context takes */
    size_t copy_max;           /* larger copies are left out */
    uint64_t event_delay_ns;
    char name[96];
};
extern struct settings settings;

void ready(void);                       /* reads the settings if nobody has */
void note_stub(const char *name);       /* says that a stub was called, when tracing */
uint64_t now_ns(void);

static inline size_t round_up(size_t size, size_t to) { return (size + to - 1) / to * to; }

/* ---- ranges.c: what is mapped where. Everything here but `memory_lock` itself wants the lock held. */

enum kind {
    DEVICE,     /* counts against a card */
    RESERVED,   /* an address range of virtual memory, which has no memory of its own */
    HOST,       /* pinned */
    REGISTERED, /* somebody else's memory, pinned by cudaHostRegister */
};

struct range {
    uintptr_t base;
    size_t size;    /* what was mapped */
    size_t charged; /* what counts against the card */
    enum kind kind;
    int device;
};

extern pthread_mutex_t memory_lock;
extern size_t used[MAX_DEVICES], highest[MAX_DEVICES]; /* by this process, its context included */
extern char has_context[MAX_DEVICES];

int charge(int device, size_t bytes);          /* 1 and counted, or 0: the card is full */
void insert_range(struct range range);
struct range *find_range(const void *pointer); /* the one an address lies in, or NULL */
int take_range(const void *base, struct range *out); /* removes the one that begins here; gives its bytes back */
void *take_addresses(size_t size, int device); /* memory of a device, whole pages of zeros; NULL when the host has none */
void give_addresses_back(void *memory, size_t size);
void *map_memory(size_t size, int protection); /* zeros, at a multiple of DEVICE_PAGE; NULL when the host has none */

/* ---- memory.c */

int forget_range(const void *base, struct range *out); /* take_range, the lock taken for it */

/* ---- devices.c, errors.c, kernels.c */

extern __thread int current_device;
int device_attribute(int which); /* the runtime's and the driver's numbers are the same */
size_t shared_memory_per_block(void);

cudaError_t failed(cudaError_t error); /* remembers it for cudaGetLastError */
const char *error_name(int code);
const char *error_text(int code);

cudaError_t count_launch(const void *function);
void report_launches(void);

#endif
