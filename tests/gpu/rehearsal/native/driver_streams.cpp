// libcuda.so.1, streams, and memory that processes share: for callers that use the driver without the runtime.
#define __CUDA_API_VERSION_INTERNAL
#include <cuda.h>

#include "fake.h"
using namespace fk;
#define API api(__func__)
#define R(x) return (CUresult)(x)

FK CUresult cuMemsetD8_v2(CUdeviceptr d, unsigned char v, size_t n) {
    API;
    R(fill((void*)d, v, 1, n, nullptr, false));
}

FK CUresult cuStreamDestroy_v2(CUstream s) { R(stream_free(s)); }

FK CUresult cuIpcGetMemHandle(CUipcMemHandle* h, CUdeviceptr p) { R(ipc_get((void*)p, (char*)h)); }

FK CUresult cuIpcOpenMemHandle_v2(CUdeviceptr* p, CUipcMemHandle h, unsigned) { R(ipc_open((void**)p, (char*)&h)); }

FK CUresult cuIpcCloseMemHandle(CUdeviceptr p) { R(ipc_close((void*)p)); }

FK CUresult cuStreamCreate(CUstream* s, unsigned f) { R(stream_new((void**)s, f, 0)); }

FK CUresult cuStreamSynchronize(CUstream s) {
    API;
    R(stream_sync(s));
}

FK CUresult cuStreamIsCapturing(CUstream s, CUstreamCaptureStatus* st) {
    int v = 0;
    int e = info(s, &v, 0, 0, 0, 0);
    *st = (CUstreamCaptureStatus)v;
    R(e);
}

FK CUresult cuStreamWriteValue32_v2(CUstream, CUdeviceptr, cuuint32_t, unsigned) {
    API;
    R(0);
}

FK CUresult cuStreamWriteValue32(CUstream, CUdeviceptr, cuuint32_t, unsigned) {
    API;
    R(0);
}

FK CUresult cuEventCreate(CUevent* e, unsigned f) { R(event_new((void**)e, f)); }
