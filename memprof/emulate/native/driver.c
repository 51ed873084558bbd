/* The driver's API: functions looked up by name, devices, contexts, addresses. */
#include "emulator.h"
#include <dlfcn.h>

/* A function of this library by its name. cuda.h's macros name the newest version of one that has several. */
static void *own_function(const char *name) {
    static void *self;
    Dl_info info;
    if (!self && dladdr((void *)own_function, &info)) self = dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD);
    char versioned[128];
    for (int version = 3; self && version >= 2; version--) {
        snprintf(versioned, sizeof versioned, "%s_v%d", name, version);
        void *found = dlsym(self, versioned);
        if (found) return found;
    }
    return self ? dlsym(self, name) : NULL;
}

static cudaError_t entry_point(const char *name, void **out, enum cudaDriverEntryPointQueryResult *result) {
    *out = own_function(name);
    if (result) *result = *out ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    if (!*out) note_stub(name);
    return cudaSuccess;
}
#if CUDART_VERSION >= 12050
API cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **out, unsigned version, unsigned long long flags,
                                                 enum cudaDriverEntryPointQueryResult *result) {
    return entry_point(name, out, result);
}
#endif
#if CUDART_VERSION < 13000
API cudaError_t cudaGetDriverEntryPoint(const char *name, void **out, unsigned long long flags, enum cudaDriverEntryPointQueryResult *result) {
    return entry_point(name, out, result);
}
#endif
API CUresult cuGetProcAddress_v2(const char *name, void **out, int version, cuuint64_t flags, CUdriverProcAddressQueryResult *result) {
    *out = own_function(name);
    if (result) *result = *out ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    return *out ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

API CUresult cuInit(unsigned flags) { ready(); return CUDA_SUCCESS; }
API CUresult cuDriverGetVersion(int *version) { *version = EMULATED_CUDA; return CUDA_SUCCESS; }
API CUresult cuDeviceGet(CUdevice *device, int index) { *device = index; return CUDA_SUCCESS; }
API CUresult cuDeviceGetCount(int *n) { ready(); *n = settings.devices; return CUDA_SUCCESS; }
API CUresult cuDeviceGetName(char *out, int n, CUdevice device) { ready(); snprintf(out, (size_t)n, "%s", settings.name); return CUDA_SUCCESS; }
API CUresult cuDeviceTotalMem(size_t *bytes, CUdevice device) { ready(); *bytes = settings.memory; return CUDA_SUCCESS; }
API CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute which, CUdevice device) {
    ready();
    *value = device_attribute((int)which);
    return CUDA_SUCCESS;
}
API CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
    *flags = 0;
    *active = has_context[device];
    return CUDA_SUCCESS;
}

/* A context is its device's number. */
API CUresult cuDevicePrimaryCtxRetain(CUcontext *out, CUdevice device) { *out = (CUcontext)(uintptr_t)(device + 1); return CUDA_SUCCESS; }
API CUresult cuCtxGetCurrent(CUcontext *out) { *out = (CUcontext)(uintptr_t)(current_device + 1); return CUDA_SUCCESS; }
API CUresult cuCtxSetCurrent(CUcontext context) { if (context) current_device = (int)(uintptr_t)context - 1; return CUDA_SUCCESS; }
API CUresult cuCtxGetDevice(CUdevice *device) { *device = current_device; return CUDA_SUCCESS; }
API CUresult cuCtxGetLimit(size_t *out, CUlimit which) { *out = 1024; return CUDA_SUCCESS; }
API CUresult cuCtxSetLimit(CUlimit which, size_t value) { return CUDA_SUCCESS; }
API CUresult cuCtxSynchronize(void) { return CUDA_SUCCESS; }

API CUresult cuGetErrorString(CUresult error, const char **out) { *out = error_text((int)error); return CUDA_SUCCESS; }
API CUresult cuGetErrorName(CUresult error, const char **out) { *out = error == 2 ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR"; return CUDA_SUCCESS; }
API CUresult cuMemGetInfo(size_t *free_bytes, size_t *total) { return (CUresult)cudaMemGetInfo(free_bytes, total); }
API CUresult cuMemGetAddressRange(CUdeviceptr *base, size_t *size, CUdeviceptr pointer) {
    pthread_mutex_lock(&memory_lock);
    struct range *range = find_range((void *)pointer);
    if (range && base) *base = range->base;
    if (range && size) *size = range->size;
    pthread_mutex_unlock(&memory_lock);
    return range ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}
API CUresult cuPointerGetAttribute(void *out, CUpointer_attribute which, CUdeviceptr pointer) {
    if (which == CU_POINTER_ATTRIBUTE_DEVICE_POINTER) *(CUdeviceptr *)out = pointer;
    else if (which == CU_POINTER_ATTRIBUTE_MEMORY_TYPE) *(unsigned *)out = CU_MEMORYTYPE_DEVICE;
    else memset(out, 0, 4);
    return CUDA_SUCCESS;
}
