// y = x @ weight.T + bias with packed weights of float32 or bfloat16.
#include <vector>

#include "levels/many_rows.h"
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

// What a register of weights is multiplied as, and with what of x: for each unit of a row one word in each plane, so many
// bytes after the other.
struct OfFloats {
    using Element = float;
    using Weights = Words;
    static constexpr std::size_t PLANES = 1;
    static Weights widened(Words w) { return w; }
    static Floats spread(const std::uint8_t* x, std::size_t) { return Words::all(load_word(x)).as_floats(); }
    static Floats step(Floats sum, Weights w, Floats x) { return Floats::fma(w.as_floats(), x, sum); }
};

#if defined(__AVX512BF16__) || (defined(ENGINE_CPU_NEON) && defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC))
struct OfPairs {
    using Element = bf16;
    using Weights = Words;
    static constexpr std::size_t PLANES = 1;
    static Weights widened(Words w) { return w; }
    static Floats spread(const std::uint8_t* x, std::size_t) { return Words::all(load_word(x)).as_floats(); }
    static Floats step(Floats sum, Weights w, Floats x) {
#if defined(__AVX512BF16__)
        return {_mm512_dpbf16_ps(sum.v, reinterpret_cast<__m512bh>(w.v), reinterpret_cast<__m512bh>(x.v))};
#else
        return {vbfdotq_f32(sum.v, vreinterpretq_bf16_u32(w.v), vreinterpretq_bf16_f32(x.v))};
#endif
    }
};
#else
// A pair's elements in float32: those of x in two planes, widened once for all panels.
struct OfPairs {
    using Element = bf16;
    struct Weights {
        Floats earlier, later;
    };
    static Weights spread(const std::uint8_t* x, std::size_t plane) {
        return {Words::all(load_word(x)).as_floats(), Words::all(load_word(x + plane)).as_floats()};
    }
    static constexpr std::size_t PLANES = 2;
    static Weights widened(Words w) { return {w.earlier(), w.later()}; }
    static Floats step(Floats sum, Weights w, Weights x) {
        return Floats::fma(w.later, x.later, Floats::fma(w.earlier, x.earlier, sum));
    }
};
#endif

template <typename How>
struct Product {
    static constexpr std::size_t PLANES = How::PLANES;
    const Layout& layout;
    const std::uint8_t* weight;
    const std::uint8_t* words;  // of x
    Output<typename How::Element> out;

    // One row, and two panels that lie side by side: each sum waits for the one before it, and twice as many of them wait no
    // longer.
    void two_panels(std::size_t panel, Fetch fetch) const {
        const std::size_t units = layout.units(), plane = units * 4, bytes = layout.panel_bytes();
        const std::uint8_t *w = weight + panel * bytes, *x = words;
        Floats sums[2][VECTORS];
        for (auto& of_panel : sums)
            for (Floats& sum : of_panel) sum = Floats::zero();
        for (std::size_t u = 0; u < units; ++u, w += PANEL * 4, x += 4) {
            fetch.unit_of_two<PANEL * 4>(bytes);
            const auto left = How::spread(x, plane);
            for (std::size_t p = 0; p < 2; ++p)
                for (std::size_t v = 0; v < VECTORS; ++v)
                    sums[p][v] = How::step(sums[p][v], How::widened(Words::load(w + p * bytes + v * Words::LANES * 4)), left);
        }
        for (std::size_t p = 0; p < 2; ++p) out.put(0, panel + p, sums[p]);
    }

    template <std::size_t MR>
    void tile(std::size_t panel, std::size_t row, Fetch fetch) const {
        const std::size_t units = layout.units(), plane = units * MR * 4;
        const std::uint8_t* w = weight + panel * layout.panel_bytes();
        const std::uint8_t* x = words + row * units * 4 * How::PLANES;
        Floats sums[MR][VECTORS];
        for (auto& of_row : sums)
            for (Floats& sum : of_row) sum = Floats::zero();
        for (std::size_t u = 0; u < units; ++u, w += PANEL * 4, x += MR * 4) {
            fetch.unit<PANEL * 4>();
            add_unit(
                sums, [&](std::size_t v) { return How::widened(Words::load(w + v * Words::LANES * 4)); },
                [&](std::size_t m) { return How::spread(x + m * 4, plane); }, How::step);
        }
        for (std::size_t m = 0; m < MR; ++m) out.put(row + m, panel, sums[m]);
    }
};

// Word u of row m, of `size` rows of `count` words, to word u * size + m.
void interleave(const std::uint8_t* rows, std::size_t stride, std::size_t size, std::size_t count, std::uint8_t* to) {
    constexpr std::size_t SOME = 4;  // words of a row that are written together, and rows of a transposition
    std::size_t transposed = 0;      // rows
#if defined(__AVX2__)
    transposed = size / SOME * SOME;
    const std::size_t whole = count / SOME * SOME;
    for (std::size_t u = 0; u < whole; u += SOME)
        for (std::size_t m = 0; m < transposed; m += SOME) {
            __m128 four[SOME];
            for (std::size_t i = 0; i < SOME; ++i)
                four[i] = _mm_loadu_ps(reinterpret_cast<const float*>(rows + (m + i) * stride + u * 4));
            _MM_TRANSPOSE4_PS(four[0], four[1], four[2], four[3]);
            for (std::size_t i = 0; i < SOME; ++i)
                _mm_storeu_ps(reinterpret_cast<float*>(to + ((u + i) * size + m) * 4), four[i]);
        }
#endif
    for (std::size_t begin = 0; begin < count; begin += SOME)
        for (std::size_t m = begin + SOME <= count ? transposed : 0; m < size; ++m)
            for (std::size_t u = begin; u < std::min(count, begin + SOME); ++u)
                std::memcpy(to + (u * size + m) * 4, rows + m * stride + u * 4, 4);
}

