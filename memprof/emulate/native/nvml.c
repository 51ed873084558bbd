/* NVML: what nvidia-smi would say. It counts this process alone; a card that two processes share is not added up. */
#include "emulator.h"
#include <unistd.h>

enum { NVML_INVALID_ARGUMENT = 2, NVML_NOT_FOUND = 6, NVML_INSUFFICIENT_SIZE = 7 };

typedef struct { unsigned version; unsigned long long total, reserved, free, used; } nvmlMemory_v2;
typedef struct { unsigned long long total, free, used; } nvmlMemory;
typedef struct { unsigned pid; unsigned long long used; unsigned gpu_instance, compute_instance; } nvmlProcess;

/* A handle is its card's number. NVML knows all cards, whatever CUDA_VISIBLE_DEVICES says. */
static void *handle_of(int card) { return (void *)(uintptr_t)(card + 1); }
static int card_of(void *handle) { return (int)(uintptr_t)handle - 1; }

/* This process's device on a card; -1 where it does not see the card. */
static int device_on(void *handle) {
    ready();
    for (int i = 0; i < settings.devices; i++) if (settings.card_of[i] == card_of(handle)) return i;
    return -1;
}
static size_t used_on(void *handle) {
    int device = device_on(handle);
    return device < 0 ? 0 : used[device];
}

API int nvmlInit_v2(void) { ready(); return 0; }
API int nvmlInitWithFlags(unsigned flags) { ready(); return 0; }
API int nvmlShutdown(void) { return 0; }
API const char *nvmlErrorString(int status) { return status ? "not supported by memprof's emulated device" : "Success"; }
API int nvmlDeviceGetCount_v2(unsigned *n) { ready(); *n = (unsigned)settings.cards; return 0; }
API int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **out) {
    ready();
    if ((int)index >= settings.cards) return NVML_INVALID_ARGUMENT;
    *out = handle_of((int)index);
    return 0;
}
API int nvmlDeviceGetHandleByPciBusId_v2(const char *id, void **out) {
    unsigned domain, bus;
    if (sscanf(id, "%x:%x", &domain, &bus) != 2) return NVML_INVALID_ARGUMENT;
    *out = handle_of((int)bus - 1);
    return 0;
}

/* The UUID is "memprof-emulate" and the card's number, in cudaDeviceProp as here. */
#define UUID "GPU-6d656d70-726f-662d-656d-756c617465"
API int nvmlDeviceGetHandleByUUID(const char *uuid, void **out) {
    unsigned card;
    if (strncmp(uuid, UUID, sizeof UUID - 1) || sscanf(uuid + sizeof UUID - 1, "%2x", &card) != 1) return NVML_NOT_FOUND;
    *out = handle_of((int)card);
    return 0;
}
API int nvmlDeviceGetUUID(void *handle, char *out, unsigned n) { snprintf(out, n, UUID "%02x", card_of(handle)); return 0; }
API int nvmlDeviceIsMigDeviceHandle(void *handle, unsigned *out) { *out = 0; return 0; }
API int nvmlDeviceGetIndex(void *handle, unsigned *out) { *out = (unsigned)card_of(handle); return 0; }
API int nvmlDeviceGetName(void *handle, char *out, unsigned n) { ready(); snprintf(out, n, "%s", settings.name); return 0; }
API int nvmlSystemGetDriverVersion(char *out, unsigned n) { snprintf(out, n, "580.00.emulated"); return 0; }
API int nvmlSystemGetCudaDriverVersion_v2(int *out) { *out = EMULATED_CUDA; return 0; }
API int nvmlDeviceGetP2PStatus(void *a, void *b, int kind, int *status) { *status = 0; return 0; }

API int nvmlDeviceGetMemoryInfo(void *handle, nvmlMemory *out) {
    size_t taken = used_on(handle);
    *out = (nvmlMemory){settings.memory, settings.memory - taken, taken};
    return 0;
}
API int nvmlDeviceGetMemoryInfo_v2(void *handle, nvmlMemory_v2 *out) {
    size_t taken = used_on(handle);
    out->total = settings.memory; out->reserved = 0; out->free = settings.memory - taken; out->used = taken;
    return 0;
}

API int nvmlDeviceGetComputeRunningProcesses_v3(void *handle, unsigned *n, nvmlProcess *out) {
    int device = device_on(handle);
    unsigned need = device >= 0 && has_context[device] ? 1 : 0, have = *n;
    *n = need;
    if (have < need) return NVML_INSUFFICIENT_SIZE;
    if (need) out[0] = (nvmlProcess){(unsigned)getpid(), used[device], ~0u, ~0u};
    return 0;
}
API int nvmlDeviceGetComputeRunningProcesses_v2(void *handle, unsigned *n, nvmlProcess *out) {
    return nvmlDeviceGetComputeRunningProcesses_v3(handle, n, out);
}
API int nvmlDeviceGetComputeRunningProcesses(void *handle, unsigned *n, void *out) { /* its entries had no instances */
    nvmlProcess one;
    unsigned have = *n;
    int status = nvmlDeviceGetComputeRunningProcesses_v3(handle, n, have ? &one : NULL);
    if (!status && *n) memcpy(out, &one, 16);
    return status;
}
API int nvmlDeviceGetGraphicsRunningProcesses_v3(void *handle, unsigned *n, nvmlProcess *out) { *n = 0; return 0; }
