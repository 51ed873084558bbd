/* Error codes: their names, their texts, and the last one of each thread. */
#include "emulator.h"

static __thread cudaError_t last_error;

static const struct { int code; const char *name, *text; } errors[] = {
    {0, "cudaSuccess", "no error"},
    {1, "cudaErrorInvalidValue", "invalid argument"},
    {2, "cudaErrorMemoryAllocation", "out of memory"},
    {100, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {101, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {600, "cudaErrorNotReady", "device not ready"},
    {713, "cudaErrorHostMemoryNotRegistered", "pointer does not correspond to a registered memory region"},
    {801, "cudaErrorNotSupported", "operation not supported by memprof's emulated device"},
    {900, "cudaErrorStreamCaptureUnsupported", "CUDA graphs are not emulated: memprof's emulated device cannot replay kernels"},
};
enum { N_ERRORS = sizeof errors / sizeof *errors };

cudaError_t failed(cudaError_t error) {
    if (error != cudaSuccess) last_error = error;
    return error;
}

const char *error_name(int code) {
    for (size_t i = 0; i < N_ERRORS; i++) if (errors[i].code == code) return errors[i].name;
    return "unknown error";
}
const char *error_text(int code) {
    for (size_t i = 0; i < N_ERRORS; i++) if (errors[i].code == code) return errors[i].text;
    return "unknown error";
}

API const char *cudaGetErrorName(cudaError_t error) { return error_name((int)error); }
API const char *cudaGetErrorString(cudaError_t error) { return error_text((int)error); }
API cudaError_t cudaPeekAtLastError(void) { return last_error; }
API cudaError_t cudaGetLastError(void) {
    cudaError_t error = last_error;
    last_error = cudaSuccess;
    return error;
}