// The words of a tile, which lie in its last plane, to both.
void widen_pairs(std::uint8_t* tile, std::size_t count) {
    std::uint8_t* pairs = tile + count * 4;
    std::size_t i = 0;
    for (; i + Words::LANES <= count; i += Words::LANES) {
        const Words both = Words::load(pairs + i * 4);
        both.earlier().store(reinterpret_cast<float*>(tile + i * 4));
        both.later().store(reinterpret_cast<float*>(pairs + i * 4));
    }
    for (; i < count; ++i) {
        const std::uint32_t word = load_word(pairs + i * 4), earlier = word << 16, later = word & 0xffff0000u;
        std::memcpy(tile + i * 4, &earlier, 4);
        std::memcpy(pairs + i * 4, &later, 4);
    }
}

// A product with the words of its rows.
template <typename How>
struct Prepared {
    using T = typename How::Element;
    static constexpr std::size_t EACH = 4 / sizeof(T);
    const Packed& a;
    std::size_t units = a.layout.units(), whole = a.layout.inputs / EACH;
    bool as_it_lies = a.rows == 1 && whole == units && How::PLANES == 1;  // one row's words lie in order already

    Product<How> product() const {
        return {a.layout, static_cast<const std::uint8_t*>(a.weight),
                static_cast<const std::uint8_t*>(as_it_lies ? a.x : a.scratch),
                Output<T>(a)};
    }

    void prepare(std::size_t row, std::size_t size) const {
        if (as_it_lies) return;
        const auto* x = static_cast<const T*>(a.x);
        std::uint8_t* first = static_cast<std::uint8_t*>(a.scratch) + row * units * 4 * How::PLANES;
        std::uint8_t* tile = first + size * units * 4 * (How::PLANES - 1);
        interleave(reinterpret_cast<const std::uint8_t*>(x + row * a.x_stride), a.x_stride * sizeof(T), size, whole, tile);
        if (whole < units)
            for (std::size_t m = 0; m < size; ++m) {
                std::memset(tile + (whole * size + m) * 4, 0, 4);
                std::memcpy(tile + (whole * size + m) * 4, x + (row + m) * a.x_stride + whole * EACH, sizeof(T));
            }
        if (How::PLANES > 1) widen_pairs(first, size * units);
    }
};

// Units of a panel as floats, for many_rows.
template <typename How>
void widen_units(const std::uint8_t* from, std::size_t units, float* to) {
    for (std::size_t u = 0; u < units; ++u, from += PANEL * 4)
        for (std::size_t v = 0; v < VECTORS; ++v) {
            const Words both = Words::load(from + v * Words::LANES * 4);
            if constexpr (sizeof(typename How::Element) == 2) {
                both.earlier().store(widened_at(to, 2 * u, v * Words::LANES));
                both.later().store(widened_at(to, 2 * u + 1, v * Words::LANES));
            } else {
                both.as_floats().store(widened_at(to, u, v * Words::LANES));
            }
        }
}

template <typename How>
void multiply(const Packed& a, int threads) {
    using T = typename How::Element;
    if constexpr (WIDENS_ONCE)
        if (a.rows >= MANY_FROM) return many_rows<T, 4 / sizeof(T)>(a, threads, widen_units<How>);
    const Prepared<How> of{a};
    // Two pairs for each thread: with fewer, one that finds an odd pair left would keep the others waiting for longer than
    // pairs save, a fifth at most.
    if constexpr (How::PLANES > 1)
        if (a.rows == 1 && a.layout.panels() >= 4 * static_cast<std::size_t>(std::max(threads, 1))) {
            of.prepare(0, 1);
            return over_pairs(a.layout, a.weight, of.product(), threads);
        }
    over_panels<MOST>(a.layout, a.weight, a.rows, of.product(), threads,
                      [&](std::size_t row, std::size_t size) { of.prepare(row, size); });
}

template <typename How>
void multiply_all(const Packed* all, std::size_t count, int threads) {
    std::vector<Product<How>> products;
    products.reserve(count);
    for (std::size_t item = 0; item < count; ++item) products.push_back(Prepared<How>{all[item]}.product());
    over_all_panels<MOST>(all, count, products.data(), threads, [&](std::size_t item, std::size_t row, std::size_t size) {
        Prepared<How>{all[item]}.prepare(row, size);
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
        default:
            return arguments.layout.codes() ? codes(arguments, threads) : blocks(arguments, threads);
    }
}

bool packed_all(const Packed* all, std::size_t count, int threads) {
    switch (all[0].layout.format) {
        case Format::float32:
            return multiply_all<OfFloats>(all, count, threads), true;
        case Format::bfloat16:
            return multiply_all<OfPairs>(all, count, threads), true;
        default:
            return false;
    }
}

}  // namespace engine_cpu::ENGINE_CPU_LEVEL
