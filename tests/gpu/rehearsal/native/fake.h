// A GPU that computes nothing: what the fake driver gives the fake runtime and libraries. Error codes are the driver's,
// which the runtime shares for everything used here. Written from the documentation of CUDA's interfaces.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>

#define FK extern "C" __attribute__((visibility("default")))

namespace fk {
struct Stream;
struct Event;
struct Graph;
struct Exec;
struct Node;

enum {
    OK = 0,
    INVALID = 1,
    OOM = 2,
    BADCONFIG = 9,
    NODEVICE = 100,
    ILLEGAL_STATE = 401,
    BADHANDLE = 400,
    NOTFOUND = 500,
    NOTREADY = 600,
    NOTSUPPORTED = 801,
    CAP_UNSUPPORTED = 900,
    CAP_INVALIDATED = 901,
    CAP_MERGE = 902,
    CAP_UNMATCHED = 903,
    CAP_UNJOINED = 904,
    CAP_ISOLATION = 905,
    CAP_IMPLICIT = 906,
    CAP_EVENT = 907,
    CAP_THREAD = 908
};

enum Kind { HOST_PAGEABLE, HOST_PINNED, DEVICE };

typedef void (*HostFn)(void*);
void api(const char* name);                                                 // counts a call
void fault(const char* format, ...) __attribute__((format(printf, 1, 2)));  // what a real device would not bear
void note(const char* format, ...) __attribute__((format(printf, 1, 2)));   // a gap of the fake
int unsupported(const char* name);
int alloc(void** out, size_t n, Kind kind);
int release(void* p, Kind kind);
int reg(void* p, size_t n);
int unreg(void* p);
Kind kind_of(const void* p, void** base, size_t* size, uint64_t* id);
void mem_info(size_t* free, size_t* total);
int attribute(int which, int* out, int device = 0);
int device_count();
int device();
void set_device(int d);
int device_of(const void* p);
int ipc_get(void* p, char* handle);
int ipc_open(void** p, const char* handle);
int ipc_close(void* p);
int unsafe_call(const char* name);  // refuses what a capturing thread must not do
int launch(void* stream, const char* name, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
           size_t smem, size_t limit);
int copy(void* dst, const void* src, size_t n, void* stream, bool async, int direction);  // direction: cudaMemcpyKind
int fill(void* dst, int value, int width, size_t count, void* stream, bool async);
int host(void* stream, HostFn fn, void* data);
int stream_new(void** out, unsigned flags, int priority);
int stream_free(void* s);
int stream_sync(void* s);
int stream_query(void* s);
int stream_priority(void* s, int* out);
int stream_flags(void* s, unsigned* out);
int device_sync();
int stream_wait(void* s, void* e);
int event_new(void** out, unsigned flags);
int event_free(void* e);
int event_record(void* e, void* s, unsigned flags);
int event_sync(void* e);
int event_query(void* e);
int event_ms(float* out, void* a, void* b);
int begin(void* s, int mode);
int end(void* s, void** graph);
int info(void* s, int* status, unsigned long long* id, void** graph, const void*** deps, size_t* ndeps);
int update_deps(void* s, void** deps, size_t n, unsigned flags);
int exchange(int* mode);
int graph_free(void* g);
int instantiate(void** out, void* g);
int exec_free(void* e);
int graph_launch(void* e, void* s);
int graph_nodes(void* g, void** nodes, size_t* n);
int node_type(void* node);
int node_deps(void* node, void** deps, size_t* n);
const char* error_name(int code);
const char* error_text(int code);
}  // namespace fk
