/* A driver's management library that is not there, with the GPUs that -D names: tests of engine_cuda.gpu_nvidia. */
#include <stdio.h>
#include <string.h>

#ifndef INIT
#define INIT 0
#endif
#ifndef MIG
#define MIG 0
#endif
#ifndef SERVES
#define SERVES 13000
#endif

static const char *names[] = {NAMES};
static const int majors[] = {MAJORS};
enum { COUNT = sizeof names / sizeof *names };

int nvmlInit_v2(void) { return INIT; }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int code) { return code == 18 ? "Driver/library version mismatch" : "Unknown Error"; }
int nvmlSystemGetDriverVersion(char *text, unsigned size) { return snprintf(text, size, "580.65.06") < 0; }
int nvmlSystemGetCudaDriverVersion_v2(int *version) { *version = SERVES; return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = COUNT; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) { *handle = (char *)names + index; return index >= COUNT; }
static long place(void *handle) { return (char *)handle - (char *)names; }
int nvmlDeviceGetName(void *handle, char *text, unsigned size) { return snprintf(text, size, "%s", names[place(handle)]) < 0; }
int nvmlDeviceGetUUID(void *handle, char *text, unsigned size) { return snprintf(text, size, "GPU-%ld0ab", place(handle)) < 0; }
int nvmlDeviceGetCudaComputeCapability(void *handle, int *major, int *minor) { *major = majors[place(handle)]; *minor = 0; return 0; }
int nvmlDeviceGetMigMode(void *handle, unsigned *mode, unsigned *pending) { *mode = *pending = MIG; return handle == 0; }
int nvmlDeviceGetMemoryInfo(void *handle, unsigned long long *memory) {
  memory[0] = 80ull << 30, memory[1] = (79ull - place(handle)) << 30, memory[2] = memory[0] - memory[1];
  return 0;
}
