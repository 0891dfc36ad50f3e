// What the system is told about memory.
#pragma once

#include <cstddef>
#include <cstdint>

namespace engine_cpu {

// Fewer, larger pages under weights: reading them then misses the translation buffers less often. Puts the whole 2 MiB pieces of a range of private memory onto huge pages, in place, its contents kept. Returns whether
// the system did (Linux 6.1 with transparent huge pages not forbidden); where not, nothing is changed.
bool use_huge_pages(std::uintptr_t address, std::size_t bytes);

// Lets this process keep memory that is freed, for its next steps: what a step computes in would else be given back after
// each operation, and cleared by the system before the next. Blocks of more than 32 MiB are given back as before, and
// so is what exceeds 512 MiB. Returns whether the C library lets itself be told (GNU's does).
bool keep_freed_memory();

}  // namespace engine_cpu
