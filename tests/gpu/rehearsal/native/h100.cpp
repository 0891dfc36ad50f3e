// An H100 SXM as its attributes describe it (CUdevice_attribute's numbers), and the names of errors.
#include <map>
#include <set>

#include "state.h"

namespace fk {
int attribute(int a, int* out, int d) {
    if (a == 33) {
        *out = 0x65 + d;
        return OK;
    }
    static const std::map<int, int> known = {
        {1, 1024},     {2, 1024},     {3, 1024},   {4, 64},        {5, 2147483647},  {6, 65535},
        {7, 65535},    {8, 49152},    {9, 65536},  {10, 32},       {11, 2147483647}, {12, 65536},
        {13, 1980000}, {14, 512},     {15, 1},     {16, 132},      {17, 0},          {18, 0},
        {19, 1},       {20, 0},       {31, 1},     {32, 1},        {33, 65},         {34, 0},
        {35, 0},       {36, 2619000}, {37, 5120},  {38, 52428800}, {39, 2048},       {40, 3},
        {41, 1},       {50, 0},       {75, 9},     {76, 0},        {78, 1},          {79, 1},
        {80, 1},       {81, 233472},  {82, 65536}, {83, 1},        {84, 0},          {85, 0},
        {86, 1},       {87, 2},       {88, 0},     {89, 1},        {90, 1},          {91, 0},
        {92, 0},       {93, 0},       {94, 0},     {95, 1},        {96, 1},          {97, 232448},
        {98, 1},       {99, 1},       {100, 0},    {101, 0},       {102, 0},         {103, 1},
        {104, 0},      {105, 0},      {106, 32},   {107, 0},       {108, 134217728}, {109, 134213632},
        {110, 1},      {111, 1024},   {112, 0},    {113, 1},       {114, 1},         {115, 1},
        {116, 0},      {117, 3},      {118, 1},    {119, 9},       {120, 1},         {121, 1},
        {122, 1},      {123, 1},      {124, 0},    {125, 0},       {126, 1},         {127, 0},
        {128, 1},      {132, 0},      {133, 0}};
    auto it = known.find(a);
    if (it == known.end()) {
        static std::set<int> told;
        LOCK;
        if (told.insert(a).second) note("device attribute %d answered with 0", a);
        *out = 0;
        return OK;
    }
    *out = it->second;
    return OK;
}

struct Code {
    int code;
    const char *name, *text;
};

static const Code codes[] = {
    {0, "SUCCESS", "no error"},
    {1, "INVALID_VALUE", "invalid argument"},
    {2, "OUT_OF_MEMORY", "out of memory"},
    {9, "INVALID_CONFIGURATION", "invalid configuration argument"},
    {98, "INVALID_DEVICE_FUNCTION", "invalid device function"},
    {100, "NO_DEVICE", "no CUDA-capable device is detected"},
    {101, "INVALID_DEVICE", "invalid device ordinal"},
    {400, "INVALID_HANDLE", "invalid resource handle"},
    {401, "ILLEGAL_STATE", "the operation cannot be performed in the present state"},
    {500, "NOT_FOUND", "named symbol not found"},
    {600, "NOT_READY", "device not ready"},
    {712, "HOST_MEMORY_ALREADY_REGISTERED", "part or all of the requested memory range is already mapped"},
    {713, "HOST_MEMORY_NOT_REGISTERED", "pointer does not correspond to a registered memory region"},
    {801, "NOT_SUPPORTED", "operation not supported"},
    {900, "STREAM_CAPTURE_UNSUPPORTED", "operation not permitted when stream is capturing"},
    {901, "STREAM_CAPTURE_INVALIDATED", "operation failed due to a previous error during capture"},
    {902, "STREAM_CAPTURE_MERGE", "operation would result in a merge of separate capture sequences"},
    {903, "STREAM_CAPTURE_UNMATCHED", "capture was not ended in the same stream as it began"},
    {904, "STREAM_CAPTURE_UNJOINED", "capturing stream has unjoined work"},
    {905, "STREAM_CAPTURE_ISOLATION", "dependency created on uncaptured work in another stream"},
    {906, "STREAM_CAPTURE_IMPLICIT", "operation would make the legacy stream depend on a capturing blocking stream"},
    {907, "CAPTURED_EVENT", "operation not permitted on an event last recorded in a capturing stream"},
    {908, "STREAM_CAPTURE_WRONG_THREAD", "attempt to terminate a thread-local capture sequence from another thread"}};

const char* error_name(int c) {
    for (auto& k : codes)
        if (k.code == c) return k.name;
    return "UNKNOWN";
}

const char* error_text(int c) {
    for (auto& k : codes)
        if (k.code == c) return k.text;
    return "unknown error";
}
}  // namespace fk
