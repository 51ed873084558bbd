/* How many cards there are and what they can do. Clocks, bus width and caches are an H100's on every card: torch sizes no
 * allocation by them. */
#include "emulator.h"

__thread int current_device;

/* What differs from one compute capability to the next, and that kernels' launch parameters are chosen by. */
static const struct architecture { int capability, shared_block, shared_sm, threads_sm, blocks_sm; } architectures[] = {
    {120, 101376, 102400, 1536, 24}, {100, 232448, 233472, 2048, 32}, {90, 232448, 233472, 2048, 32},
    {89, 101376, 102400, 1536, 24},  {86, 101376, 102400, 1536, 16},  {80, 166912, 167936, 2048, 32},
    {75, 65536, 65536, 1024, 16},    {70, 98304, 98304, 2048, 32}};

static const struct architecture *architecture(void) {
    ready();
    size_t i = 0, last = sizeof architectures / sizeof *architectures - 1;
    while (i < last && architectures[i].capability > settings.major * 10 + settings.minor) i++;
    return &architectures[i];
}

size_t shared_memory_per_block(void) { return (size_t)architecture()->shared_block; }

int device_attribute(int which) {
    switch (which) {
    case cudaDevAttrMaxThreadsPerBlock: case cudaDevAttrMaxBlockDimX: case cudaDevAttrMaxBlockDimY: return 1024;
    case cudaDevAttrMaxBlockDimZ: return 64;
    case cudaDevAttrMaxGridDimX: return 2147483647;
    case cudaDevAttrMaxGridDimY: case cudaDevAttrMaxGridDimZ: return 65535;
    case cudaDevAttrMaxSharedMemoryPerBlock: return 49152;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: return architecture()->shared_block;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: return architecture()->shared_sm;
    case cudaDevAttrWarpSize: return 32;
    case cudaDevAttrMaxRegistersPerBlock: case cudaDevAttrMaxRegistersPerMultiprocessor: return 65536;
    case cudaDevAttrClockRate: return 1980000;
    case cudaDevAttrMemoryClockRate: return 2619000;
    case cudaDevAttrGlobalMemoryBusWidth: return 5120;
    case cudaDevAttrL2CacheSize: return 50 << 20;
    case cudaDevAttrTextureAlignment: return 512;
    case cudaDevAttrMultiProcessorCount: return settings.sms;
    case cudaDevAttrMaxThreadsPerMultiProcessor: return architecture()->threads_sm;
    case cudaDevAttrMaxBlocksPerMultiprocessor: return architecture()->blocks_sm;
    case cudaDevAttrComputeCapabilityMajor: return settings.major;
    case cudaDevAttrComputeCapabilityMinor: return settings.minor;
    case cudaDevAttrConcurrentKernels: case cudaDevAttrUnifiedAddressing: case cudaDevAttrManagedMemory:
    case cudaDevAttrConcurrentManagedAccess: case cudaDevAttrCooperativeLaunch: case cudaDevAttrMemoryPoolsSupported:
    case cudaDevAttrHostRegisterSupported: case cudaDevAttrStreamPrioritiesSupported: return 1;
    case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED: return 1;
    case cudaDevAttrAsyncEngineCount: return 3;
    default: return 0;
    }
}

static int is_device(int device) {
    ready();
    return device >= 0 && device < settings.devices;
}

API cudaError_t cudaGetDeviceCount(int *count) {
    ready();
    *count = settings.devices;
    return settings.devices ? cudaSuccess : failed(cudaErrorNoDevice);
}
API cudaError_t cudaGetDevice(int *device) { ready(); *device = current_device; return cudaSuccess; }
API cudaError_t cudaSetDevice(int device) {
    if (!is_device(device)) return failed(cudaErrorInvalidDevice);
    current_device = device;
    pthread_mutex_lock(&memory_lock);
    charge(device, 0); /* since CUDA 12 this makes the context */
    pthread_mutex_unlock(&memory_lock);
    return cudaSuccess;
}
API cudaError_t cudaDeviceSynchronize(void) { return cudaSuccess; }
API cudaError_t cudaDeviceReset(void) { return cudaSuccess; }
API cudaError_t cudaDeviceCanAccessPeer(int *can, int a, int b) { *can = a != b; return cudaSuccess; }
API cudaError_t cudaDeviceEnablePeerAccess(int device, unsigned flags) { return cudaSuccess; }
API cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { *least = 0; *greatest = -5; return cudaSuccess; }
API cudaError_t cudaDriverGetVersion(int *version) { *version = EMULATED_CUDA; return cudaSuccess; }
API cudaError_t cudaRuntimeGetVersion(int *version) { *version = EMULATED_CUDA; return cudaSuccess; }
API cudaError_t cudaDeviceGetPCIBusId(char *out, int n, int device) {
    ready();
    snprintf(out, (size_t)n, "0000:%02X:00.0", settings.card_of[device] + 1);
    return cudaSuccess;
}
API cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr which, int device) {
    ready();
    *value = device_attribute((int)which);
    return cudaSuccess;
}

static void identify(struct cudaDeviceProp *out, int device) {
    snprintf(out->name, sizeof out->name, "%s", settings.name);
    memcpy(out->uuid.bytes, "memprof-emulate\0", 16); /* nvml.c spells the same */
    out->uuid.bytes[15] = (char)settings.card_of[device];
    out->pciBusID = settings.card_of[device] + 1;
    out->major = settings.major;
    out->minor = settings.minor;
    out->totalGlobalMem = settings.memory;
}

API cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *out, int device) {
    if (!is_device(device)) return failed(cudaErrorInvalidDevice);
    memset(out, 0, sizeof *out);
    identify(out, device);
    out->sharedMemPerBlock = 49152;
    out->sharedMemPerBlockOptin = (size_t)architecture()->shared_block;
    out->sharedMemPerMultiprocessor = (size_t)architecture()->shared_sm;
    out->reservedSharedMemPerBlock = 1024;
    out->regsPerBlock = out->regsPerMultiprocessor = 65536;
    out->warpSize = 32;
    out->memPitch = 2147483647;
    out->maxThreadsPerBlock = out->maxThreadsDim[0] = out->maxThreadsDim[1] = 1024;
    out->maxThreadsDim[2] = 64;
    out->maxGridSize[0] = 2147483647;
    out->maxGridSize[1] = out->maxGridSize[2] = 65535;
    out->totalConstMem = 65536;
    out->textureAlignment = 512;
    out->multiProcessorCount = settings.sms;
    out->maxThreadsPerMultiProcessor = architecture()->threads_sm;
    out->maxBlocksPerMultiProcessor = architecture()->blocks_sm;
    out->canMapHostMemory = out->concurrentKernels = out->unifiedAddressing = out->managedMemory = 1;
    out->cooperativeLaunch = out->memoryPoolsSupported = out->hostRegisterSupported = 1;
    out->asyncEngineCount = 3;
    out->memoryBusWidth = 5120;
    out->l2CacheSize = 50 << 20;
    return cudaSuccess;
}
