// What the system is told about memory.
#pragma once

namespace engine_cpu {

// Lets this process keep memory that is freed, for its next steps: what a step computes in would else be given back after
// each operation, and cleared by the system before the next. Blocks of more than 32 MiB are given back as before, and
// so is what exceeds 512 MiB. Returns whether the C library lets itself be told (GNU's does).
bool keep_freed_memory();

}  // namespace engine_cpu
