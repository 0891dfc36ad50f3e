// Adapters: products of low rank, each token's by its own adapter.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels.h"

namespace engine_cpu {

// What lies in one place of a layer: the packed A of all parts, one below the other, and for each part its packed B, its
// rank, and where it begins among the rows of A; weights are 0 where there are none. So many 64-bit words each.
constexpr std::size_t LORA_WORDS = 2, LORA_PART_WORDS = 3;

// y[t] += B A x[t], part by part, for the tokens of each place. x [rows, inputs], y [rows, sum of outputs], of one dtype.
struct Lora {
    DType dtype;  // float32 or bfloat16, the matrices' too
    const void* x;
    std::size_t x_stride, inputs;
    void* y;
    std::size_t y_stride;
    const std::uint64_t* table;    // [places + 1][LORA_WORDS + parts * LORA_PART_WORDS], the first stands for nobody
    const std::uint64_t* outputs;  // [parts]
    std::size_t places, parts;
    const std::int32_t* tokens;  // those of place p are tokens[starts[p - 1]] .. tokens[starts[p] - 1]
    const std::int32_t* starts;  // [places + 1]
    void* inner;                 // [tokens, most_rank]: what A gives
    std::size_t most_rank;       // of all parts together
};

// Each adapter that has tokens reads its matrices once for each LORA_ROWS of them. A token's bits do not depend on others.
void lora(const Kernels& kernels, const Lora& arguments, int threads);

}  // namespace engine_cpu
