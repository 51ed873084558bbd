/* Communicators: who takes part, how they meet, splitting, groups of sends and receives. */
#include "nccl.h"
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

typedef struct { char name[128]; } ncclUniqueId;

static __thread const char *last_error = "";

int nccl_failed(int status, const char *why) {
    last_error = why;
    if (settings.trace) fprintf(stderr, "memprof emulator: NCCL: %s\n", why);
    return status;
}

API const char *ncclGetErrorString(int status) { return status ? last_error : "no error"; }
API const char *ncclGetLastError(ncclComm_t comm) { return last_error; }
API int ncclGetVersion(int *version) { *version = 22907; return NCCL_SUCCESS; }
API int ncclCommGetAsyncError(ncclComm_t comm, int *error) {
    *error = comm && comm->shared->aborted ? NCCL_REMOTE_ERROR : NCCL_SUCCESS;
    return NCCL_SUCCESS;
}

/* ---- meeting */

static void wait_on(_Atomic unsigned *word, unsigned value) {
    struct timespec most = {0, 100000000}; /* then looks whether somebody has given up */
    syscall(SYS_futex, (unsigned *)word, FUTEX_WAIT, value, &most, NULL, 0);
}

int nccl_barrier(ncclComm_t comm) {
    struct shared *s = comm->shared;
    unsigned generation = s->generation;
    if (atomic_fetch_add(&s->arrived, 1) + 1 == (unsigned)comm->ranks) {
        s->arrived = 0;
        s->generation++;
        syscall(SYS_futex, (unsigned *)&s->generation, FUTEX_WAKE, MAX_RANKS, NULL, NULL, 0);
    } else {
        while (s->generation == generation) {
            if (s->aborted) return nccl_failed(NCCL_REMOTE_ERROR, "a peer has aborted the communicator");
            wait_on(&s->generation, generation);
        }
    }
    return NCCL_SUCCESS;
}

/* NCCL refuses two ranks of one communicator on one card, in these words. */
static int found_alone(ncclComm_t comm) {
    static __thread char text[96];
    for (int i = 0; i < comm->ranks; i++) {
        if (i == comm->rank || comm->shared->card[i] != comm->shared->card[comm->rank]) continue;
        snprintf(text, sizeof text, "Duplicate GPU detected : rank %d and rank %d both on CUDA device %x", comm->rank, i,
                 (comm->shared->card[i] + 1) << 12); /* its PCI bus: devices.c */
        return nccl_failed(NCCL_INVALID_USAGE, text);
    }
    return NCCL_SUCCESS;
}

static int meet(ncclComm_t *out, int ranks, const char *name, int rank) {
    ready();
    if (ranks < 1 || ranks > MAX_RANKS) return nccl_failed(NCCL_INVALID_ARGUMENT, "1 to 16 ranks are emulated");
    int file = shm_open(name, O_CREAT | O_RDWR, 0600);
    if (file < 0 || ftruncate(file, sizeof(struct shared))) return nccl_failed(NCCL_SYSTEM_ERROR, "no shared memory (/dev/shm)");
    void *memory = mmap(NULL, sizeof(struct shared), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (memory == MAP_FAILED) return nccl_failed(NCCL_SYSTEM_ERROR, "no shared memory (/dev/shm)");
    ncclComm_t comm = calloc(1, sizeof *comm);
    *comm = (struct communicator){memory, ranks, rank, current_device, 0, ""};
    snprintf(comm->name, sizeof comm->name, "%s", name);
    comm->shared->card[rank] = settings.card_of[current_device];
    int status = nccl_barrier(comm);
    if (!rank) shm_unlink(name); /* everybody has it */
    *out = comm;
    return status ? status : found_alone(comm);
}

API int ncclGetUniqueId(ncclUniqueId *out) {
    static _Atomic int number;
    memset(out, 0, sizeof *out);
    snprintf(out->name, sizeof out->name, "/memprof-nccl-%d-%d-%llx", (int)getpid(), number++, (unsigned long long)now_ns());
    return NCCL_SUCCESS;
}
API int ncclCommInitRank(ncclComm_t *out, int ranks, ncclUniqueId id, int rank) { return meet(out, ranks, id.name, rank); }
API int ncclCommInitRankConfig(ncclComm_t *out, int ranks, ncclUniqueId id, int rank, void *config) { return meet(out, ranks, id.name, rank); }
API int ncclCommInitRankScalable(ncclComm_t *out, int ranks, int rank, int n, ncclUniqueId *ids, void *config) {
    return meet(out, ranks, ids[0].name, rank);
}
API int ncclCommInitAll(ncclComm_t *out, int n, const int *devices) {
    return nccl_failed(NCCL_INVALID_USAGE, "NCCL between the devices of one process is not emulated: use a process for each");
}

/* Everybody says its color and key; those of a color meet again, ordered by key. */
API int ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t *out, void *config) {
    struct shared *s = comm->shared;
    s->color[comm->rank] = color;
    s->key[comm->rank] = key;
    int status = nccl_barrier(comm), ranks = 0, rank = 0;
    for (int i = 0; i < comm->ranks; i++) {
        if (s->color[i] != color) continue;
        ranks++;
        rank += s->key[i] < key || (s->key[i] == key && i < comm->rank);
    }
    if (!status) status = nccl_barrier(comm); /* all have read */
    int number = comm->splits++;
    *out = NULL;
    if (status || color < 0) return status;
    char name[128];
    snprintf(name, sizeof name, "%.80s-%d-%d", comm->name, number, color);
    return meet(out, ranks, name, rank);
}

