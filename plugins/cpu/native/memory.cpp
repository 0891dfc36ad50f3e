#include "memory.h"

#include <malloc.h>

namespace engine_cpu {

bool keep_freed_memory() {
#if defined(__GLIBC__)
    return mallopt(M_MMAP_THRESHOLD, 32 << 20) == 1 && mallopt(M_TRIM_THRESHOLD, 512 << 20) == 1;
#else
    return false;
#endif
}

}  // namespace engine_cpu
