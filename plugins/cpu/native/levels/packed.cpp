// y = x @ weight.T + bias with packed weights of float32 or bfloat16.
#include "levels/panels.h"
#include "levels/table.h"

namespace engine_cpu::ENGINE_CPU_LEVEL {
namespace {

#if defined(__AVX512F__)
constexpr std::size_t MOST = 12;  // rows of a tile: 24 sums in 32 registers
#elif defined(__AVX2__)
constexpr std::size_t MOST = 2;  // 8 sums in 16 registers
#elif defined(ENGINE_CPU_NEON)
constexpr std::size_t MOST = 2;  // 16 sums, beside 8 registers of weights, in 32
#else
constexpr std::size_t MOST = 1;
#endif

struct OfFloats {
    using Element = float;
    static Floats step(Floats sum, Words w, Words x) { return Floats::fma(w.as_floats(), x.as_floats(), sum); }
};

struct OfPairs {
    using Element = bf16;
    static Floats step(Floats sum, Words w, Words x) {
#if defined(__AVX512BF16__)
        return {_mm512_dpbf16_ps(sum.v, reinterpret_cast<__m512bh>(w.v), reinterpret_cast<__m512bh>(x.v))};
#elif defined(ENGINE_CPU_NEON) && defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
        return {vbfdotq_f32(sum.v, vreinterpretq_bf16_u32(w.v), vreinterpretq_bf16_u32(x.v))};
#else
        return Floats::fma(w.later(), x.later(), Floats::fma(w.earlier(), x.earlier(), sum));
#endif
    }
};

template <typename How>
struct Product {
    const Layout& layout;
    const std::uint8_t* weight;
    const std::uint8_t* words;  // of x
    Output<typename How::Element> out;

    template <std::size_t MR>
    void tile(std::size_t panel, std::size_t row, Fetch fetch) const {
        const std::size_t units = layout.units();
        const std::uint8_t* w = weight + panel * layout.panel_bytes();
        const std::uint8_t* x = words + row * units * 4;
        Floats sums[MR][VECTORS];
        for (auto& of_row : sums)
            for (Floats& sum : of_row) sum = Floats::zero();
        for (std::size_t u = 0; u < units; ++u, w += PANEL * 4, x += MR * 4) {
            fetch.unit<PANEL * 4>();
            Words right[VECTORS];
            for (std::size_t v = 0; v < VECTORS; ++v) right[v] = Words::load(w + v * Words::LANES * 4);
#pragma GCC unroll 12
            for (std::size_t m = 0; m < MR; ++m) {
                const Words left = Words::all(load_word(x + m * 4));
#pragma GCC unroll 8
                for (std::size_t v = 0; v < VECTORS; ++v) sums[m][v] = How::step(sums[m][v], right[v], left);
            }
        }
        for (std::size_t m = 0; m < MR; ++m) out.put(row + m, panel, sums[m]);
    }
};

// Word u of row m, of `size` rows of `count` words, to word u * size + m.
void interleave(const std::uint8_t* rows, std::size_t stride, std::size_t size, std::size_t count, std::uint8_t* to) {
    constexpr std::size_t SOME = 4;
    std::size_t u = 0;
#if defined(__AVX2__)
    for (; size % SOME == 0 && u + SOME <= count; u += SOME)
        for (std::size_t m = 0; m < size; m += SOME) {
            __m128 four[SOME];
            for (std::size_t i = 0; i < SOME; ++i)
                four[i] = _mm_loadu_ps(reinterpret_cast<const float*>(rows + (m + i) * stride + u * 4));
            _MM_TRANSPOSE4_PS(four[0], four[1], four[2], four[3]);
            for (std::size_t i = 0; i < SOME; ++i)
                _mm_storeu_ps(reinterpret_cast<float*>(to + ((u + i) * size + m) * 4), four[i]);
        }
#endif
    for (std::size_t begin = u; begin < count; begin += SOME)  // what is written together lies together
        for (std::size_t m = 0; m < size; ++m)
            for (u = begin; u < std::min(count, begin + SOME); ++u)
                std::memcpy(to + (u * size + m) * 4, rows + m * stride + u * 4, 4);
}

template <typename How>
void multiply(const Packed& a, int threads) {
    using T = typename How::Element;
    constexpr std::size_t EACH = 4 / sizeof(T);
    const Layout& layout = a.layout;
    const auto* x = static_cast<const T*>(a.x);
    const std::size_t units = layout.units(), whole = layout.inputs / EACH;
    auto* words = static_cast<std::uint8_t*>(a.scratch);
    const bool as_it_lies = a.rows == 1 && whole == units;  // one row's words lie in order already
    const Product<How> product{layout, static_cast<const std::uint8_t*>(a.weight),
                               as_it_lies ? static_cast<const std::uint8_t*>(a.x) : words,
                               {static_cast<T*>(a.out), layout.outputs, a.bias}};
    over_panels<MOST>(layout, a.weight, a.rows, product, threads, [&](std::size_t row, std::size_t size) {
        if (as_it_lies) return;
        std::uint8_t* tile = words + row * units * 4;
        interleave(reinterpret_cast<const std::uint8_t*>(x + row * a.x_stride), a.x_stride * sizeof(T), size, whole, tile);
        if (whole == units) return;
        for (std::size_t m = 0; m < size; ++m) {
            std::memset(tile + (whole * size + m) * 4, 0, 4);
            std::memcpy(tile + (whole * size + m) * 4, x + (row + m) * a.x_stride + whole * EACH, sizeof(T));
        }
    });
}

}  // namespace

void packed(const Packed& arguments, int threads) {
    switch (arguments.layout.format) {
        case Format::float32:
            return multiply<OfFloats>(arguments, threads);
        case Format::bfloat16:
            return multiply<OfPairs>(arguments, threads);
        case Format::int8:
            return int8(arguments, threads);
        case Format::int4:
            return int4(arguments, threads);
    }
}

}  // namespace engine_cpu::ENGINE_CPU_LEVEL
