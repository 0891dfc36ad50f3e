#include "elementwise.h"

#include <cmath>

#include "levels/convert.h"
#include "levels/functions.h"
#include "levels/table.h"
#include "parallel.h"

namespace engine_cpu::ENGINE_CPU_LEVEL {
namespace {

constexpr std::size_t PIECE = 16384;  // elements that are worth a thread
constexpr std::size_t LANES = 32;     // of a sum, in no order among themselves

template <typename T, typename Function>
void each(const Elementwise& a, int threads, Function function) {
    const T* x = static_cast<const T*>(a.x);
    T* out = static_cast<T*>(a.out);
    parallel_for(threads, a.count, PIECE, [&](std::size_t begin, std::size_t end) {
        for (std::size_t i = begin; i < end; ++i) out[i] = narrow<T>(function(widen(x[i]), i));
    });
}

template <typename T>
void elements(const Elementwise& a, int threads) {
    const T* y = static_cast<const T*>(a.y);
    const float factor = a.factor;
    switch (a.what) {
        case Element::add:
            return each<T>(a, threads, [=](float x, std::size_t i) { return x + widen(y[i]); });
        case Element::scale:
            return each<T>(a, threads, [=](float x, std::size_t) { return x * factor; });
        case Element::soft_cap:
            return each<T>(a, threads,
                           [=](float x, std::size_t) { return hyperbolic_tangent(x / factor) * factor; });
        case Element::gelu:
            return each<T>(a, threads, [](float x, std::size_t) {
                return x * 0.5f * (1.0f + error_function(x * 0.70710678118654752f));
            });
        case Element::gelu_tanh:
            return each<T>(a, threads, [](float x, std::size_t) {
                return x * 0.5f * (1.0f + hyperbolic_tangent(0.79788456080286536f * (x + 0.044715f * x * x * x)));
            });
        case Element::relu:
            return each<T>(a, threads, [](float x, std::size_t) { return x < 0 ? 0.0f : x; });
        case Element::relu_squared:
            return each<T>(a, threads, [](float x, std::size_t) { return x < 0 ? 0.0f : x * x; });
    }
}

template <typename T, typename Term>
float total(const T* x, std::size_t size, Term term) {
    float parts[LANES] = {};
    std::size_t i = 0;
    for (; i + LANES <= size; i += LANES)
        for (std::size_t j = 0; j < LANES; ++j) parts[j] += term(widen(x[i + j]));
    float sum = 0;
    for (; i < size; ++i) sum += term(widen(x[i]));
    for (const float part : parts) sum += part;
    return sum;
}

template <typename T>
void norm_rows(const LayerNorm& a, int threads) {
    const T* weight = static_cast<const T*>(a.weight);
    const T* bias = static_cast<const T*>(a.bias);
    const auto count = static_cast<float>(a.size);
    const std::size_t piece = a.size >= PIECE ? 1 : PIECE / (a.size ? a.size : 1);
    parallel_for(threads, a.rows, piece, [&](std::size_t begin, std::size_t end) {
        for (std::size_t row = begin; row < end; ++row) {
            const T* x = static_cast<const T*>(a.x) + row * a.size;
            T* out = static_cast<T*>(a.out) + row * a.size;
            const float mean = total(x, a.size, [](float v) { return v; }) / count;
            const float variance = total(x, a.size, [=](float v) { return (v - mean) * (v - mean); }) / count;
            const float factor = 1.0f / std::sqrt(variance + a.eps);
            for (std::size_t i = 0; i < a.size; ++i)
                out[i] = narrow<T>((widen(x[i]) - mean) * factor * widen(weight[i]) + widen(bias[i]));
        }
    });
}

template <typename T>
void check_rows(const CheckLogits& a, int threads) {
    for (std::size_t row = 0; row < a.rows; ++row) a.broken[row] = 0;
    const std::size_t pieces = (a.size + PIECE - 1) / PIECE;
    parallel_for(threads, a.rows * pieces, 1, [&](std::size_t begin, std::size_t end) {
        for (std::size_t i = begin; i < end; ++i) {
            const std::size_t row = i / pieces, first = i % pieces * PIECE;
            const std::size_t count = a.size - first < PIECE ? a.size - first : PIECE;
            const T* x = static_cast<const T*>(a.x) + row * a.row_stride + first;
            float* out = a.out == nullptr ? nullptr : a.out + row * a.size + first;
            std::uint32_t nan = 0;
            if (out == nullptr)
                for (std::size_t j = 0; j < count; ++j) nan |= (to_bits(widen(x[j])) & 0x7fffffffu) > 0x7f800000u;
            else
                for (std::size_t j = 0; j < count; ++j) {
                    const float value = widen(x[j]);
                    out[j] = value;
                    nan |= (to_bits(value) & 0x7fffffffu) > 0x7f800000u;
                }
            if (nan != 0) __atomic_store_n(a.broken + row, std::uint8_t{1}, __ATOMIC_RELAXED);
        }
    });
}

}  // namespace

void elementwise(DType dtype, const Elementwise& a, int threads) {
    dtype == DType::bfloat16 ? elements<bf16>(a, threads) : elements<float>(a, threads);
}
void layer_norm(DType dtype, const LayerNorm& a, int threads) {
    dtype == DType::bfloat16 ? norm_rows<bf16>(a, threads) : norm_rows<float>(a, threads);
}

void check_logits(DType dtype, const CheckLogits& a, int threads) {
    dtype == DType::bfloat16 ? check_rows<bf16>(a, threads) : check_rows<float>(a, threads);
}

}  // namespace engine_cpu::ENGINE_CPU_LEVEL
