
// libcuda.so.1: what Triton, torch and ctypes callers need of it; generated stubs answer for the rest.
#define __CUDA_API_VERSION_INTERNAL
#include <cuda.h>
#include <dlfcn.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>

#include "fake.h"
using namespace fk;
#define API api(__func__)
#define R(x) return (CUresult)(x)
static int context_object[8];  // as many as state.h's DEVICES

static CUcontext context(int d) { return (CUcontext)&context_object[d]; }

static int ordinal(CUcontext c) { return (int*)c - context_object; }

#define primary context(device())
static thread_local CUcontext current = nullptr;
static bool started = false, active = false;

bool has_context() { return current; }

FK void fakegpu_make_current() {
    started = active = true;
    current = primary;
}

FK CUresult cuInit(unsigned) {
    API;
    if (!device_count()) R(100);
    started = true;
    R(0);
}

FK CUresult cuDriverGetVersion(int* v) {
    *v = 13000;
    R(0);
}

FK CUresult cuDeviceGetCount(int* n) {
    if (!started) R(3);
    *n = device_count();
    R(*n ? 0 : 100);
}

FK CUresult cuDeviceGet(CUdevice* d, int i) {
    if (!started) R(3);
    if (i >= device_count()) R(101);
    *d = i;
    R(0);
}

FK CUresult cuDeviceGetName(char* s, int n, CUdevice) {
    snprintf(s, n, "NVIDIA H100 80GB HBM3");
    R(0);
}

FK CUresult cuDeviceTotalMem_v2(size_t* n, CUdevice) {
    mem_info(nullptr, n);
    R(0);
}

FK CUresult cuDeviceGetAttribute(int* v, CUdevice_attribute a, CUdevice d) { R(attribute(a, v, d)); }

FK CUresult cuDeviceGetUuid_v2(CUuuid* u, CUdevice d) {
    memset(u, 0x42 + d, sizeof *u);
    R(0);
}

FK CUresult cuDeviceGetUuid(CUuuid* u, CUdevice d) { return cuDeviceGetUuid_v2(u, d); }

FK CUresult cuDeviceGetPCIBusId(char* s, int n, CUdevice d) {
    snprintf(s, n, "0000:%02x:00.0", 0x65 + d);
    R(0);
}

FK CUresult cuDeviceGetP2PAttribute(int* v, CUdevice_P2PAttribute, CUdevice, CUdevice) {
    *v = 1;
    R(0);
}

FK CUresult cuDevicePrimaryCtxRetain(CUcontext* c, CUdevice d) {
    API;
    active = true;
    *c = context(d);
    R(0);
}

FK CUresult cuDevicePrimaryCtxRelease_v2(CUdevice) { R(0); }

FK CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* f, int* a) {
    *f = 0;
    *a = active;
    R(0);
}

FK CUresult cuCtxGetCurrent(CUcontext* c) {
    *c = current;
    R(0);
}

FK CUresult cuCtxSetCurrent(CUcontext c) {
    current = c;
    if (c) set_device(ordinal(c));
    R(0);
}

FK CUresult cuCtxPushCurrent_v2(CUcontext c) { return cuCtxSetCurrent(c); }

FK CUresult cuCtxPopCurrent_v2(CUcontext* c) {
    if (c) *c = current;
    R(0);
}

FK CUresult cuCtxGetDevice(CUdevice* d) {
    if (!current) R(201);
    *d = device();
    R(0);
}

FK CUresult cuCtxSynchronize() {
    API;
    R(device_sync());
}

FK CUresult cuCtxGetLimit(size_t* v, CUlimit) {
    *v = 1 << 20;
    R(0);
}

FK CUresult cuCtxSetLimit(CUlimit, size_t) { R(0); }

FK CUresult cuGetErrorString(CUresult e, const char** s) {
    *s = error_text(e);
    R(0);
}

FK CUresult cuGetErrorName(CUresult e, const char** s) {
    *s = error_name(e);
    R(0);
}

FK CUresult cuMemGetInfo_v2(size_t* f, size_t* t) {
    mem_info(f, t);
    R(0);
}

FK CUresult cuMemAlloc_v2(CUdeviceptr* p, size_t n) {
    if (int e = unsafe_call(__func__)) R(e);
    R(alloc((void**)p, n, DEVICE));
}

FK CUresult cuMemFree_v2(CUdeviceptr p) {
    if (int e = unsafe_call(__func__)) R(e);
    R(release((void*)p, DEVICE));
}

