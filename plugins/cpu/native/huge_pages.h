// Fewer, larger pages under weights: reading them then misses the translation buffers less often.
#pragma once

#include <cstddef>
#include <cstdint>

namespace engine_cpu {

// Puts the whole 2 MiB pieces of a range of private memory onto huge pages, in place, its contents kept. Returns whether
// the system did (Linux 6.1 with transparent huge pages not forbidden); where not, nothing is changed.
bool use_huge_pages(std::uintptr_t address, std::size_t bytes);

}  // namespace engine_cpu
