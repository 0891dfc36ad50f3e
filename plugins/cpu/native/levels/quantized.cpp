// y = x @ weight.T + bias with weights of 8 and 4 bits, and rows rounded to 8. Products are summed as integers, exactly,
// and widened once for each group; the floats of a row are added up in the order of groups: the same bits at all levels.
#include "levels/many_codes.h"
#include "levels/quantize_rows.h"
#include "levels/table.h"

namespace engine_cpu::ENGINE_CPU_LEVEL {
namespace {

#if defined(__AVX512F__)
constexpr std::size_t MOST_INT8 = 12, MOST_INT4 = 8;  // rows of a tile
#elif defined(__AVX2__) || defined(ENGINE_CPU_NEON)
constexpr std::size_t MOST_INT8 = 2, MOST_INT4 = 2;
#else
constexpr std::size_t MOST_INT8 = 1, MOST_INT4 = 1;
#endif

template <typename T>
struct Int8 {
    static constexpr std::size_t PLANES = 1;
    const Packed& a;
    RoundedRows rows;
    Output<T> out;

    template <std::size_t MR>
    void tile(std::size_t panel, std::size_t row, Fetch fetch) const {
        const std::uint8_t* w = static_cast<const std::uint8_t*>(a.weight) + panel * a.layout.panel_bytes();
        const std::uint8_t* x = rows.words + row * rows.units * 4;
        Words sums[MR][VECTORS];
        for (auto& of_row : sums)
            for (Words& sum : of_row) sum = Words::zero();
        for (std::size_t u = 0; u < rows.units; ++u, w += PANEL * 4, x += MR * 4) {
            fetch.unit<PANEL * 4>();
            add_unit(
                sums, [&](std::size_t v) { return Words::load(w + v * Words::LANES * 4); },
                [&](std::size_t m) { return Words::all(load_word(x + m * 4)); }, Words::dot);
        }
        const float* scales = a.scales + panel * PANEL;
        for (std::size_t m = 0; m < MR; ++m) {
            const Words offset = Words::all(static_cast<std::uint32_t>(rows.offsets[row + m]));
            const Floats scale = Floats::all(rows.scales[row + m]);
            Floats products[VECTORS];
            for (std::size_t v = 0; v < VECTORS; ++v)
                products[v] = (sums[m][v] - offset).to_floats() * (Floats::load(scales + v * Floats::LANES) * scale);
            out.put(row + m, panel, products);
        }
    }
};

template <typename T>
struct Int4 {
    static constexpr std::size_t PLANES = 1;
    const Packed& a;
    RoundedRows rows;
    Output<T> out;

    template <std::size_t MR>
    void tile(std::size_t panel, std::size_t row, Fetch fetch) const {
        const std::uint8_t* w = static_cast<const std::uint8_t*>(a.weight) + panel * a.layout.panel_bytes();
        const std::uint8_t* x = rows.words + row * rows.units * 4;
        const std::size_t units = a.layout.group_size / 4;
        const float* row_scales = rows.scales + row * rows.groups;
        const std::int32_t* offsets = rows.offsets + row * rows.groups;
        Floats totals[MR][VECTORS];
        for (auto& of_row : totals)
            for (Floats& total : of_row) total = Floats::zero();
        for (std::size_t g = 0; g < rows.groups; ++g, row_scales += MR, offsets += MR) {
            const std::uint8_t* scales = w;
            w += PANEL * 2;
            fetch.unit<PANEL * 2>();
            Words sums[MR][VECTORS];
#pragma GCC unroll 12
            for (std::size_t m = 0; m < MR; ++m) {
                const Words start = Words::zero() - Words::all(static_cast<std::uint32_t>(offsets[m]));
                for (Words& sum : sums[m]) sum = start;
            }
            for (std::size_t u = 0; u < units; ++u, w += PANEL * 2, x += MR * 4) {
                fetch.unit<PANEL * 2>();
                add_unit(
                    sums, [&](std::size_t v) { return nibbles(w, v); },
                    [&](std::size_t m) { return Words::all(load_word(x + m * 4)); }, Words::dot_small);
            }
            Floats widened[VECTORS];
            for (std::size_t v = 0; v < VECTORS; ++v)
                widened[v] = Floats::load(reinterpret_cast<const fp16*>(scales) + v * Floats::LANES);
#pragma GCC unroll 12
            for (std::size_t m = 0; m < MR; ++m) {
                const Floats scale = Floats::all(row_scales[m]);
                for (std::size_t v = 0; v < VECTORS; ++v)
                    totals[m][v] = Floats::fma(sums[m][v].to_floats(), widened[v] * scale, totals[m][v]);
            }
        }
        for (std::size_t m = 0; m < MR; ++m) out.put(row + m, panel, totals[m]);
    }
};

#if defined(ENGINE_CPU_MANY_CODES)
// For many_codes.
struct FromInt8 {
    static constexpr std::size_t RUN = run_of(255);
    static constexpr Beside BESIDE = Beside::middle;
    static constexpr std::size_t FROM = 4;
    static constexpr float START = -0.0f;  // to which adding a product changes no bit of it
    const Packed& a;
    std::size_t group = std::max<std::size_t>(1, a.layout.units());

