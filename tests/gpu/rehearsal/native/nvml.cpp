// libnvidia-ml.so.1: what tells of the machine, as far as torch asks.
#include <cstdio>
#include <cstdlib>
extern "C" {
static int device[8];

static unsigned gpus() {
    const char* c = getenv("FAKEGPU_COUNT");
    return c ? atoi(c) : 1;
}

int nvmlInit_v2() { return 0; }

int nvmlShutdown() { return 0; }

int nvmlDeviceGetCount_v2(unsigned* n) {
    *n = gpus();
    return 0;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned i, void** h) {
    if (i >= gpus()) return 2;
    *h = &device[i];
    return 0;
}

int nvmlDeviceGetHandleByPciBusId_v2(const char* s, void** h) {
    *h = device;
    return 0;
}

int nvmlDeviceGetUUID(void* d, char* s, unsigned n) {
    snprintf(s, n, "GPU-42424242-4242-4242-4242-42424242424%d", (int)((int*)d - device));
    return 0;
}

int nvmlDeviceGetName(void* d, char* s, unsigned n) {
    snprintf(s, n, "NVIDIA H100 80GB HBM3");
    return 0;
}

int nvmlSystemGetDriverVersion(char* s, unsigned n) {
    snprintf(s, n, "580.65.06");
    return 0;
}

int nvmlSystemGetCudaDriverVersion_v2(int* v) {
    *v = 13000;
    return 0;
}

struct memory {
    unsigned long long total, free, used;
};

int nvmlDeviceGetMemoryInfo(void* d, struct memory* m) {
    m->total = 85520809984ull;
    m->free = 85029158912ull;
    m->used = m->total - m->free;
    return 0;
}

int nvmlDeviceGetCudaComputeCapability(void* d, int* a, int* b) {
    *a = 9;
    *b = 0;
    return 0;
}

int nvmlDeviceGetMigMode(void* d, unsigned* a, unsigned* b) {
    *a = *b = 0;
    return 0;
}

int nvmlDeviceGetClockInfo(void* d, unsigned t, unsigned* c) {
    *c = t == 2 ? 2619 : 1980;
    return 0;
}

int nvmlDeviceGetMaxClockInfo(void* d, unsigned t, unsigned* c) {
    *c = t == 2 ? 2619 : 1980;
    return 0;
}

const char* nvmlErrorString(int e) { return e ? "fake error" : "success"; }

int nvmlDeviceGetNvLinkRemoteDeviceType() { return 3; }

int nvmlDeviceGetNvLinkRemotePciInfo_v2() { return 3; }

int nvmlDeviceGetComputeRunningProcesses(void* d, unsigned* n, void* p) {
    *n = 0;
    return 0;
}

int nvmlDeviceGetGpuFabricInfoV() { return 3; }

int nvmlDeviceGetP2PStatus(void* a, void* b, int c, int* s) {
    *s = 0;
    return 0;
}

int nvmlDeviceGetHandleByUUID(const char* u, void** h) {
    *h = device;
    return 0;
}
}  // extern "C"
