/* Streams and events. Work on a stream is done at once, but an event is finished only settings.event_delay_ns after it was
 * recorded, so that blocks with record_stream wait as they do on a card. CUDA graphs are refused. */
#include "emulator.h"
#include <unistd.h>

struct CUstream_st { int device, priority; };
struct CUevent_st { uint64_t recorded; };

API cudaError_t cudaStreamCreateWithPriority(cudaStream_t *out, unsigned flags, int priority) {
    *out = calloc(1, sizeof **out);
    (*out)->device = current_device;
    (*out)->priority = priority;
    return cudaSuccess;
}
API cudaError_t cudaStreamCreateWithFlags(cudaStream_t *out, unsigned flags) { return cudaStreamCreateWithPriority(out, flags, 0); }
API cudaError_t cudaStreamCreate(cudaStream_t *out) { return cudaStreamCreateWithPriority(out, 0, 0); }
API cudaError_t cudaStreamDestroy(cudaStream_t stream) { free(stream); return cudaSuccess; }
API cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) {
    *priority = (uintptr_t)stream > 2 ? stream->priority : 0; /* 0, 1, 2: the default streams, which are no pointers */
    return cudaSuccess;
}
API cudaError_t cudaStreamQuery(cudaStream_t stream) { return cudaSuccess; }
API cudaError_t cudaStreamSynchronize(cudaStream_t stream) { return cudaSuccess; }
API cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) { return cudaSuccess; }
API cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t call, void *data, unsigned flags) {
    call(stream, cudaSuccess, data);
    return cudaSuccess;
}
API cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t call, void *data) { call(data); return cudaSuccess; }

/* ---- graphs: nothing is ever being captured */

API cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode) {
    return failed(cudaErrorStreamCaptureUnsupported);
}
API cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
    *status = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}
API CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) { /* Triton's, from 3.9 on */
    *status = CU_STREAM_CAPTURE_STATUS_NONE;
    return CUDA_SUCCESS;
}
#if CUDART_VERSION >= 13000
API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status,
                                         unsigned long long *id, cudaGraph_t *graph, const cudaGraphNode_t **nodes,
                                         const cudaGraphEdgeData **edges, size_t *n) {
#else /* a macro of CUDA 12's headers makes it cudaStreamGetCaptureInfo_v2 */
API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status,
                                         unsigned long long *id, cudaGraph_t *graph, const cudaGraphNode_t **nodes, size_t *n) {
#endif
    *status = cudaStreamCaptureStatusNone;
    if (id) *id = 0;
    if (n) *n = 0;
    return cudaSuccess;
}
API cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) { return cudaSuccess; }

/* ---- events */

API cudaError_t cudaEventCreateWithFlags(cudaEvent_t *out, unsigned flags) { *out = calloc(1, sizeof **out); return cudaSuccess; }
API cudaError_t cudaEventCreate(cudaEvent_t *out) { return cudaEventCreateWithFlags(out, 0); }
API cudaError_t cudaEventDestroy(cudaEvent_t event) { free(event); return cudaSuccess; }
API cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) { event->recorded = now_ns(); return cudaSuccess; }
API cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) { return cudaEventRecord(event, stream); }
API cudaError_t cudaEventQuery(cudaEvent_t event) {
    ready();
    int finished = !event->recorded || now_ns() >= event->recorded + settings.event_delay_ns;
    return finished ? cudaSuccess : failed(cudaErrorNotReady);
}
API cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    ready();
    uint64_t now = now_ns(), end = event->recorded + settings.event_delay_ns;
    if (event->recorded && now < end) usleep((useconds_t)((end - now) / 1000 + 1));
    return cudaSuccess;
}
API cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t from, cudaEvent_t to) { /* the host's time, not a card's */
    *ms = (float)((double)(int64_t)(to->recorded - from->recorded) / 1e6);
    return cudaSuccess;
}
