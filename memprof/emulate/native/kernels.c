/* Kernels that nvcc compiled into torch: registered, counted when tracing, never run. */
#include "emulator.h"

static struct kernel { const void *host; const char *name; size_t launches; } *kernels; /* kept only for the trace */
static size_t n_kernels, kernel_capacity, launches;

API void **__cudaRegisterFatBinary(void *binary) { static void *handle; return &handle; }
API void __cudaRegisterFatBinaryEnd(void **handle) {}
API void __cudaUnregisterFatBinary(void **handle) {}
API char __cudaInitModule(void **handle) { return 0; }
API void __cudaRegisterVar(void **h, char *host, char *device, const char *name, int ext, size_t n, int constant, int global) {}
API void __cudaRegisterFunction(void **handle, const char *host, char *device, const char *name, int limit,
                                uint3 *tid, uint3 *bid, dim3 *block, dim3 *grid, int *warp) {
    ready();
    if (!settings.trace) return;
    if (n_kernels == kernel_capacity) {
        kernel_capacity = kernel_capacity ? 2 * kernel_capacity : 4096;
        kernels = realloc(kernels, kernel_capacity * sizeof *kernels);
        if (!kernels) abort();
    }
    kernels[n_kernels++] = (struct kernel){host, name, 0};
}

static int by_host(const void *a, const void *b) {
    const struct kernel *x = a, *y = b;
    return (x->host > y->host) - (x->host < y->host);
}
static int by_launches(const void *a, const void *b) {
    const struct kernel *x = a, *y = b;
    return (y->launches > x->launches) - (y->launches < x->launches);
}

static int values_loaded;
API void memprof_emulator_values_loaded(void) { values_loaded = 1; }

/* Python's -I, -E and -S leave out the module that loads the values: results would be zeros without a word. */
static void check_values(void) {
    if (settings.wants_values && !values_loaded)
        fprintf(stderr, "memprof emulate: this process computes no values (its Python was started with -I, -E or -S?).\n");
}

cudaError_t count_launch(const void *function) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    ready();
    pthread_once(&once, check_values);
    if (!settings.trace) return cudaSuccess;
    static size_t sorted;
    pthread_mutex_lock(&memory_lock);
    launches++;
    if (sorted != n_kernels) qsort(kernels, sorted = n_kernels, sizeof *kernels, by_host);
    struct kernel key = {function, NULL, 0};
    struct kernel *kernel = n_kernels ? bsearch(&key, kernels, n_kernels, sizeof key, by_host) : NULL;
    if (kernel) kernel->launches++;
    pthread_mutex_unlock(&memory_lock);
    return cudaSuccess;
}

void report_launches(void) {
    fprintf(stderr, "memprof emulator: %zu launches\n", launches);
    if (n_kernels) qsort(kernels, n_kernels, sizeof *kernels, by_launches);
    for (size_t i = 0; i < n_kernels && i < 40 && kernels[i].launches; i++)
        fprintf(stderr, "memprof emulator: %8zu %s\n", kernels[i].launches, kernels[i].name);
}

/* nvcc's <<<>>> pushes the launch's shape before it calls the host stub, which pops it. */
static __thread struct { dim3 grid, block; size_t shared; void *stream; } pushed;
API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, struct CUstream_st *stream) {
    pushed.grid = grid; pushed.block = block; pushed.shared = shared; pushed.stream = stream;
    return 0;
}
API cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
    *grid = pushed.grid; *block = pushed.block; *shared = pushed.shared; *(void **)stream = pushed.stream;
    return cudaSuccess;
}
API cudaError_t __cudaGetKernel(cudaKernel_t *out, const void *host) { *out = (cudaKernel_t)host; return cudaSuccess; }
API cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **args, size_t shared, cudaStream_t stream) {
    return count_launch(kernel);
}
API cudaError_t cudaLaunchKernel(const void *f, dim3 g, dim3 b, void **args, size_t shared, cudaStream_t s) { return count_launch(f); }
API cudaError_t cudaLaunchCooperativeKernel(const void *f, dim3 g, dim3 b, void **args, size_t shared, cudaStream_t s) { return count_launch(f); }
API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *c, const void *f, void **args) { return count_launch(f); }

/* What was compiled, not what the card is: CUB looks its tuning up by it and fails for a version that torch has not. */
API cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *out, const void *function) {
    static const int built[] = {120, 100, 90, 86, 80, 75};
    ready();
    int i = 0, capability = settings.major * 10 + settings.minor;
    while (i < 5 && built[i] > capability) i++;
    memset(out, 0, sizeof *out);
    out->maxThreadsPerBlock = 1024;
    out->numRegs = 32;
    out->ptxVersion = out->binaryVersion = built[i];
    out->maxDynamicSharedSizeBytes = (int)shared_memory_per_block();
    return cudaSuccess;
}
API cudaError_t cudaFuncSetAttribute(const void *f, enum cudaFuncAttribute a, int value) { return cudaSuccess; }
#if CUDART_VERSION >= 12080
API cudaError_t cudaKernelSetAttributeForDevice(cudaKernel_t k, enum cudaFuncAttribute a, int value, int device) { return cudaSuccess; }
API cudaError_t cudaLibraryLoadData(cudaLibrary_t *out, const void *code, enum cudaJitOption *jo, void **jv, unsigned nj,
                                    enum cudaLibraryOption *lo, void **lv, unsigned nl) { *out = (cudaLibrary_t)1; return cudaSuccess; }
API cudaError_t cudaLibraryGetKernel(cudaKernel_t *out, cudaLibrary_t library, const char *name) { *out = (cudaKernel_t)1; return cudaSuccess; }
#endif
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *n, const void *f, int block, size_t shared) {
    *n = block > 0 && block <= 1024 ? 2048 / block : 1;
    if (*n > 32) *n = 32;
    return cudaSuccess;
}
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *n, const void *f, int block, size_t shared, unsigned flags) {
    return cudaOccupancyMaxActiveBlocksPerMultiprocessor(n, f, block, shared);
}
