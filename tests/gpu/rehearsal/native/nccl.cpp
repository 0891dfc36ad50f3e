
// libnccl.so.2: communicators of any size whose other ranks agree with everything; each collective is one launch.
#include <cstring>

#include "fake.h"
using namespace fk;

struct Id {
    char bytes[128];
};

struct Comm {
    int size, rank;
    bool dead;
};

FK int ncclGetVersion(int* v) {
    *v = 22809;
    return 0;
}

FK int ncclGetUniqueId(Id* id) {
    memset(id, 7, sizeof *id);
    return 0;
}

FK int ncclCommInitRank(Comm** c, int n, Id id, int rank) {
    if (unsafe_call("ncclCommInitRank")) return 1;
    *c = new Comm{n, rank, false};
    return 0;
}

FK int ncclCommInitRankConfig(Comm** c, int n, Id id, int rank, void*) { return ncclCommInitRank(c, n, id, rank); }

FK int ncclCommInitAll(Comm** c, int n, const int*) {
    for (int i = 0; i < n; i++) c[i] = new Comm{n, i, false};
    return 0;
}

FK int ncclCommDestroy(Comm* c) {
    c->dead = true;
    return 0;
}

FK int ncclCommFinalize(Comm*) { return 0; }

FK int ncclCommAbort(Comm* c) {
    if (c->dead) fault("ncclCommAbort of a dead communicator");
    c->dead = true;
    return 0;
}

FK int ncclCommGetAsyncError(Comm* c, int* e) {
    if (c->dead) {
        fault("ncclCommGetAsyncError of a dead communicator");
        return 4;
    }
    *e = 0;
    return 0;
}

FK const char* ncclGetErrorString(int e) { return e ? "fake NCCL error" : "no error"; }

FK const char* ncclGetLastError(Comm*) { return ""; }

FK int ncclCommCount(Comm* c, int* n) {
    *n = c->size;
    return 0;
}

FK int ncclCommUserRank(Comm* c, int* n) {
    *n = c->rank;
    return 0;
}

FK int ncclCommCuDevice(Comm*, int* n) {
    *n = 0;
    return 0;
}

static int groups = 0;

FK int ncclGroupStart() {
    groups++;
    return 0;
}

FK int ncclGroupEnd() {
    if (--groups < 0) {
        fault("ncclGroupEnd without start");
        groups = 0;
        return 5;
    }
    return 0;
}

static int go(const char* n, Comm* c, void* s) {
    if (c->dead) {
        fault("%s on a dead communicator", n);
        return 4;
    }
    return launch(s, n, 1, 1, 1, 512, 1, 1, 0, 1) ? 1 : 0;
}

static bool bad(const char* n, const void* p, size_t bytes) {
    void* b;
    size_t sz;
    if (kind_of(p, &b, &sz, 0) != DEVICE) {
        fault("%s on memory that is not the device's", n);
        return true;
    }
    if ((char*)p + bytes > (char*)b + sz) {
        fault("%s past its memory", n);
        return true;
    }
    return false;
}

static size_t width(int t) {
    static const int w[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
    return w[t];
}

FK int ncclAllReduce(const void* a, void* b, size_t n, int t, int, Comm* c, void* s) {
    if (bad("all reduce", a, n * width(t)) || bad("all reduce", b, n * width(t))) return 4;
    return go("ncclAllReduce", c, s);
}

FK int ncclBroadcast(const void* a, void* b, size_t n, int t, int r, Comm* c, void* s) {
    if (r >= c->size || bad("broadcast", b, n * width(t))) return 4;
    return go("ncclBroadcast", c, s);
}

FK int ncclReduce(const void* a, void* b, size_t n, int t, int, int r, Comm* c, void* s) {
    if (r >= c->size || bad("reduce", a, n * width(t))) return 4;
    return go("ncclReduce", c, s);
}

FK int ncclAllGather(const void* a, void* b, size_t n, int t, Comm* c, void* s) {
    if (bad("all gather", a, n * width(t)) || bad("all gather", b, n * width(t) * c->size)) return 4;
    return go("ncclAllGather", c, s);
}

FK int ncclReduceScatter(const void* a, void* b, size_t n, int t, int, Comm* c, void* s) {
    if (bad("reduce scatter", a, n * width(t) * c->size) || bad("reduce scatter", b, n * width(t))) return 4;
    return go("ncclReduceScatter", c, s);
}

FK int ncclSend(const void* a, size_t n, int t, int r, Comm* c, void* s) {
    if (r >= c->size || bad("send", a, n * width(t))) return 4;
    return go("ncclSend", c, s);
}

FK int ncclRecv(void* a, size_t n, int t, int r, Comm* c, void* s) {
    if (r >= c->size || bad("recv", a, n * width(t))) return 4;
    return go("ncclRecv", c, s);
}