    void widen(std::size_t panel, std::size_t unit, std::size_t part, Stretch& to) const {
        const auto* w = static_cast<const std::uint8_t*>(a.weight) + panel * a.layout.panel_bytes() + unit * PANEL * 4;
        std::copy_n(a.scales + panel * PANEL, PANEL, to.scales[0]);
        for (std::size_t u = 0; u < part; ++u, w += PANEL * 4)
            for (std::size_t v = 0; v < VECTORS; ++v) to.put<RUN>(u, v, Words::load(w + v * Words::LANES * 4));
    }
};

struct FromInt4 {
    static constexpr std::size_t RUN = run_of(15);
    static constexpr Beside BESIDE = Beside::middle;
    static constexpr std::size_t FROM = MANY_FROM;
    static constexpr float START = 0.0f;
    const Packed& a;
    std::size_t group = a.layout.group_size / 4;

    void widen(std::size_t panel, std::size_t unit, std::size_t part, Stretch& to) const {
        const auto* w = static_cast<const std::uint8_t*>(a.weight) + panel * a.layout.panel_bytes();
        over_groups(unit, part, group, [&](std::size_t g, std::size_t within, std::size_t at, std::size_t count) {
            const std::uint8_t* scales = w + (unit + at) / group * (group + 1) * PANEL * 2;
            for (std::size_t v = 0; v < VECTORS; ++v)
                Floats::load(reinterpret_cast<const fp16*>(scales) + v * Floats::LANES)
                    .store(to.scales[g] + v * Floats::LANES);
            for (std::size_t u = 0; u < count; ++u)
                for (std::size_t v = 0; v < VECTORS; ++v)
                    to.put<RUN>(at + u, v, nibbles(scales + (1 + within + u) * PANEL * 2, v));
        });
    }
};
#else
struct FromInt8;
struct FromInt4;
#endif

template <std::size_t MOST, template <typename> typename Kernel, typename Source, typename T>
void multiply(const Packed& a, std::size_t group_size, std::int32_t half, int threads) {
    const auto* x = static_cast<const T*>(a.x);
    const auto round = [&](const RoundedRows& rows, std::size_t row, std::size_t size) {
        for (std::size_t m = 0; m < size; ++m)
            rows.round(x + (row + m) * a.x_stride, a.layout.inputs, group_size, row, m, size, half);
    };
#if defined(ENGINE_CPU_MANY_CODES)
    if (a.rows >= Source::FROM) return many_codes<T>(a, threads, Source{a}, round);
#endif
    const RoundedRows rows(a);
    const Kernel<T> kernel{a, rows, Output<T>(a)};
    over_panels<MOST>(a.layout, a.weight, a.rows, kernel, threads,
                      [&](std::size_t row, std::size_t size) { round(rows, row, size); });
}

}  // namespace

void int8(const Packed& a, int threads) {
    const std::size_t whole = a.layout.units() * 4;
    if (a.dtype == DType::bfloat16)
        multiply<MOST_INT8, Int8, FromInt8, bf16>(a, whole, 128, threads);
    else
        multiply<MOST_INT8, Int8, FromInt8, float>(a, whole, 128, threads);
}

void int4(const Packed& a, int threads) {
    if (a.dtype == DType::bfloat16)
        multiply<MOST_INT4, Int4, FromInt4, bf16>(a, a.layout.group_size, 8, threads);
    else
        multiply<MOST_INT4, Int4, FromInt4, float>(a, a.layout.group_size, 8, threads);
}

}  // namespace engine_cpu::ENGINE_CPU_LEVEL
