// libcudart.so.13, the kernels of compiled code: they register when their library is loaded, and are launched by name.
#include <algorithm>
#include <cstring>
#include <mutex>
#include <unordered_map>

#include "runtime.h"

struct Kernel {
    const char* name;
    int dynamic;
};

struct Var {
    size_t size;
    void* memory;
};

static std::unordered_map<const void*, Kernel>& kernels() {
    static auto* k = new std::unordered_map<const void*, Kernel>;
    return *k;
}

static std::unordered_map<const void*, Var>& vars() {
    static auto* v = new std::unordered_map<const void*, Var>;
    return *v;
}

static std::mutex& mu() {
    static std::mutex* m = new std::mutex;
    return *m;
}

FK void** __cudaRegisterFatBinary(void*) {
    static void* handle;
    return &handle;
}

FK void __cudaRegisterFatBinaryEnd(void**) {}

FK void __cudaUnregisterFatBinary(void**) {}

FK char __cudaInitModule(void**) { return 1; }

FK void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, uint3*, uint3*, dim3*, dim3*,
                               int*) {
    std::lock_guard<std::mutex> l(mu());
    kernels()[host] = {name, 0};
}

FK void __cudaRegisterVar(void**, char* host, char*, const char*, int, size_t size, int, int) {
    std::lock_guard<std::mutex> l(mu());
    vars()[host] = {size, nullptr};
}

struct Config {
    dim3 grid, block;
    size_t smem;
    cudaStream_t stream;
};

static thread_local Config pushed[8];
static thread_local int depth = 0;

FK unsigned __cudaPushCallConfiguration(dim3 g, dim3 b, size_t s, struct CUstream_st* h) {
    pushed[depth++ & 7] = {g, b, s, h};
    return 0;
}

FK cudaError_t __cudaPopCallConfiguration(dim3* g, dim3* b, size_t* s, void* h) {
    auto& c = pushed[--depth & 7];
    *g = c.grid;
    *b = c.block;
    *s = c.smem;
    *(cudaStream_t*)h = c.stream;
    return cudaSuccess;
}

static Kernel* kernel(const void* f) {
    std::lock_guard<std::mutex> l(mu());
    auto it = kernels().find(f);
    if (it != kernels().end()) return &it->second;
    return nullptr;
}

static std::unordered_map<const void*, int>& handles() {
    static auto* h = new std::unordered_map<const void*, int>;
    return *h;
}

FK cudaError_t __cudaGetKernel(cudaKernel_t* out, const void* f) {
    Kernel* k = kernel(f);
    if (!k) R(98);
    {
        std::lock_guard<std::mutex> l(mu());
        handles()[k] = 1;
    }
    *out = (cudaKernel_t)k;
    return cudaSuccess;
}

static Kernel* any(const void* f) {
    {
        std::lock_guard<std::mutex> l(mu());
        if (handles().count(f)) return (Kernel*)f;
    }
    return kernel(f);
}

static cudaError_t start(const void* f, dim3 g, dim3 b, size_t smem, cudaStream_t s) {
    Kernel* k = any(f);
    if (!k) {
        fault("launch of an unknown kernel");
        R(98);
    }
    fakegpu_make_current();
    R(launch(s, k->name, g.x, g.y, g.z, b.x, b.y, b.z, smem, std::max(49152, k->dynamic)));
}

FK cudaError_t __cudaLaunchKernel(cudaKernel_t f, dim3 g, dim3 b, void**, size_t m, cudaStream_t s) {
    API;
    return start(f, g, b, m, s);
}

FK cudaError_t cudaLaunchKernel(const void* f, dim3 g, dim3 b, void**, size_t m, cudaStream_t s) {
    API;
    return start(f, g, b, m, s);
}

FK cudaError_t cudaLaunchCooperativeKernel(const void* f, dim3 g, dim3 b, void**, size_t m, cudaStream_t s) {
    API;
    return start(f, g, b, m, s);
}

FK cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* c, const void* f, void**) {
    API;
    return start(f, c->gridDim, c->blockDim, c->dynamicSmemBytes, c->stream);
}

FK cudaError_t cudaFuncSetAttribute(const void* f, cudaFuncAttribute a, int v) {
    Kernel* k = any(f);
    if (!k) R(98);
    if (a == cudaFuncAttributeMaxDynamicSharedMemorySize) {
        if (v > 232448) R(1);
        k->dynamic = v;
    }
    return cudaSuccess;
}

FK cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* o, const void* f) {
    if (!any(f)) R(98);
    memset(o, 0, sizeof *o);
    o->maxThreadsPerBlock = 1024;
    o->numRegs = 32;
    o->ptxVersion = o->binaryVersion = 90;
    o->maxDynamicSharedSizeBytes = 49152;
    return cudaSuccess;
}

FK cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* n, const void*, int threads, size_t smem,
                                                                      unsigned) {
    *n = std::max(1, std::min({2048 / std::max(threads, 1), 32, smem ? (int)(233472 / smem) : 32}));
    return cudaSuccess;
}

FK cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* n, const void* f, int t, size_t s) {
    return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(n, f, t, s, 0);
}

FK cudaError_t cudaGetSymbolAddress(void** p, const void* symbol) {
    std::lock_guard<std::mutex> l(mu());
    auto it = vars().find(symbol);
    if (it == vars().end()) R(13);
    if (!it->second.memory) alloc(&it->second.memory, it->second.size, DEVICE);
    *p = it->second.memory;
    return cudaSuccess;
}

FK cudaError_t cudaMemcpyToSymbol(const void* symbol, const void* src, size_t n, size_t off, cudaMemcpyKind) {
    void* p;
    if (cudaGetSymbolAddress(&p, symbol)) R(13);
    R(copy((char*)p + off, src, n, nullptr, false, 4));
}
