/* Allocation in the runtime's API: device memory, pinned host memory, what an address is. */
#include "emulator.h"
#include <sys/mman.h>

static cudaError_t allocate(void **out, size_t size, enum kind kind) {
    ready();
    *out = NULL;
    if (!size) return cudaSuccess;
    int device = current_device, counts = kind == DEVICE;
    size_t mapped = round_up(size, counts ? DEVICE_PAGE : HOST_PAGE), charged = counts ? mapped : 0;
    pthread_mutex_lock(&memory_lock);
    int fits = !counts || charge(device, charged);
    void *memory = NULL;
    if (fits) memory = counts ? take_addresses(mapped, device) : map_memory(mapped, PROT_READ | PROT_WRITE);
    if (fits && !memory) used[device] -= charged;
    if (memory) insert_range((struct range){(uintptr_t)memory, mapped, charged, kind, device});
    pthread_mutex_unlock(&memory_lock);
    *out = memory;
    return memory ? cudaSuccess : failed(cudaErrorMemoryAllocation);
}

int forget_range(const void *base, struct range *out) {
    pthread_mutex_lock(&memory_lock);
    int found = take_range(base, out);
    pthread_mutex_unlock(&memory_lock);
    return found;
}

static cudaError_t release(void *pointer) {
    struct range range;
    if (!pointer) return cudaSuccess;
    pthread_mutex_lock(&memory_lock);
    int found = take_range(pointer, &range);
    if (found && range.kind == DEVICE) give_addresses_back(pointer, range.size);
    else if (found) munmap(pointer, range.size);
    pthread_mutex_unlock(&memory_lock);
    return found ? cudaSuccess : failed(cudaErrorInvalidValue);
}

API cudaError_t cudaMalloc(void **pointer, size_t size) { return allocate(pointer, size, DEVICE); }
API cudaError_t cudaMallocManaged(void **pointer, size_t size, unsigned flags) { return allocate(pointer, size, DEVICE); }
API cudaError_t cudaMallocAsync(void **pointer, size_t size, cudaStream_t stream) { return allocate(pointer, size, DEVICE); }
API cudaError_t cudaHostAlloc(void **pointer, size_t size, unsigned flags) { return allocate(pointer, size, HOST); }
API cudaError_t cudaMallocHost(void **pointer, size_t size) { return allocate(pointer, size, HOST); }

API cudaError_t cudaFree(void *pointer) { ready(); return release(pointer); }
API cudaError_t cudaFreeAsync(void *pointer, cudaStream_t stream) { return release(pointer); }
API cudaError_t cudaFreeHost(void *pointer) { return release(pointer); }

API cudaError_t cudaHostRegister(void *pointer, size_t size, unsigned flags) {
    pthread_mutex_lock(&memory_lock);
    insert_range((struct range){(uintptr_t)pointer, size, 0, REGISTERED, current_device});
    pthread_mutex_unlock(&memory_lock);
    return cudaSuccess;
}

API cudaError_t cudaHostUnregister(void *pointer) {
    struct range range;
    return forget_range(pointer, &range) ? cudaSuccess : failed(cudaErrorHostMemoryNotRegistered);
}

API cudaError_t cudaHostGetDevicePointer(void **out, void *host, unsigned flags) { *out = host; return cudaSuccess; }

API cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total) {
    ready();
    pthread_mutex_lock(&memory_lock);
    charge(current_device, 0);
    *total = settings.memory;
    *free_bytes = settings.memory > used[current_device] ? settings.memory - used[current_device] : 0;
    pthread_mutex_unlock(&memory_lock);
    return cudaSuccess;
}

API cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *out, const void *pointer) {
    memset(out, 0, sizeof *out);
    pthread_mutex_lock(&memory_lock);
    struct range *range = find_range(pointer);
    if (!range) {
        out->type = cudaMemoryTypeUnregistered;
        out->device = -1;
        out->hostPointer = (void *)pointer;
    } else {
        int on_device = range->kind == DEVICE || range->kind == RESERVED;
        out->type = on_device ? cudaMemoryTypeDevice : cudaMemoryTypeHost;
        out->device = range->device;
        out->devicePointer = (void *)pointer;
        out->hostPointer = on_device ? NULL : (void *)pointer;
    }
    pthread_mutex_unlock(&memory_lock);
    return cudaSuccess;
}

/* The pools of cudaMallocAsync, as far as torch asks for them: a pool is its device's number, and holds no cache. */
API cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *pool, int device) {
    *pool = (cudaMemPool_t)(uintptr_t)(device + 1);
    return cudaSuccess;
}
API cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t pool, enum cudaMemPoolAttr attribute, void *value) { return cudaSuccess; }
API cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t pool, enum cudaMemPoolAttr attribute, void *value) {
    int device = (int)(uintptr_t)pool - 1;
    *(uint64_t *)value = used[device] - (has_context[device] ? settings.context : 0);
    return cudaSuccess;
}
API cudaError_t cudaMemPoolSetAccess(cudaMemPool_t pool, const struct cudaMemAccessDesc *list, size_t n) { return cudaSuccess; }
API cudaError_t cudaMemPoolTrimTo(cudaMemPool_t pool, size_t keep) { return cudaSuccess; }
