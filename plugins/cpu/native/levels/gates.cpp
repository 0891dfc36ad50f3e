// What multiplies by a gate that lies apart, and the norm with one. Plain loops, as in layers.cpp.
#include <algorithm>
#include <cmath>
#include <vector>

#include "levels/convert.h"
#include "levels/functions.h"
#include "levels/table.h"
#include "parallel.h"
#include "states.h"

namespace engine_cpu::ENGINE_CPU_LEVEL {
namespace {

constexpr std::size_t PIECE = 16384;  // elements that are worth a thread
constexpr std::size_t LANES = 32;     // of a sum, in no order among themselves

std::size_t rows_a_piece(std::size_t width) { return width >= PIECE ? 1 : PIECE / (width ? width : 1); }

template <typename T, typename Function>
void gated(const GateBy& a, int threads, Function function) {
    parallel_for(threads, a.rows, rows_a_piece(a.size), [&](std::size_t begin, std::size_t end) {
        for (std::size_t row = begin; row < end; ++row) {
            const T* x = static_cast<const T*>(a.x) + row * a.x_stride;
            const T* gate = static_cast<const T*>(a.gate) + row * a.gate_stride;
            T* out = static_cast<T*>(a.out) + row * a.size;
            for (std::size_t i = 0; i < a.size; ++i) out[i] = narrow<T>(widen(x[i]) * function(widen(gate[i])));
        }
    });
}

template <typename T>
void gate_rows(const GateBy& a, int threads) {
    switch (a.what) {
        case Gate::sigmoid:
            return gated<T>(a, threads, [](float g) { return 1.0f / (1.0f + exponential(-g)); });
        case Gate::silu:
            return gated<T>(a, threads, [](float g) { return g / (1.0f + exponential(-g)); });
        case Gate::gelu:
            return gated<T>(a, threads,
                            [](float g) { return g * 0.5f * (1.0f + error_function(g * 0.70710678118654752f)); });
        case Gate::gelu_tanh:
            return gated<T>(a, threads, [](float g) {
                return g * 0.5f * (1.0f + hyperbolic_tangent(0.79788456080286536f * (g + 0.044715f * g * g * g)));
            });
    }
}

inline float silu(float x) { return x / (1.0f + exponential(-x)); }

float squares_of(const float* x, std::size_t size) {
    float parts[LANES] = {}, total = 0;
    std::size_t i = 0;
    for (; i + LANES <= size; i += LANES)
        for (std::size_t j = 0; j < LANES; ++j) parts[j] += x[i + j] * x[i + j];
    for (; i < size; ++i) total += x[i] * x[i];
    for (const float part : parts) total += part;
    return total;
}

template <typename T>
void norm_rows(const GatedNorm& a, int threads) {
    const std::size_t width = a.squares == nullptr ? a.size : a.channels;
    const std::size_t groups = a.channels / std::max<std::size_t>(1, width);
    parallel_for(threads, a.rows * groups, rows_a_piece(width), [&](std::size_t begin, std::size_t end) {
        static thread_local std::vector<float> room;
        if (room.size() < width) room.resize(width);
        float* value = room.data();  // what is normed
        for (std::size_t item = begin; item < end; ++item) {
            const std::size_t row = item / groups, first = item % groups * width;
            const T* x = static_cast<const T*>(a.x) + row * a.x_stride + first;
            const T* gate = static_cast<const T*>(a.gate) + row * a.gate_stride + first;
            if (a.gate_last)
                for (std::size_t i = 0; i < width; ++i) value[i] = widen(x[i]);
            else
                for (std::size_t i = 0; i < width; ++i) value[i] = widen(x[i]) * silu(widen(gate[i]));
            const float squares = a.given ? a.squares[row] : squares_of(value, width);
            if (a.squares != nullptr && !a.given) {
                a.squares[row] = squares;
                continue;
            }
            const float factor = 1.0f / std::sqrt(squares / static_cast<float>(a.size) + a.eps);
            const T* weight = static_cast<const T*>(a.weight) + first;
            T* out = static_cast<T*>(a.out) + row * a.channels + first;
            if (a.gate_last)
                for (std::size_t i = 0; i < width; ++i)
                    out[i] = narrow<T>(value[i] * factor * widen(weight[i]) * silu(widen(gate[i])));
            else
                for (std::size_t i = 0; i < width; ++i)  // rounded before the weight is applied, as the reference does
                    out[i] = narrow<T>(widen(narrow<T>(value[i] * factor)) * widen(weight[i]));
        }
    });
}

}  // namespace

void gated_norm(DType dtype, const GatedNorm& a, int threads) {
    dtype == DType::bfloat16 ? norm_rows<bf16>(a, threads) : norm_rows<float>(a, threads);
}
void gate_by(DType dtype, const GateBy& a, int threads) {
    dtype == DType::bfloat16 ? gate_rows<bf16>(a, threads) : gate_rows<float>(a, threads);
}

}  // namespace engine_cpu::ENGINE_CPU_LEVEL
