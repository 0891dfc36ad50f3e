// libcudart.so.13, devices and memory: the documented runtime API as far as torch calls it;
// generated stubs answer for the rest.
#include "runtime.h"

#include <cuda.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
static thread_local cudaError_t last = cudaSuccess;

cudaError_t done(int code) {
    if (code) last = (cudaError_t)code;
    return (cudaError_t)code;
}

#define UNSAFE                                   \
    do {                                         \
        if (int e = unsafe_call(__func__)) R(e); \
    } while (0)

// ---- devices
FK cudaError_t cudaGetDeviceCount(int* n) {
    *n = device_count();
    R(*n ? 0 : 100);
}

FK cudaError_t cudaGetDevice(int* d) {
    *d = device();
    return cudaSuccess;
}

FK cudaError_t cudaSetDevice(int d) {
    if (d < 0 || d >= device_count()) R(101);
    set_device(d);
    fakegpu_make_current();
    return cudaSuccess;
}

FK cudaError_t cudaDriverGetVersion(int* v) {
    *v = 13000;
    return cudaSuccess;
}

FK cudaError_t cudaRuntimeGetVersion(int* v) {
    *v = 13000;
    return cudaSuccess;
}

FK cudaError_t cudaDeviceGetAttribute(int* v, cudaDeviceAttr a, int d) {
    if (d >= device_count()) R(101);
    R(attribute(a, v, d));
}

FK cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int d) {
    if (d >= device_count()) R(101);
    memset(p, 0, sizeof *p);
    strcpy(p->name, "NVIDIA H100 80GB HBM3");
    memset(&p->uuid, 0x42 + d, sizeof p->uuid);
    mem_info(nullptr, &p->totalGlobalMem);
    p->sharedMemPerBlock = 49152;
    p->regsPerBlock = 65536;
    p->warpSize = 32;
    p->memPitch = 2147483647;
    p->maxThreadsPerBlock = 1024;
    p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
    p->maxThreadsDim[2] = 64;
    p->maxGridSize[0] = 2147483647;
    p->maxGridSize[1] = p->maxGridSize[2] = 65535;
    p->totalConstMem = 65536;
    p->major = 9;
    p->minor = 0;
    p->textureAlignment = 512;
    p->multiProcessorCount = 132;
    p->canMapHostMemory = 1;
    p->concurrentKernels = 1;
    p->pciBusID = 0x65 + d;
    p->asyncEngineCount = 3;
    p->unifiedAddressing = 1;
    p->memoryBusWidth = 5120;
    p->l2CacheSize = 52428800;
    p->persistingL2CacheMaxSize = 32 << 20;
    p->maxThreadsPerMultiProcessor = 2048;
    p->streamPrioritiesSupported = 1;
    p->globalL1CacheSupported = p->localL1CacheSupported = 1;
    p->sharedMemPerMultiprocessor = 233472;
    p->regsPerMultiprocessor = 65536;
    p->managedMemory = 1;
    p->computePreemptionSupported = 1;
    p->cooperativeLaunch = 1;
    p->sharedMemPerBlockOptin = 232448;
    p->maxBlocksPerMultiProcessor = 32;
    p->reservedSharedMemPerBlock = 1024;
    return cudaSuccess;
}

FK cudaError_t cudaDeviceGetPCIBusId(char* s, int n, int d) {
    snprintf(s, n, "0000:%02x:00.0", 0x65 + d);
    return cudaSuccess;
}

FK cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
    if (least) *least = 0;
    if (greatest) *greatest = -5;
    return cudaSuccess;
}

FK cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }

FK cudaError_t cudaDeviceCanAccessPeer(int* v, int a, int b) {
    *v = a != b;
    return cudaSuccess;
}

FK cudaError_t cudaDeviceSynchronize() {
    API;
    fakegpu_make_current();
    R(device_sync());
}

FK cudaError_t cudaGetLastError() {
    auto e = last;
    last = cudaSuccess;
    return e;
}

