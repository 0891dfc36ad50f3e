// libcudart.so.13, streams, events, captures and graphs.
#include "runtime.h"

FK cudaError_t cudaStreamCreateWithPriority(cudaStream_t* s, unsigned f, int p) {
    fakegpu_make_current();
    R(stream_new((void**)s, f, p));
}

FK cudaError_t cudaStreamCreate(cudaStream_t* s) {
    fakegpu_make_current();
    R(stream_new((void**)s, 0, 0));
}

FK cudaError_t cudaStreamCreateWithFlags(cudaStream_t* s, unsigned f) {
    fakegpu_make_current();
    R(stream_new((void**)s, f, 0));
}

FK cudaError_t cudaStreamDestroy(cudaStream_t s) { R(stream_free(s)); }

FK cudaError_t cudaStreamSynchronize(cudaStream_t s) {
    API;
    R(stream_sync(s));
}

FK cudaError_t cudaStreamQuery(cudaStream_t s) {
    API;
    R(stream_query(s));
}

FK cudaError_t cudaStreamGetPriority(cudaStream_t s, int* p) { R(stream_priority(s, p)); }

FK cudaError_t cudaStreamGetFlags(cudaStream_t s, unsigned* p) { R(stream_flags(s, p)); }

FK cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned) {
    API;
    R(stream_wait(s, e));
}

FK cudaError_t cudaLaunchHostFunc(cudaStream_t s, cudaHostFn_t f, void* d) {
    API;
    R(host(s, f, d));
}

FK cudaError_t cudaEventCreateWithFlags(cudaEvent_t* e, unsigned f) {
    fakegpu_make_current();
    API;
    R(event_new((void**)e, f));
}

FK cudaError_t cudaEventCreate(cudaEvent_t* e) { return cudaEventCreateWithFlags(e, 0); }

FK cudaError_t cudaEventDestroy(cudaEvent_t e) { R(event_free(e)); }

FK cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) {
    API;
    R(event_record(e, s, 0));
}

FK cudaError_t cudaEventRecordWithFlags(cudaEvent_t e, cudaStream_t s, unsigned f) {
    API;
    R(event_record(e, s, f));
}

FK cudaError_t cudaEventSynchronize(cudaEvent_t e) { R(event_sync(e)); }

FK cudaError_t cudaEventQuery(cudaEvent_t e) { R(event_query(e)); }

FK cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t a, cudaEvent_t b) { R(event_ms(ms, a, b)); }

FK cudaError_t cudaStreamBeginCapture(cudaStream_t s, cudaStreamCaptureMode m) {
    API;
    R(begin(s, m));
}

FK cudaError_t cudaStreamEndCapture(cudaStream_t s, cudaGraph_t* g) {
    API;
    R(end(s, (void**)g));
}

FK cudaError_t cudaStreamIsCapturing(cudaStream_t s, cudaStreamCaptureStatus* st) {
    int v = 0;
    int e = info(s, &v, 0, 0, 0, 0);
    *st = (cudaStreamCaptureStatus)v;
    R(e);
}

FK cudaError_t cudaStreamGetCaptureInfo(cudaStream_t s, cudaStreamCaptureStatus* st, unsigned long long* id,
                                        cudaGraph_t* g, const cudaGraphNode_t** d, const cudaGraphEdgeData** ed,
                                        size_t* n) {
    int v = 0;
    int e = info(s, &v, id, (void**)g, (const void***)d, n);
    *st = (cudaStreamCaptureStatus)v;
    if (ed) *ed = nullptr;
    R(e);
}

FK cudaError_t cudaStreamUpdateCaptureDependencies(cudaStream_t s, cudaGraphNode_t* d, const cudaGraphEdgeData*,
                                                   size_t n, unsigned f) {
    R(update_deps(s, (void**)d, n, f));
}

FK cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* m) {
    int v = *m;
    int e = exchange(&v);
    *m = (cudaStreamCaptureMode)v;
    R(e);
}

FK cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* x, cudaGraph_t g, unsigned long long) {
    API;
    R(instantiate((void**)x, g));
}

FK cudaError_t cudaGraphInstantiate(cudaGraphExec_t* x, cudaGraph_t g, unsigned long long) {
    API;
    R(instantiate((void**)x, g));
}

FK cudaError_t cudaGraphLaunch(cudaGraphExec_t x, cudaStream_t s) {
    API;
    R(graph_launch(x, s));
}

FK cudaError_t cudaGraphExecDestroy(cudaGraphExec_t x) { R(exec_free(x)); }

FK cudaError_t cudaGraphDestroy(cudaGraph_t g) { R(graph_free(g)); }

FK cudaError_t cudaGraphGetNodes(cudaGraph_t g, cudaGraphNode_t* n, size_t* c) { R(graph_nodes(g, (void**)n, c)); }

FK cudaError_t cudaGraphNodeGetType(cudaGraphNode_t n, cudaGraphNodeType* t) {
    *t = (cudaGraphNodeType)node_type(n);
    return cudaSuccess;
}

FK cudaError_t cudaGraphNodeGetDependencies(cudaGraphNode_t n, cudaGraphNode_t* d, cudaGraphEdgeData*, size_t* c) {
    R(node_deps(n, (void**)d, c));
}

FK cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* p, int) {
    static int pool;
    *p = (cudaMemPool_t)&pool;
    return cudaSuccess;
}
