// y = x @ weight.T + bias for few rows: the weights are read once, at the speed of memory.
//
// A tile computes NR outputs of MR rows, with an accumulator for each; over the inputs it goes once. For up to four rows NR
// is 1, so that one row of weights after the other is read from its beginning to its end: with several at once the
// processor's prefetcher reaches half the speed. With more rows it pays to use each input for several outputs. Every
// output is added up in the same order whatever the tile: a row's result does not depend on how many others there are.
#include <algorithm>
#include <cstdlib>
#include <new>

#include "kernels.h"
#include "levels/table.h"
#include "levels/vector.h"
#include "parallel.h"

namespace engine_cpu::ENGINE_CPU_LEVEL {
namespace {

#if defined(__AVX512F__)
constexpr std::size_t ACCUMULATORS = 16;  // of 32 registers
#elif defined(__AVX2__)
constexpr std::size_t ACCUMULATORS = 8;  // of 16
#else
constexpr std::size_t ACCUMULATORS = 4;
#endif
constexpr std::size_t PIECE = std::size_t{64} << 10;  // bytes of weights that a thread takes at once

// How a weight of type W meets an input: both widened to float32 ...
template <typename W>
struct Widened {
    using Weight = W;
    using Input = float;
    using Register = Vec;
    static constexpr std::size_t STEP = Vec::WIDTH;
    static Register load(const W* p) { return Vec::load(p); }
    static Register load(const W* p, std::size_t n) { return Vec::load(p, n); }
    template <typename T = float, typename = std::enable_if_t<!std::is_same_v<T, W>>>
    static Register load(const T* p) {
        return Vec::load(p);
    }
    template <typename T = float, typename = std::enable_if_t<!std::is_same_v<T, W>>>
    static Register load(const T* p, std::size_t n) {
        return Vec::load(p, n);
    }
    static Vec add(Vec sum, Register w, Register x) { return Vec::fma(w, x, sum); }
};

#if defined(__AVX512BF16__)
// ... or multiplied in pairs as they are.
struct Pairs {
    using Weight = bf16;
    using Input = bf16;
    using Register = __m512bh;
    static constexpr std::size_t STEP = 32;
    static Register load(const bf16* p) { return reinterpret_cast<Register>(_mm512_loadu_si512(p)); }
    static Register load(const bf16* p, std::size_t n) {
        return reinterpret_cast<Register>(_mm512_maskz_loadu_epi16(static_cast<__mmask32>((1ull << n) - 1), p));
    }
    static Vec add(Vec sum, Register w, Register x) { return {_mm512_dpbf16_ps(sum.v, w, x)}; }
};
using BF16 = Pairs;
#else
using BF16 = Widened<bf16>;
#endif

template <typename How, typename Out>
struct Product {
    const typename How::Input* x;
    std::size_t x_stride;
    const typename How::Weight* weight;
    const typename How::Weight* bias;  // or null
    Out* out;
    std::size_t out_stride, inputs;

    template <std::size_t MR, std::size_t NR>
    void tile(std::size_t row, std::size_t output) const {
        const auto* xs = x + row * x_stride;
        const auto* ws = weight + output * inputs;
        Vec sums[MR][NR];
        for (std::size_t m = 0; m < MR; ++m)
            for (std::size_t n = 0; n < NR; ++n) sums[m][n] = Vec::zero();
        const auto step = [&](auto load) {
            typename How::Register left[MR];
            for (std::size_t m = 0; m < MR; ++m) left[m] = load(xs + m * x_stride);
            for (std::size_t n = 0; n < NR; ++n) {
                const typename How::Register right = load(ws + n * inputs);
                for (std::size_t m = 0; m < MR; ++m) sums[m][n] = How::add(sums[m][n], right, left[m]);
            }
        };
        std::size_t k = 0;
        for (; k + How::STEP <= inputs; k += How::STEP) step([&](const auto* p) { return How::load(p + k); });
        if (k < inputs) step([&](const auto* p) { return How::load(p + k, inputs - k); });
        for (std::size_t m = 0; m < MR; ++m)
            for (std::size_t n = 0; n < NR; ++n) {
                const float added = bias ? static_cast<float>(widen(bias[output + n])) : 0.0f;
                out[(row + m) * out_stride + output + n] = narrow<Out>(sums[m][n].sum() + added);
            }
    }

    template <std::size_t MR, std::size_t NR>
    void rows(std::size_t row, std::size_t begin, std::size_t end) const {
        for (; begin + NR <= end; begin += NR) tile<MR, NR>(row, begin);
        for (; begin < end; ++begin) tile<MR, 1>(row, begin);
    }

    void outputs(std::size_t num_rows, std::size_t begin, std::size_t end) const {
        if (num_rows == 1) return rows<1, 1>(0, begin, end);
        if (num_rows == 2) return rows<2, 1>(0, begin, end);
        if (num_rows == 3) return rows<3, 1>(0, begin, end);
        if (num_rows == 4) return rows<4, 1>(0, begin, end);
        // All rows for a few outputs at a time, whose weights then come from the first-level cache again.
        constexpr std::size_t BLOCK = 8, NR = ACCUMULATORS / 4;
        for (std::size_t start = begin; start < end; start += BLOCK) {
            const std::size_t stop = std::min(end, start + BLOCK);
            std::size_t row = 0;
            for (; row + 4 <= num_rows; row += 4) rows<4, NR>(row, start, stop);
            if (num_rows - row == 3) rows<3, NR>(row, start, stop);
            if (num_rows - row == 2) rows<2, NR>(row, start, stop);
            if (num_rows - row == 1) rows<1, NR>(row, start, stop);
        }
    }
};

// No std::vector: the linker keeps one copy of its functions for all levels, perhaps one that this processor cannot run.
template <typename T>
struct Buffer {
    T* data = nullptr;
    void allocate(std::size_t count) {
        data = static_cast<T*>(std::malloc(count * sizeof(T)));
        if (data == nullptr) throw std::bad_alloc();
    }
    ~Buffer() { std::free(data); }
};

template <typename How, typename T>
void multiply(const Linear& a, int threads) {
    Buffer<typename How::Input> copy;
    const typename How::Input* x;
    std::size_t stride = a.x_stride;
    if constexpr (std::is_same_v<typename How::Input, T>) {
        x = static_cast<const T*>(a.x);
    } else {  // widened once, for all outputs
        copy.allocate(a.rows * a.inputs);
        for (std::size_t m = 0; m < a.rows; ++m)
            for (std::size_t k = 0; k < a.inputs; ++k)
                copy.data[m * a.inputs + k] = widen(static_cast<const T*>(a.x)[m * a.x_stride + k]);
        x = copy.data;
        stride = a.inputs;
    }
    const Product<How, T> product{x, stride, static_cast<const T*>(a.weight), static_cast<const T*>(a.bias),
                                  static_cast<T*>(a.out), a.outputs, a.inputs};
    const std::size_t piece = std::max<std::size_t>(8, PIECE / (a.inputs * sizeof(T)) / 8 * 8);
    parallel_for(threads, a.outputs, piece,
                 [&](std::size_t begin, std::size_t end) { product.outputs(a.rows, begin, end); });
}

}  // namespace

void linear(DType dtype, const Linear& arguments, int threads) {
    if (dtype == DType::bfloat16)
        multiply<BF16, bf16>(arguments, threads);
    else
        multiply<Widened<float>, float>(arguments, threads);
}

}  // namespace engine_cpu::ENGINE_CPU_LEVEL