API int ncclCommAbort(ncclComm_t comm) {
    if (comm) comm->shared->aborted = 1;
    return NCCL_SUCCESS;
}
API int ncclCommFinalize(ncclComm_t comm) { return NCCL_SUCCESS; }
API int ncclCommDestroy(ncclComm_t comm) {
    if (!comm) return NCCL_SUCCESS;
    munmap(comm->shared, sizeof *comm->shared);
    free(comm);
    return NCCL_SUCCESS;
}
API int ncclCommCount(ncclComm_t comm, int *out) { *out = comm->ranks; return NCCL_SUCCESS; }
API int ncclCommUserRank(ncclComm_t comm, int *out) { *out = comm->rank; return NCCL_SUCCESS; }
API int ncclCommCuDevice(ncclComm_t comm, int *out) { *out = comm->device; return NCCL_SUCCESS; }
API int ncclMemAlloc(void **out, size_t size) { return cudaMalloc(out, size) ? NCCL_UNHANDLED : NCCL_SUCCESS; }
API int ncclMemFree(void *pointer) { return cudaFree(pointer) ? NCCL_UNHANDLED : NCCL_SUCCESS; }

/* ---- groups: sends and receives wait for the group's end, where all of them make progress together */

enum { MOST_MESSAGES = 4 * MAX_RANKS * MAX_RANKS };
static __thread struct message pending[MOST_MESSAGES];
static __thread size_t n_pending;
static __thread int depth;

static int post(ncclComm_t comm, int peer, int sends, char *at, size_t bytes) {
    struct message message = {comm, peer, sends, at, bytes};
    if (!depth) return nccl_exchange(&message, 1);
    if (n_pending == MOST_MESSAGES) return nccl_failed(NCCL_INVALID_USAGE, "too many messages in one group");
    pending[n_pending++] = message;
    return NCCL_SUCCESS;
}
API int ncclGroupStart(void) { depth++; return NCCL_SUCCESS; }
API int ncclGroupEnd(void) {
    if (--depth) return NCCL_SUCCESS;
    size_t n = n_pending;
    n_pending = 0;
    return n ? nccl_exchange(pending, n) : NCCL_SUCCESS;
}
API int ncclSend(const void *from, size_t n, int type, int peer, ncclComm_t comm, cudaStream_t stream) {
    return post(comm, peer, 1, (char *)from, n * nccl_sizes[type]);
}
API int ncclRecv(void *to, size_t n, int type, int peer, ncclComm_t comm, cudaStream_t stream) {
    return post(comm, peer, 0, to, n * nccl_sizes[type]);
}

API int ncclAlltoAll(const void *from, void *to, size_t n, int type, ncclComm_t comm, cudaStream_t stream) {
    size_t bytes = n * nccl_sizes[type];
    int status = ncclGroupStart();
    for (int peer = 0; peer < comm->ranks && !status; peer++) {
        status = ncclSend((const char *)from + (size_t)peer * bytes, n, type, peer, comm, stream);
        if (!status) status = ncclRecv((char *)to + (size_t)peer * bytes, n, type, peer, comm, stream);
    }
    int end = ncclGroupEnd();
    return status ? status : end;
}

/* ---- reductions that multiply first */

static double factors[64];
static _Atomic int n_factors;

double nccl_factor(int op) { return op >= FIRST_CUSTOM ? factors[(op - FIRST_CUSTOM) % 64] : 1.0; }

API int ncclRedOpCreatePreMulSum(int *op, void *scalar, int type, int residence, ncclComm_t comm) {
    int i = n_factors++;
    double value;
    if (type == FLOAT64) value = *(double *)scalar;
    else if (type == FLOAT32) value = *(float *)scalar;
    else if (type == FLOAT16) value = (double)*(_Float16 *)scalar;
    else if (type == BFLOAT16) value = from_bfloat16(*(uint16_t *)scalar);
    else return nccl_failed(NCCL_INVALID_ARGUMENT, "a factor of a type that is not emulated");
    factors[i % 64] = value;
    *op = FIRST_CUSTOM + i % 64;
    return NCCL_SUCCESS;
}
API int ncclRedOpDestroy(int op, ncclComm_t comm) { return NCCL_SUCCESS; }
