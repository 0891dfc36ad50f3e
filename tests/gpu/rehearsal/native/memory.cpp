// Memory: pages that nobody touched cost nothing, so 80 GB of device memory fit into any host. The unit of device
// memory and what a context takes are an H100's.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "state.h"

namespace fk {
static const size_t TOTAL = 85029158912ull, CONTEXT = 520ull << 20;

std::map<uintptr_t, Alloc>& allocs() {
    static auto* a = new std::map<uintptr_t, Alloc>;
    return *a;
}

static size_t used[DEVICES];
static uint64_t ids = 0;
static thread_local int selected = 0;

int device_count() {
    static int n = [] {
        const char* asked = getenv("FAKEGPU_COUNT");
        int n = asked ? std::min(atoi(asked), DEVICES) : 1;
        const char* visible = getenv("CUDA_VISIBLE_DEVICES");
        if (!visible) return n;
        int k = 0;
        for (const char* q = visible; *q >= '0' && *q <= '9' && atoi(q) < n;) {
            k++;
            while (*q && *q != ',') q++;
            if (*q) q++;
        }
        return k;
    }();
    return n;
}

int device() { return selected; }

void set_device(int d) { selected = d; }

int alloc(void** out, size_t n, Kind kind) {
    LOCK;
    if (!out) return INVALID;
    *out = nullptr;
    if (!n) return kind == DEVICE ? INVALID : OK;
    size_t unit = kind == DEVICE ? 2u << 20 : 4096, mapped = (n + unit - 1) / unit * unit;
    if (kind == DEVICE && used[device()] + mapped + CONTEXT > TOTAL) return OOM;
    size_t slack = kind == DEVICE ? unit : 0;
    bool share = kind == DEVICE && flag("FAKEGPU_IPC");
    int fd = share ? memfd_create("fakegpu", 0) : -1;
    if (share && ftruncate(fd, mapped + slack)) return OOM;
    char* p = (char*)mmap(nullptr, mapped + slack, PROT_READ | PROT_WRITE,
                          share ? MAP_SHARED | MAP_NORESERVE : MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, fd, 0);
    if (p == MAP_FAILED) return OOM;
    if (slack && !share) {
        char* q = (char*)(((uintptr_t)p + unit - 1) / unit * unit);
        if (q > p) munmap(p, q - p);
        size_t tail = slack - (q - p);
        if (tail) munmap(q + mapped, tail);
        p = q;
        madvise(p, mapped, MADV_NOHUGEPAGE);
    }
    if (kind == DEVICE) used[device()] += mapped;
    allocs()[(uintptr_t)p] = {n, mapped, kind, ++ids, false, device(), fd};
    *out = p;
    return OK;
}

std::map<uintptr_t, Alloc>::iterator find(const void* p) {
    auto& a = allocs();
    auto it = a.upper_bound((uintptr_t)p);
    if (it == a.begin()) return a.end();
    --it;
    return (uintptr_t)p < it->first + it->second.size ? it : a.end();
}

int release(void* p, Kind kind) {
    LOCK;
    if (!p) return OK;
    auto it = allocs().find((uintptr_t)p);
    if (it == allocs().end() || it->second.kind != kind || it->second.registered) {
        fault("free of %p, which was not allocated", p);
        return INVALID;
    }
    device_sync();
    if (kind == DEVICE) used[it->second.device] -= it->second.mapped;
    if (it->second.fd >= 0) close(it->second.fd);
    munmap(p, it->second.mapped);
    allocs().erase(it);
    return OK;
}

int reg(void* p, size_t n) {
    LOCK;
    if (find(p) != allocs().end()) return 712;
    allocs()[(uintptr_t)p] = {n, 0, HOST_PINNED, ++ids, true, device(), -1};
    return OK;
}

int unreg(void* p) {
    LOCK;
    auto it = allocs().find((uintptr_t)p);
    if (it == allocs().end() || !it->second.registered) return 713;
    allocs().erase(it);
    return OK;
}

Kind kind_of(const void* p, void** base, size_t* size, uint64_t* id) {
    LOCK;
    auto it = find(p);
    if (it == allocs().end()) return HOST_PAGEABLE;
    if (base) *base = (void*)it->first;
    if (size) *size = it->second.size;
    if (id) *id = it->second.id;
    return it->second.kind;
}

int device_of(const void* p) {
    LOCK;
    auto it = find(p);
    return it == allocs().end() ? -1 : it->second.device;
}

struct Ipc {
    int pid, fd, device;
    size_t size;
};

int ipc_get(void* p, char* h) {
    LOCK;
    auto it = allocs().find((uintptr_t)p);
    if (it == allocs().end() || it->second.fd < 0) {
        note("IPC handle of %p: set FAKEGPU_IPC=1, whole allocations only", p);
        return INVALID;
    }
    memset(h, 0, 64);
    Ipc i{getpid(), it->second.fd, it->second.device, it->second.size};
    memcpy(h, &i, sizeof i);
    return OK;
}

int ipc_open(void** p, const char* h) {
    LOCK;
    Ipc i;
    memcpy(&i, h, sizeof i);
    if (i.pid == getpid()) {
        fault("IPC handle opened in its own process");
        return 201;
    }
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", i.pid, i.fd);
    FILE* f = fopen(path, "r+");
    if (!f) return INVALID;
    *p = mmap(nullptr, i.size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fileno(f), 0);
    fclose(f);
    if (*p == MAP_FAILED) return OOM;
    allocs()[(uintptr_t)*p] = {i.size, i.size, DEVICE, ++ids, true, i.device, -1};
    return OK;
}

int ipc_close(void* p) {
    LOCK;
    auto it = allocs().find((uintptr_t)p);
    if (it == allocs().end()) return INVALID;
    munmap(p, it->second.size);
    allocs().erase(it);
    return OK;
}

void mem_info(size_t* f, size_t* t) {
    LOCK;
    if (f) *f = TOTAL - CONTEXT - used[device()];
    if (t) *t = TOTAL;
}
}  // namespace fk
