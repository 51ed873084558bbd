/* Copies and fills. Those above settings.copy_max bytes are left out, and zeros give pages back to the host, so that a
 * model far larger than the host's memory can be "trained". */
#include "emulator.h"
#include <sys/mman.h>

static void copy(void *to, const void *from, size_t n) {
    ready();
    if (n <= settings.copy_max) memmove(to, from, n);
}

static void fill(void *to, int value, size_t n) {
    ready();
    uintptr_t from = round_up((uintptr_t)to, HOST_PAGE), end = ((uintptr_t)to + n) / HOST_PAGE * HOST_PAGE;
    if (!value && n > (1 << 20)) { /* whole pages of an anonymous private mapping read as zeros afterwards */
        memset(to, 0, from - (uintptr_t)to);
        memset((void *)end, 0, (uintptr_t)to + n - end);
        madvise((void *)from, end - from, MADV_DONTNEED);
    } else if (n <= settings.copy_max) memset(to, value, n);
}

API cudaError_t cudaMemcpy(void *to, const void *from, size_t n, enum cudaMemcpyKind kind) { copy(to, from, n); return cudaSuccess; }
API cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t n, enum cudaMemcpyKind kind, cudaStream_t stream) {
    copy(to, from, n);
    return cudaSuccess;
}
API cudaError_t cudaMemcpyPeerAsync(void *to, int to_device, const void *from, int from_device, size_t n, cudaStream_t stream) {
    copy(to, from, n);
    return cudaSuccess;
}
API cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                                  size_t height, enum cudaMemcpyKind kind, cudaStream_t stream) {
    for (size_t row = 0; row < height; row++) copy((char *)to + row * to_pitch, (const char *)from + row * from_pitch, width);
    return cudaSuccess;
}
API cudaError_t cudaMemcpyToSymbol(const void *symbol, const void *from, size_t n, size_t offset, enum cudaMemcpyKind kind) {
    return cudaSuccess; /* only kernels read symbols */
}
API cudaError_t cudaGetSymbolAddress(void **out, const void *symbol) {
    static char anything[1 << 16];
    *out = anything;
    return cudaSuccess;
}
API cudaError_t cudaMemset(void *to, int value, size_t n) { fill(to, value, n); return cudaSuccess; }
API cudaError_t cudaMemsetAsync(void *to, int value, size_t n, cudaStream_t stream) { fill(to, value, n); return cudaSuccess; }

API CUresult cuMemsetD32Async(CUdeviceptr pointer, unsigned value, size_t n, CUstream stream) {
    for (size_t i = 0; i < n; i++) ((unsigned *)pointer)[i] = value;
    return CUDA_SUCCESS;
}
API CUresult cuMemcpyDtoH(void *to, CUdeviceptr from, size_t n) { copy(to, (void *)from, n); return CUDA_SUCCESS; }
API CUresult cuMemcpyHtoD(CUdeviceptr to, const void *from, size_t n) { copy((void *)to, from, n); return CUDA_SUCCESS; }