FK cudaError_t cudaPeekAtLastError() { return last; }

FK const char* cudaGetErrorString(cudaError_t e) { return error_text(e); }

FK const char* cudaGetErrorName(cudaError_t e) {
    static thread_local char s[64];
    snprintf(s, sizeof s, "cudaError %s", error_name(e));
    return s;
}

FK cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** out, unsigned v, unsigned long long,
                                                cudaDriverEntryPointQueryResult* status) {
    CUdriverProcAddressQueryResult r;
    cuGetProcAddress(name, out, v, 0, &r);
    if (status) *status = *out ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return cudaSuccess;
}

FK cudaError_t cudaProfilerStart() {
    API;
    return cudaSuccess;
}

FK cudaError_t cudaProfilerStop() {
    API;
    return cudaSuccess;
}

// ---- memory
FK cudaError_t cudaMalloc(void** p, size_t n) {
    UNSAFE;
    fakegpu_make_current();
    R(alloc(p, n, DEVICE));
}

FK cudaError_t cudaFree(void* p) {
    if (!p) {
        fakegpu_make_current();
        return cudaSuccess;
    }
    UNSAFE;
    R(release(p, DEVICE));
}

FK cudaError_t cudaHostAlloc(void** p, size_t n, unsigned) {
    UNSAFE;
    fakegpu_make_current();
    R(alloc(p, n, HOST_PINNED));
}

FK cudaError_t cudaFreeHost(void* p) {
    UNSAFE;
    R(release(p, HOST_PINNED));
}

FK cudaError_t cudaHostRegister(void* p, size_t n, unsigned) {
    UNSAFE;
    R(reg(p, n));
}

FK cudaError_t cudaHostUnregister(void* p) {
    UNSAFE;
    R(unreg(p));
}

FK cudaError_t cudaMemGetInfo(size_t* f, size_t* t) {
    API;
    fakegpu_make_current();
    mem_info(f, t);
    return cudaSuccess;
}

FK cudaError_t cudaMemcpyAsync(void* d, const void* s, size_t n, cudaMemcpyKind k, cudaStream_t h) {
    API;
    R(copy(d, s, n, h, true, k));
}

FK cudaError_t cudaMemcpy(void* d, const void* s, size_t n, cudaMemcpyKind k) { R(copy(d, s, n, nullptr, false, k)); }

FK cudaError_t cudaMemcpyPeerAsync(void* d, int, const void* s, int, size_t n, cudaStream_t h) {
    API;
    R(copy(d, s, n, h, true, 4));
}

FK cudaError_t cudaMemcpy2DAsync(void* d, size_t dp, const void* s, size_t sp, size_t w, size_t rows, cudaMemcpyKind k,
                                 cudaStream_t h) {
    API;
    for (size_t i = 0; i < rows; i++)
        if (int e = copy((char*)d + i * dp, (const char*)s + i * sp, w, h, true, k)) R(e);
    return cudaSuccess;
}

FK cudaError_t cudaMemset(void* p, int v, size_t n) {
    API;
    R(fill(p, v, 1, n, nullptr, false));
}

FK cudaError_t cudaMemsetAsync(void* p, int v, size_t n, cudaStream_t h) {
    API;
    R(fill(p, v, 1, n, h, true));
}

FK cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* a, const void* p) {
    memset(a, 0, sizeof *a);
    a->device = std::max(0, device_of(p));
    switch (kind_of(p, nullptr, nullptr, nullptr)) {
        case DEVICE:
            a->type = cudaMemoryTypeDevice;
            a->devicePointer = (void*)p;
            break;
        case HOST_PINNED:
            a->type = cudaMemoryTypeHost;
            a->devicePointer = a->hostPointer = (void*)p;
            break;
        default:
            a->type = cudaMemoryTypeUnregistered;
            a->device = -2;
            a->hostPointer = (void*)p;
    }
    return cudaSuccess;
}
