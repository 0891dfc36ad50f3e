// Sums over ranks, in order of rank: the same bits wherever they are computed, at every level.
#include <algorithm>
#include <cstdint>
#include <stdexcept>

#include "kernels.h"
#include "levels/convert.h"
#include "levels/table.h"

namespace engine_cpu::ENGINE_CPU_LEVEL {
namespace {

constexpr std::size_t BLOCK = 512;  // elements whose sums stay in registers and the first-level cache

template <typename T, typename Wide>
void add_up(void* dst, const void* const* src, int n, std::size_t count) {
    Wide sums[BLOCK];
    for (std::size_t start = 0; start < count; start += BLOCK) {
        const std::size_t length = std::min(BLOCK, count - start);
        const T* first = static_cast<const T*>(src[0]) + start;
        for (std::size_t i = 0; i < length; ++i) sums[i] = static_cast<Wide>(widen(first[i]));
        for (int r = 1; r < n; ++r) {
            const T* next = static_cast<const T*>(src[r]) + start;
            for (std::size_t i = 0; i < length; ++i) sums[i] += static_cast<Wide>(widen(next[i]));
        }
        T* out = static_cast<T*>(dst) + start;
        for (std::size_t i = 0; i < length; ++i) out[i] = narrow<T>(sums[i]);
    }
}

// Integers wrap round, which only unsigned ones may in C++.
template <typename T>
void add_up_integers(void* dst, const void* const* src, int n, std::size_t count) {
    T* out = static_cast<T*>(dst);
    for (std::size_t start = 0; start < count; start += BLOCK) {
        T sums[BLOCK] = {};
        const std::size_t length = std::min(BLOCK, count - start);
        for (int r = 0; r < n; ++r) {
            const T* next = static_cast<const T*>(src[r]) + start;
            for (std::size_t i = 0; i < length; ++i) sums[i] = static_cast<T>(sums[i] + next[i]);
        }
        std::copy_n(sums, length, out + start);
    }
}

}  // namespace

void sum(DType dtype, void* dst, const void* const* src, int n, std::size_t count) {
    switch (dtype) {
        case DType::float64:
            return add_up<double, double>(dst, src, n, count);
        case DType::float32:
            return add_up<float, float>(dst, src, n, count);
        case DType::bfloat16:
            return add_up<bf16, float>(dst, src, n, count);
        case DType::float16:
            return add_up<fp16, float>(dst, src, n, count);
        case DType::int64:
            return add_up_integers<std::uint64_t>(dst, src, n, count);
        case DType::int32:
            return add_up_integers<std::uint32_t>(dst, src, n, count);
        case DType::int8:
        case DType::uint8:
            return add_up_integers<std::uint8_t>(dst, src, n, count);
        case DType::float8:  // which caches alone hold
            break;
    }
    throw std::invalid_argument("no sums of such a dtype");
}

}  // namespace engine_cpu::ENGINE_CPU_LEVEL
