/* Modules of the driver's API: what Triton's launcher and torch's own run-time compiler load. They launch nothing. */
#include "emulator.h"

API CUresult cuModuleLoadData(CUmodule *out, const void *image) { *out = (CUmodule)1; return CUDA_SUCCESS; }
API CUresult cuModuleLoadDataEx(CUmodule *out, const void *image, unsigned n, CUjit_option *o, void **v) { *out = (CUmodule)1; return CUDA_SUCCESS; }
API CUresult cuModuleLoad(CUmodule *out, const char *path) { *out = (CUmodule)1; return CUDA_SUCCESS; }
API CUresult cuModuleUnload(CUmodule module) { return CUDA_SUCCESS; }
API CUresult cuModuleGetFunction(CUfunction *out, CUmodule module, const char *name) { *out = (CUfunction)1; return CUDA_SUCCESS; }
API CUresult cuModuleGetGlobal(CUdeviceptr *out, size_t *n, CUmodule module, const char *name) { return CUDA_ERROR_NOT_FOUND; }

API CUresult cuFuncGetAttribute(int *value, CUfunction_attribute which, CUfunction function) {
    *value = which == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : which == CU_FUNC_ATTRIBUTE_NUM_REGS ? 32 : 0;
    return CUDA_SUCCESS;
}
API CUresult cuFuncSetAttribute(CUfunction f, CUfunction_attribute a, int value) { return CUDA_SUCCESS; }
API CUresult cuFuncSetCacheConfig(CUfunction f, CUfunc_cache c) { return CUDA_SUCCESS; }
API CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *n, CUfunction f, int block, size_t shared) { *n = 1; return CUDA_SUCCESS; }
API CUresult cuOccupancyMaxActiveClusters(int *n, CUfunction f, const CUlaunchConfig *c) { *n = 1; return CUDA_SUCCESS; }

API CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address,
    const cuuint64_t *dims, const cuuint64_t *strides, const cuuint32_t *box, const cuuint32_t *steps,
    CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle, CUtensorMapL2promotion l2, CUtensorMapFloatOOBfill fill) { return CUDA_SUCCESS; }
API CUresult cuTensorMapEncodeIm2col(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address,
    const cuuint64_t *dims, const cuuint64_t *strides, const int *lower, const int *upper, cuuint32_t channels, cuuint32_t pixels,
    const cuuint32_t *steps, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle, CUtensorMapL2promotion l2,
    CUtensorMapFloatOOBfill fill) { return CUDA_SUCCESS; }

API CUresult cuLaunchKernel(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                            unsigned shared, CUstream stream, void **args, void **extra) { count_launch(f); return CUDA_SUCCESS; }
API CUresult cuLaunchKernelEx(const CUlaunchConfig *c, CUfunction f, void **args, void **extra) { count_launch(f); return CUDA_SUCCESS; }
API CUresult cuLaunchCooperativeKernel(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                                       unsigned shared, CUstream stream, void **args) { count_launch(f); return CUDA_SUCCESS; }
