/* The driver's virtual memory, on which torch's expandable segments stand. A handle is physical memory and is what counts
 * against the card; mapping it lets its address range be read and written. */
#include "emulator.h"
#include <sys/mman.h>

struct physical { size_t size; int device, references; };

API CUresult cuMemGetAllocationGranularity(size_t *out, const CUmemAllocationProp *prop, CUmemAllocationGranularity_flags option) {
    *out = DEVICE_PAGE;
    return CUDA_SUCCESS;
}
API CUresult cuMemAddressReserve(CUdeviceptr *out, size_t size, size_t alignment, CUdeviceptr wanted, unsigned long long flags) {
    void *memory = map_memory(size, PROT_NONE);
    if (!memory) return CUDA_ERROR_OUT_OF_MEMORY;
    pthread_mutex_lock(&memory_lock);
    insert_range((struct range){(uintptr_t)memory, size, 0, RESERVED, current_device});
    pthread_mutex_unlock(&memory_lock);
    *out = (CUdeviceptr)memory;
    return CUDA_SUCCESS;
}
API CUresult cuMemAddressFree(CUdeviceptr pointer, size_t size) {
    struct range range;
    if (!forget_range((void *)pointer, &range)) return CUDA_ERROR_INVALID_VALUE;
    munmap((void *)range.base, range.size);
    return CUDA_SUCCESS;
}
API CUresult cuMemCreate(CUmemGenericAllocationHandle *out, size_t size, const CUmemAllocationProp *prop, unsigned long long flags) {
    ready();
    int device = prop->location.type == CU_MEM_LOCATION_TYPE_DEVICE ? prop->location.id : current_device;
    pthread_mutex_lock(&memory_lock);
    int fits = charge(device, size);
    pthread_mutex_unlock(&memory_lock);
    if (!fits) return CUDA_ERROR_OUT_OF_MEMORY;
    struct physical *memory = calloc(1, sizeof *memory);
    *memory = (struct physical){size, device, 1};
    *out = (CUmemGenericAllocationHandle)(uintptr_t)memory;
    return CUDA_SUCCESS;
}
API CUresult cuMemRelease(CUmemGenericAllocationHandle handle) { /* torch unmaps before it releases */
    struct physical *memory = (struct physical *)(uintptr_t)handle;
    pthread_mutex_lock(&memory_lock);
    int gone = --memory->references == 0;
    if (gone) used[memory->device] -= memory->size;
    pthread_mutex_unlock(&memory_lock);
    if (gone) free(memory);
    return CUDA_SUCCESS;
}
API CUresult cuMemMap(CUdeviceptr pointer, size_t size, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long flags) {
    return CUDA_SUCCESS; /* usable from cuMemSetAccess on */
}
API CUresult cuMemSetAccess(CUdeviceptr pointer, size_t size, const CUmemAccessDesc *list, size_t n) {
    return mprotect((void *)pointer, size, PROT_READ | PROT_WRITE) ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}
API CUresult cuMemUnmap(CUdeviceptr pointer, size_t size) { /* new pages in its place: what was there is gone */
    int how = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
    return mmap((void *)pointer, size, PROT_NONE, how, -1, 0) == MAP_FAILED ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}
