// What the sources of one level give each other.
#pragma once

#include "kernels.h"

namespace engine_cpu::ENGINE_CPU_LEVEL {

void sum(DType dtype, void* dst, const void* const* src, int n, std::size_t count);

}  // namespace engine_cpu::ENGINE_CPU_LEVEL
