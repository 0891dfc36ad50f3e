// What works on single elements, and the norm with a mean. float32 and bfloat16, dense, computed in float32.
#pragma once

#include <cstddef>
#include <cstdint>

namespace engine_cpu {

enum class Element : int { add, scale, soft_cap, gelu, gelu_tanh, relu, relu_squared };

// out[i] = x[i] + y[i], x[i] * factor, factor * tanh(x[i] / factor), x[i] * Phi(x[i]), max(x[i], 0), its square: see
// engine.interfaces.ops
struct Elementwise {
    Element what;
    const void* x;
    const void* y;
    float factor;
    std::size_t count;
    void* out;
};

// out [rows, size] = (x - mean) / deviation * weight + bias
struct LayerNorm {
    const void* x;
    std::size_t rows, size;
    const void* weight;
    const void* bias;
    void* out;
    float eps;
};

// out [rows, size], dense, = x [rows, size] in float32, where out is not null; broken[row]: whether it holds a NaN.
struct CheckLogits {
    const void* x;
    std::size_t row_stride, rows, size;
    float* out;
    std::uint8_t* broken;
};

}  // namespace engine_cpu
