/* cuBLAS, cuDNN and NVRTC: only what torch wants an answer from. build.py's stubs succeed for the rest. */
#include "emulator.h"

/* ---- cuBLAS. torch allocates its workspace itself, so that it is counted. */

enum { CUDA_MAJOR = EMULATED_CUDA / 1000, CUBLAS_VERSION = CUDA_MAJOR * 10000 + 100 };

API int cublasGetPointerMode_v2(void *handle, int *mode) { *mode = 0; return 0; }
API int cublasGetMathMode(void *handle, int *mode) { *mode = 0; return 0; }
API int cublasGetVersion_v2(void *handle, int *version) { *version = CUBLAS_VERSION; return 0; }
API int cublasGetProperty(int type, int *value) { *value = type ? 0 : CUDA_MAJOR; return 0; }
API size_t cublasLtGetVersion(void) { return CUBLAS_VERSION; }
API const char *cublasGetStatusString(int status) { return "emulated"; }

/* One answer that can always be used. A cublasLtMatmulHeuristicResult_t has 96 bytes: algorithm, workspace (0), state ... */
API int cublasLtMatmulAlgoGetHeuristic(void *handle, void *op, void *a, void *b, void *c, void *d, void *preference,
                                       int wanted, void *results, int *found) {
    memset(results, 0, 96);
    *found = 1;
    return 0;
}

/* ---- cuDNN */

API size_t cudnnGetVersion(void) { return 92000; }
API size_t cudnnGetCudartVersion(void) { return EMULATED_CUDA; }
API const char *cudnnGetErrorString(int status) { return "memprof's emulated device has no cuDNN"; }

/* ---- NVRTC: everything compiles, to nothing */

API int nvrtcVersion(int *major, int *minor) { *major = CUDA_MAJOR; *minor = EMULATED_CUDA % 1000 / 10; return 0; }
API int nvrtcGetProgramLogSize(void *program, size_t *n) { *n = 1; return 0; }
API int nvrtcGetProgramLog(void *program, char *out) { *out = 0; return 0; }
API int nvrtcGetCUBINSize(void *program, size_t *n) { *n = 1; return 0; }
API int nvrtcGetPTXSize(void *program, size_t *n) { *n = 1; return 0; }
API int nvrtcGetLoweredName(void *program, const char *name, const char **out) { *out = name; return 0; }
API const char *nvrtcGetErrorString(int status) { return "emulated"; }
