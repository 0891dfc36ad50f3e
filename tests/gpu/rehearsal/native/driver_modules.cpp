// libcuda.so.1, modules and launches: Triton's cubins are read for what their sections say a kernel takes, so that one
// that asks for too many registers or too much shared memory fails here as it would on the device.
#define __CUDA_API_VERSION_INTERNAL
#include <cuda.h>
#include <elf.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "fake.h"
using namespace fk;
#define API api(__func__)
#define R(x) return (CUresult)(x)
bool has_context();  // driver.cpp: whether this thread has one

struct Module {
    const char* image;
    size_t size;
};

struct Function {
    std::string name;
    int regs, shared, dynamic, threads, local;
    Module* module;
    int device;
};

FK CUresult cuModuleLoadData(CUmodule* out, const void* image) {
    if (int e = unsafe_call(__func__)) R(e);
    auto* h = (const Elf64_Ehdr*)image;
    if (memcmp(image, ELFMAG, 4)) {
        fault("cuModuleLoadData: not a cubin");
        R(200);
    }
    size_t size = h->e_shoff + (size_t)h->e_shnum * h->e_shentsize;
    char* mine = (char*)malloc(size);
    memcpy(mine, image, size);
    *out = (CUmodule) new Module{mine, size};
    R(0);
}

FK CUresult cuModuleLoadDataEx(CUmodule* out, const void* image, unsigned, CUjit_option*, void**) {
    return cuModuleLoadData(out, image);
}

FK CUresult cuModuleUnload(CUmodule) {
    if (int e = unsafe_call(__func__)) R(e);
    R(0);
}

FK CUresult cuModuleGetFunction(CUfunction* out, CUmodule m, const char* name) {
    API;
    auto* mod = (Module*)m;
    auto* h = (const Elf64_Ehdr*)mod->image;
    auto* s = (const Elf64_Shdr*)(mod->image + h->e_shoff);
    const char* names = mod->image + s[h->e_shstrndx].sh_offset;
    Function* f = nullptr;
    int shared = 0, regs = 0, local = 0;
    for (int i = 0; i < h->e_shnum; i++) {
        std::string n = names + s[i].sh_name;
        if (n == std::string(".text.") + name)
            f = new Function{name, (int)(s[i].sh_info >> 24), 0, 0, 1024, 0, mod, device()};
        if (n == std::string(".nv.shared.") + name) shared = s[i].sh_size;
        if (n == ".nv.info")
            for (size_t at = 0; at + 4 <= s[i].sh_size;) {  // attributes: 0x2f registers, 0x11 stack frame
                auto* e = (const unsigned char*)(mod->image + s[i].sh_offset + at);
                size_t more = e[0] == 4 ? *(const uint16_t*)(e + 2) : 0;
                if (e[0] == 4 && e[1] == 0x2f) regs = *(const int*)(e + 8);
                if (e[0] == 4 && e[1] == 0x11) local = *(const int*)(e + 8);
                at += 4 + more;
            }
    }
    if (!f) {
        fault("no kernel %s in its module", name);
        R(NOTFOUND);
    }
    f->shared = shared;
    if (regs) f->regs = regs;
    f->local = local;
    int per_warp = (f->regs * 32 + 255) / 256 * 256;
    if (per_warp) f->threads = std::min(1024, 65536 / per_warp / 4 * 4 * 32);
    *out = (CUfunction)f;
    R(0);
}

FK CUresult cuModuleGetGlobal_v2(CUdeviceptr*, size_t*, CUmodule, const char*) { R(NOTFOUND); }

FK CUresult cuFuncGetAttribute(int* v, CUfunction_attribute a, CUfunction h) {
    auto* f = (Function*)h;
    switch (a) {
        case 0: *v = f->threads; break;
        case 1: *v = f->shared; break;
        case 3: *v = f->local; break;
        case 4: *v = f->regs; break;
        case 5:
        case 6: *v = 90; break;
        case 8: *v = f->dynamic; break;
        default: *v = 0;
    }
    R(0);
}

FK CUresult cuFuncSetAttribute(CUfunction h, CUfunction_attribute a, int v) {
    auto* f = (Function*)h;
    if (a == 8) {
        if (v + f->shared > 232448) {
            note("%s asks for %d bytes of shared memory", f->name.c_str(), v);
            R(INVALID);
        }
        f->dynamic = v;
    }
    R(0);
}

FK CUresult cuFuncSetCacheConfig(CUfunction, CUfunc_cache) { R(0); }

static int start(Function* f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                 unsigned smem, CUstream s) {
    if (!has_context()) return 201;
    if (f->device != device()) {
        fault("BAD LAUNCH of %s: loaded on device %d, %d is current", f->name.c_str(), f->device, device());
        return 400;
    }
    if ((int)(bx * by * bz) > f->threads) {
        fault("BAD LAUNCH of %s: %u threads, its %d registers allow %d", f->name.c_str(), bx * by * bz, f->regs,
              f->threads);
        return 701;
    }
    return launch(s, ("triton " + f->name).c_str(), gx, gy, gz, bx, by, bz, smem, std::max(49152, f->dynamic));
}

FK CUresult cuLaunchKernel(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                           unsigned smem, CUstream s, void**, void**) {
    API;
    R(start((Function*)f, gx, gy, gz, bx, by, bz, smem, s));
}

FK CUresult cuLaunchKernelEx(const CUlaunchConfig* c, CUfunction f, void**, void**) {
    API;
    R(start((Function*)f, c->gridDimX, c->gridDimY, c->gridDimZ, c->blockDimX, c->blockDimY, c->blockDimZ,
            c->sharedMemBytes, c->hStream));
}

FK CUresult cuOccupancyMaxActiveClusters(int* n, CUfunction, const CUlaunchConfig*) {
    *n = 16;
    R(0);
}

FK CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* n, CUfunction f, int threads, size_t smem) {
    *n = std::max(1, std::min(2048 / std::max(1, threads), smem ? (int)(233472 / smem) : 32));
    R(0);
}

FK CUresult cuTensorMapEncodeTiled(CUtensorMap* m, CUtensorMapDataType, cuuint32_t, void* p, const cuuint64_t*,
                                   const cuuint64_t* strides, const cuuint32_t*, const cuuint32_t*,
                                   CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion,
                                   CUtensorMapFloatOOBfill) {
    API;
    if ((uintptr_t)p % 16 || strides[0] % 16) {
        fault("tensor map: address %p, stride %llu", p, (unsigned long long)strides[0]);
        R(INVALID);
    }
    memset(m, 0, sizeof *m);
    R(0);
}
