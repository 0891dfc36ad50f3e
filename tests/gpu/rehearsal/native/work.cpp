// What is put into streams: launches, which compute nothing, copies, fills, and calls of the host.
#include <sys/mman.h>

#include <cstring>

#include "state.h"

namespace fk {
int launch(void* h, const char* name, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
           size_t smem, size_t limit) {
    LOCK;
    Stream* s = stream(h);
    if (int e = enter(s, name)) return e;
    if (s->device != device()) {
        fault("BAD LAUNCH of %s: device %d is current, the stream is of %d", name, device(), s->device);
        return BADHANDLE;
    }
    if (!gx || !gy || !gz || !bx || !by || !bz || gx > 0x7fffffffu || gy > 65535 || gz > 65535 ||
        (uint64_t)bx * by * bz > 1024) {
        fault("BAD LAUNCH of %s: grid %u,%u,%u block %u,%u,%u", name, gx, gy, gz, bx, by, bz);
        return BADCONFIG;
    }
    if (smem > limit) {
        fault("BAD LAUNCH of %s: %zu bytes of shared memory, %zu allowed", name, smem, limit);
        return INVALID;
    }
    if (s->capture) {
        add(s, Node{0, name});
        return OK;
    }
    count(std::string("eager ") + name);
    put(s, nullptr);
    return OK;
}

// Of a sample where it is large: to see that pinned bytes changed before their copy ran.
static uint64_t hash(const void* p, size_t n) {
    uint64_t h = 1469598103934665603ull;
    auto* b = (const unsigned char*)p;
    size_t step = n > 1u << 20 ? n >> 18 : 1;
    for (size_t i = 0; i < n; i += step) h = (h ^ b[i]) * 1099511628211ull;
    return h;
}

// Whole pages are given back, which reads as zeros and costs no memory.
static void zero(void* p, size_t n) {
    uintptr_t a = ((uintptr_t)p + 4095) & ~4095ull, b = ((uintptr_t)p + n) & ~4095ull;
    if (b <= a || b - a < (1u << 20)) {
        memset(p, 0, n);
        return;
    }
    memset(p, 0, a - (uintptr_t)p);
    memset((void*)b, 0, (uintptr_t)p + n - b);
    madvise((void*)a, b - a, MADV_DONTNEED);
}

void set(void* dst, int value, int width, size_t n) {
    if (zeros()) return;  // it holds them already: only device memory is filled
    if (!value) return zero(dst, n * width);
    if (width == 1)
        memset(dst, value, n);
    else if (width == 2)
        for (size_t i = 0; i < n; i++) ((uint16_t*)dst)[i] = value;
    else
        for (size_t i = 0; i < n; i++) ((uint32_t*)dst)[i] = value;
}

static bool within(const void* p, size_t n, const char* what) {
    auto it = find(p);
    if (it == allocs().end()) return true;
    if ((uintptr_t)p + n <= it->first + it->second.size) return true;
    fault("BAD COPY: %s reaches %zu bytes past its allocation", what,
          (size_t)((uintptr_t)p + n - it->first - it->second.size));
    return false;
}

static const char* names[] = {"HtoH", "HtoD", "DtoH", "DtoD"};

// `way` is a cudaMemcpyKind.
void move(void* dst, const void* src, size_t n, int way) {
    if (zeros() && way == 1) return;
    if (zeros() && way == 2)
        memset(dst, 0, n);
    else if (!zeros() || way != 3)
        memmove(dst, src, n);
}

// Where work is lazy, what a copy shall bring into pinned memory is rubbish until somebody waited for it.
int copy(void* dst, const void* src, size_t n, void* h, bool async, int direction) {
    if (!async) {
        if (int e = unsafe_call("memcpy")) return e;
    }
    LOCK;
    if (!n) return OK;
    Stream* s = stream(h);
    Kind from = kind_of(src, 0, 0, 0), to = kind_of(dst, 0, 0, 0);
    int way = (from == DEVICE ? 2 : 0) | (to == DEVICE ? 1 : 0);
    if (direction < 4 && direction != way) {
        fault("BAD COPY: asked for %s, the pointers are %s", names[direction], names[way]);
        return INVALID;
    }
    if (!within(dst, n, "destination") || !within(src, n, "source")) return INVALID;
    std::string what = std::string("memcpy ") + names[way] +
                       ((from == HOST_PAGEABLE || to == HOST_PAGEABLE) ? " pageable" : "") + (async ? "" : " blocking");
    if (int e = enter(s, what.c_str())) return e;
    if (s->capture) {
        if (from == HOST_PAGEABLE || to == HOST_PAGEABLE)
            return kill_capture(s->capture, CAP_UNSUPPORTED, what.c_str());
        Node node{1, what};
        node.dst = dst;
        node.src = src;
        node.n = n;
        node.value = way;
        add(s, node);
        return OK;
    }
    count("eager " + what);
    if (!lazy() || !async || from == HOST_PAGEABLE || to == HOST_PAGEABLE) {
        if (from == HOST_PAGEABLE && to == DEVICE && lazy() && async) {  // the driver takes the bytes before it returns
            auto bytes = std::make_shared<std::string>((const char*)src, n);
            put(s, [=] { move(dst, bytes->data(), n, way); });
            return OK;
        }
        drain(s);
        move(dst, src, n, way);
        return OK;
    }
    if (from == HOST_PINNED) {
        uint64_t was = hash(src, n);
        put(s, [=] {
            if (hash(src, n) != was) fault("HAZARD: %zu pinned bytes at %p were written before their copy ran", n, src);
            move(dst, src, n, way);
        });
    } else {
        if (to == HOST_PINNED) memset(dst, 0x5a, n);
        put(s, [=] { move(dst, src, n, way); });
    }
    return OK;
}

int fill(void* dst, int value, int width, size_t n, void* h, bool async) {
    LOCK;
    if (!n) return OK;
    Stream* s = stream(h);
    if (!within(dst, n * width, "memset")) return INVALID;
    if (int e = enter(s, "memset")) return e;
    if (s->capture) {
        Node node{2, "memset"};
        node.dst = dst;
        node.value = value;
        node.width = width;
        node.n = n;
        add(s, node);
        return OK;
    }
    count("eager memset");
    put(s, [=] { set(dst, value, width, n); });
    if (!async) drain(s);
    return OK;
}

int host(void* h, HostFn fn, void* data) {
    LOCK;
    Stream* s = stream(h);
    if (int e = enter(s, "host function")) return e;
    if (s->capture) {
        Node node{3, "host function"};
        node.fn = fn;
        node.data = data;
        add(s, node);
        return OK;
    }
    put(s, [=] { fn(data); });
    return OK;
}
}  // namespace fk
