/* A CUDA driver that is not there, with the GPUs that -D names: tests of engine_cuda.gpu_nvidia. */
#include <stdio.h>

#ifndef INIT
#define INIT 0
#endif

static const char *names[] = {NAMES};
static const int majors[] = {MAJORS};
enum { COUNT = sizeof names / sizeof *names };

int cuInit(unsigned flags) { return flags ? 1 : INIT; }
int cuGetErrorString(int code, const char **text) { *text = "system has unsupported driver"; return code == 0; }
int cuDriverGetVersion(int *version) { *version = 12080; return 0; }
int cuDeviceGetCount(int *count) { *count = COUNT; return 0; }
int cuDeviceGet(int *device, int number) { *device = number; return 0; }
int cuDeviceGetName(char *text, int size, int device) { return snprintf(text, size, "%s", names[device]) < 0; }
int cuDeviceTotalMem_v2(size_t *bytes, int device) { *bytes = (size_t)10 << 30; return device < 0; }
int cuDeviceGetAttribute(int *value, int which, int device) { *value = which == 75 ? majors[device] : 0; return 0; }