FK CUresult cuMemHostAlloc(void** p, size_t n, unsigned) {
    if (int e = unsafe_call(__func__)) R(e);
    R(alloc(p, n, HOST_PINNED));
}

FK CUresult cuMemFreeHost(void* p) {
    if (int e = unsafe_call(__func__)) R(e);
    R(release(p, HOST_PINNED));
}

FK CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr d, const void* s, size_t n, CUstream h) {
    API;
    R(copy((void*)d, s, n, h, true, 1));
}

FK CUresult cuMemcpyDtoHAsync_v2(void* d, CUdeviceptr s, size_t n, CUstream h) {
    API;
    R(copy(d, (void*)s, n, h, true, 2));
}

FK CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr d, CUdeviceptr s, size_t n, CUstream h) {
    API;
    R(copy((void*)d, (void*)s, n, h, true, 3));
}

FK CUresult cuMemcpyHtoD_v2(CUdeviceptr d, const void* s, size_t n) {
    API;
    R(copy((void*)d, s, n, nullptr, false, 1));
}

FK CUresult cuMemcpyDtoH_v2(void* d, CUdeviceptr s, size_t n) {
    API;
    R(copy(d, (void*)s, n, nullptr, false, 2));
}

FK CUresult cuMemsetD32Async(CUdeviceptr d, unsigned v, size_t n, CUstream h) {
    API;
    R(fill((void*)d, v, 4, n, h, true));
}

FK CUresult cuMemsetD8Async(CUdeviceptr d, unsigned char v, size_t n, CUstream h) {
    API;
    R(fill((void*)d, v, 1, n, h, true));
}

FK CUresult cuMemGetAddressRange_v2(CUdeviceptr* b, size_t* n, CUdeviceptr p) {
    if (kind_of((void*)p, (void**)b, n, nullptr) == HOST_PAGEABLE) R(NOTFOUND);
    R(0);
}

FK CUresult cuPointerGetAttribute(void* out, CUpointer_attribute a, CUdeviceptr p) {
    void* base = nullptr;
    size_t size = 0;
    uint64_t id = 0;
    Kind k = kind_of((void*)p, &base, &size, &id);
    if (k == HOST_PAGEABLE) R(INVALID);
    switch (a) {
        case CU_POINTER_ATTRIBUTE_CONTEXT: *(CUcontext*)out = context(device_of((void*)p)); R(0);
        case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
            *(unsigned*)out = k == DEVICE ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
            R(0);
        case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
        case CU_POINTER_ATTRIBUTE_HOST_POINTER:
            if (a == CU_POINTER_ATTRIBUTE_HOST_POINTER && k == DEVICE) R(INVALID);
            *(CUdeviceptr*)out = p;
            R(0);
        case CU_POINTER_ATTRIBUTE_BUFFER_ID: *(uint64_t*)out = id; R(0);
        case CU_POINTER_ATTRIBUTE_IS_MANAGED: *(bool*)out = false; R(0);
        case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: *(int*)out = device_of((void*)p); R(0);
        case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR: *(CUdeviceptr*)out = (CUdeviceptr)base; R(0);
        case CU_POINTER_ATTRIBUTE_RANGE_SIZE: *(size_t*)out = size; R(0);
        default: note("pointer attribute %d", a); R(NOTSUPPORTED);
    }
}

FK CUresult cuPointerSetAttribute(const void*, CUpointer_attribute, CUdeviceptr) { R(0); }

FK CUresult cuStreamGetCtx(CUstream, CUcontext* c) {
    *c = primary;
    R(0);
}

FK CUresult cuGetProcAddress_v2(const char* name, void** out, int, cuuint64_t, CUdriverProcAddressQueryResult* status) {
    *out = nullptr;
    static void* self = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
    for (const char* suffix : {"_v4", "_v3", "_v2", ""})
        if (!*out) *out = dlsym(self, (std::string(name) + suffix).c_str());
    if (status) *status = *out ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    if (!*out) note("cuGetProcAddress: no %s", name);
    R(*out ? 0 : NOTFOUND);
}

FK CUresult cuGetProcAddress(const char* name, void** out, int v, cuuint64_t f) {
    return cuGetProcAddress_v2(name, out, v, f, nullptr);
}

FK CUresult cuGetExportTable(const void** t, const CUuuid*) {
    *t = nullptr;
    R(NOTSUPPORTED);
}  // nobody here needs what is not documented
