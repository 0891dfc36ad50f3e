#include "memory.h"

#include <malloc.h>
#include <sys/mman.h>

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

namespace engine_cpu {

bool use_huge_pages(std::uintptr_t address, std::size_t bytes) {
    constexpr std::uintptr_t HUGE = std::uintptr_t{2} << 20;
    const std::uintptr_t first = (address + HUGE - 1) / HUGE * HUGE, end = (address + bytes) / HUGE * HUGE;
    return first < end && madvise(reinterpret_cast<void*>(first), end - first, MADV_COLLAPSE) == 0;
}

bool keep_freed_memory() {
#if defined(__GLIBC__)
    return mallopt(M_MMAP_THRESHOLD, 32 << 20) == 1 && mallopt(M_TRIM_THRESHOLD, 512 << 20) == 1;
#else
    return false;
#endif
}

}  // namespace engine_cpu
