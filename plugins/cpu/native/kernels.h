// Which instructions this processor has, and the kernels compiled for each level of them.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace engine_cpu {

enum class DType : int { float64, float32, bfloat16, float16, int64, int32, int8, uint8 };

std::size_t size_of(DType dtype);

// The kernels of one level. A level holds every one of them: what it has no instructions for, it computes plainly.
struct Kernels {
    // dst[i] = src[0][i] + ... + src[n - 1][i], added in that order; 16-bit floats in float32, rounded once.
    void (*sum)(DType dtype, void* dst, const void* const* src, int n, std::size_t count);
};

// The levels that are compiled in and that this processor can run, lowest first.
std::vector<std::string> levels();

// The kernels of a level by name; "auto" is the highest. Throws std::invalid_argument.
const Kernels& kernels(const std::string& level);

}  // namespace engine_cpu
