// What lies between the matrices: norms, rotary positions, the gated activation. Plain loops that the compiler turns
// into this level's instructions.
#include <cmath>
#include <type_traits>

#include "kernels.h"
#include "levels/convert.h"
#include "levels/functions.h"
#include "levels/table.h"
#include "parallel.h"

namespace engine_cpu::ENGINE_CPU_LEVEL {
namespace {

constexpr std::size_t PIECE = 16384;  // elements that are worth a thread

template <typename T>
T* at(void* base, std::size_t offset) {
    return static_cast<T*>(base) + offset;
}
template <typename T>
const T* at(const void* base, std::size_t offset) {
    return static_cast<const T*>(base) + offset;
}

std::size_t rows_a_piece(std::size_t width) { return width >= PIECE ? 1 : PIECE / (width ? width : 1); }

// The sum of squares in so many parts, which need no order among themselves: the compiler may not make them up.
constexpr std::size_t LANES = 32;

template <typename T>
float inverse_rms(const T* x, std::size_t size, float eps) {
    float parts[LANES] = {};
    std::size_t i = 0;
    for (; i + LANES <= size; i += LANES)
        for (std::size_t j = 0; j < LANES; ++j) {
            const float value = widen(x[i + j]);
            parts[j] += value * value;
        }
    float total = 0;
    for (; i < size; ++i) total += widen(x[i]) * widen(x[i]);
    for (const float part : parts) total += part;
    return 1.0f / std::sqrt(total / static_cast<float>(size) + eps);
}

// Rounded before the weight is applied, as the reference does.
template <typename T>
void normalise(const T* x, const T* weight, T* out, std::size_t size, float eps) {
    const float factor = inverse_rms(x, size, eps);
    for (std::size_t i = 0; i < size; ++i)
        out[i] = narrow<T>(widen(narrow<T>(widen(x[i]) * factor)) * widen(weight[i]));
}

template <typename T>
void norm_rows(const Norm& a, int threads) {
    const T* weight = at<T>(a.weight, 0);
    parallel_for(threads, a.rows * a.heads, rows_a_piece(a.size), [&](std::size_t begin, std::size_t end) {
        for (std::size_t i = begin; i < end; ++i) {
            const T* x = at<T>(a.x, i / a.heads * a.row_stride + i % a.heads * a.head_stride);
            normalise(x, weight, at<T>(a.out, i * a.size), a.size, a.eps);
        }
    });
}

template <typename T>
void add_norm_rows(const AddNorm& a, int threads) {
    const T* weight = at<T>(a.weight, 0);
    parallel_for(threads, a.rows, rows_a_piece(a.size), [&](std::size_t begin, std::size_t end) {
        for (std::size_t row = begin; row < end; ++row) {
            T* x = at<T>(a.x, row * a.size);
            T* residual = at<T>(a.residual, row * a.size);
            for (std::size_t i = 0; i < a.size; ++i) residual[i] = narrow<T>(widen(x[i]) + widen(residual[i]));
            normalise(residual, weight, x, a.size, a.eps);
        }
    });
}

template <typename T>
void rotate_rows(const Rope& a, int threads) {
    const std::size_t half = a.rotary_dim / 2;
    parallel_for(threads, a.rows, rows_a_piece(a.heads * a.rotary_dim), [&](std::size_t begin, std::size_t end) {
        for (std::size_t row = begin; row < end; ++row) {
            const float* cosines = a.cos_sin + static_cast<std::size_t>(a.positions[row]) * a.rotary_dim;
            const float* sines = cosines + half;
            for (std::size_t head = 0; head < a.heads; ++head) {
                T* first = at<T>(a.x, row * a.row_stride + head * a.head_stride);
                T* second = first + half;
                for (std::size_t i = 0; i < half; ++i) {
                    const float p = widen(first[i]), q = widen(second[i]);
                    first[i] = narrow<T>(p * cosines[i] - q * sines[i]);
                    second[i] = narrow<T>(q * cosines[i] + p * sines[i]);
                }
            }
        }
    });
}

template <typename T>
void silu_mul_rows(const SiluMul& a, int threads) {
    parallel_for(threads, a.rows, rows_a_piece(a.size), [&](std::size_t begin, std::size_t end) {
        for (std::size_t row = begin; row < end; ++row) {
            const T* gate = at<T>(a.gate_up, row * a.row_stride);
            const T* up = gate + a.size;
            T* out = at<T>(a.out, row * a.size);
            for (std::size_t i = 0; i < a.size; ++i) {
                const float g = widen(gate[i]);
                out[i] = narrow<T>(g / (1.0f + exponential(-g)) * widen(up[i]));
            }
        }
    });
}

}  // namespace

void norm(DType dtype, const Norm& a, int threads) {
    dtype == DType::bfloat16 ? norm_rows<bf16>(a, threads) : norm_rows<float>(a, threads);
}
void add_norm(DType dtype, const AddNorm& a, int threads) {
    dtype == DType::bfloat16 ? add_norm_rows<bf16>(a, threads) : add_norm_rows<float>(a, threads);
}
void rope(DType dtype, const Rope& a, int threads) {
    dtype == DType::bfloat16 ? rotate_rows<bf16>(a, threads) : rotate_rows<float>(a, threads);
}
void silu_mul(DType dtype, const SiluMul& a, int threads) {
    dtype == DType::bfloat16 ? silu_mul_rows<bf16>(a, threads) : silu_mul_rows<float>(a, threads);
}

}  // namespace engine_cpu::ENGINE_CPU_LEVEL
