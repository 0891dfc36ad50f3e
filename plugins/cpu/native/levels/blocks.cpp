// y = x @ weight.T + bias with weights as they lie in ggml's blocks (blocks.h), and rows rounded to 8 bits in the same
// groups. Products of a group are summed as integers, exactly, and widened once; the floats of a row are added up in the
// order of groups: the same bits at all levels. float16 is multiplied as float32, with rows as they are.
#include "levels/many_codes.h"
#include "levels/quantize_rows.h"
#include "levels/table.h"

namespace engine_cpu::ENGINE_CPU_LEVEL {
namespace {

#if defined(__AVX512F__)
constexpr std::size_t MOST = 8, MOST_HALF = 8;  // rows of a tile
#elif defined(__AVX2__) || defined(ENGINE_CPU_NEON)
constexpr std::size_t MOST = 2, MOST_HALF = 2;
#else
constexpr std::size_t MOST = 1, MOST_HALF = 1;
#endif

// BITS bits of each byte, moved from FROM on to TO.
template <int FROM, int BITS, int TO>
Words field(Words w) {
    constexpr std::uint32_t MASK = ((1u << BITS) - 1) << TO;
    return w.template shifted<FROM - TO>() & Words::all(MASK * 0x01010101u);
}

// The codes of unit U of 16 inputs: register v of those of 32 outputs.
template <Format F, int U>
Words unit_codes(const std::uint8_t* quad, std::size_t v) {
    constexpr BlockForm FORM = block_form(F);
    if constexpr (FORM.as_bytes) return Words::load(quad + U * PANEL * 4 + v * Words::LANES * 4);
    const std::uint8_t* two = quad + (FORM.one < 0 ? 0 : 64);
    const std::uint8_t* lower = two + (FORM.two < 0 ? 0 : 128);
    const bool upper = v >= NIBBLES;
    const std::size_t at = v % NIBBLES * Words::LANES * 4;
    Words found = Words::zero();
    if constexpr (FORM.nibbles) found = nibbles(lower + U * 64, v);
    if constexpr (FORM.two >= 0) {
        const Words pairs = Words::load(two + U / 2 * 64 + at);
        const Words bits = upper ? field<U % 2 * 4 + 2, 2, FORM.two>(pairs) : field<U % 2 * 4, 2, FORM.two>(pairs);
        found = FORM.nibbles ? found | bits : bits;
    }
    if constexpr (FORM.one >= 0) {
        const Words singles = Words::load(quad + at);
        found = found | (upper ? field<2 * U + 1, 1, FORM.one>(singles) : field<2 * U, 1, FORM.one>(singles));
    }
    if constexpr (FORM.table) found = found.looked_up(IQ4);
    return found;
}

// Numbers by which a block's scales and minima are multiplied, [rows][32].
template <Format F>
[[gnu::always_inline]] inline const std::int8_t* numbers(const std::uint8_t* from, std::int8_t* room) {
    constexpr BlockForm FORM = block_form(F);
    constexpr std::size_t ROWS = FORM.rows_of_numbers();
    if constexpr (FORM.numbers == Numbers::of_8) return reinterpret_cast<const std::int8_t*>(from);
    for (std::size_t i = 0; i < ROWS / 2 * PANEL; ++i) {
        room[i] = static_cast<std::int8_t>(from[i] & 15);
        room[ROWS / 2 * PANEL + i] = static_cast<std::int8_t>(from[i] >> 4);
    }
    if constexpr (FORM.numbers == Numbers::of_6) {
        const std::uint8_t* upper = from + ROWS / 2 * PANEL;
        for (std::size_t k = 0; k < 4; ++k)
            for (std::size_t i = 0; i < ROWS / 4 * PANEL; ++i) {
                const int number = room[k * (ROWS / 4) * PANEL + i] | (upper[i] >> 2 * k & 3) << 4;
                room[k * (ROWS / 4) * PANEL + i] = static_cast<std::int8_t>(number - FORM.below);
            }
    }
    return room;
}

// Results in the dtype of x.
void put(const Packed& a, std::size_t row, std::size_t panel, const Floats (&sums)[VECTORS]) {
    a.dtype == DType::bfloat16 ? Output<bf16>(a).put(row, panel, sums) : Output<float>(a).put(row, panel, sums);
}

template <Format F>
struct InBlocks {
    static constexpr std::size_t PLANES = 1;
    static constexpr BlockForm FORM = block_form(F);
    const Packed& a;
    RoundedRows rows;

    template <int U, std::size_t MR>
    static void unit(const std::uint8_t* quad, const std::uint8_t* x, Words (&sums)[MR][VECTORS], Fetch& fetch) {
        fetch.unit<FORM.code_bytes() / 4>();
        add_unit(
            sums, [&](std::size_t v) { return unit_codes<F, U>(quad, v); },
            [&](std::size_t m) { return Words::all(load_word(x + (U * MR + m) * 4)); },
            [](Words sum, Words weights, Words of_row) {
                return FORM.as_bytes || FORM.table ? Words::dot(sum, weights, of_row) : Words::dot_small(sum, weights, of_row);
            });
    }

    template <std::size_t MR>
    void tile(std::size_t panel, std::size_t row, Fetch fetch) const {
        constexpr std::size_t GROUPS = FORM.groups();
        const std::uint8_t* w = static_cast<const std::uint8_t*>(a.weight) + panel * a.layout.panel_bytes();
        const std::uint8_t* x = rows.words + row * rows.units * 4;
        const float* row_scales = rows.scales + row * rows.groups;
        const std::int32_t* offsets = rows.offsets + row * rows.groups;
        Floats totals[MR][VECTORS];
        for (auto& of_row : totals)
            for (Floats& total : of_row) total = Floats::zero();
        for (std::size_t b = rows.groups / GROUPS; b > 0; --b) {
            const auto* block_scales = reinterpret_cast<const fp16*>(w);
            w += PANEL * 2;
            fetch.unit<PANEL * 2>();
            const auto* block_minima = reinterpret_cast<const fp16*>(w);
            if constexpr (FORM.minima) {
                w += PANEL * 2;
                fetch.unit<PANEL * 2>();
            }
            alignas(64) std::int8_t room[FORM.rows_of_numbers() * PANEL + 1];
            const std::int8_t* number = nullptr;
            if constexpr (FORM.numbers != Numbers::none) {
                number = numbers<F>(w, room);
                for (std::size_t i = 0; i < FORM.number_bytes(); i += 128) fetch.unit<128>();
                w += FORM.number_bytes();
            }
            for (std::size_t g = 0; g < GROUPS; ++g, row_scales += MR, offsets += MR) {
                Words sums[MR][VECTORS];
#pragma GCC unroll 8
                for (std::size_t m = 0; m < MR; ++m) {
                    const Words start = FORM.minima ? Words::zero()
                                                    : Words::zero() - Words::all(static_cast<std::uint32_t>(offsets[m]));
                    for (Words& sum : sums[m]) sum = start;
                }
                for (std::size_t q = 0; q < FORM.group / 16; ++q, w += FORM.code_bytes(), x += MR * 16) {
                    unit<0>(w, x, sums, fetch);
                    unit<1>(w, x, sums, fetch);
                    unit<2>(w, x, sums, fetch);
                    unit<3>(w, x, sums, fetch);
                }
                Floats scales[VECTORS];
                for (std::size_t v = 0; v < VECTORS; ++v) {
                    scales[v] = Floats::load(block_scales + v * Floats::LANES);
                    if constexpr (FORM.numbers != Numbers::none)
                        scales[v] = scales[v] * Floats::load(number + g * PANEL + v * Floats::LANES);
                }
#pragma GCC unroll 8
                for (std::size_t m = 0; m < MR; ++m) {
                    const Floats scale = Floats::all(row_scales[m]);
                    for (std::size_t v = 0; v < VECTORS; ++v)
                        totals[m][v] = Floats::fma(sums[m][v].to_floats(), scales[v] * scale, totals[m][v]);
                }
                if constexpr (FORM.minima) {
                    for (std::size_t v = 0; v < VECTORS; ++v) {
                        scales[v] = Floats::load(block_minima + v * Floats::LANES);
                        if constexpr (FORM.numbers != Numbers::none)
                            scales[v] = scales[v] * Floats::load(number + (GROUPS + g) * PANEL + v * Floats::LANES);
                    }
#pragma GCC unroll 8
                    for (std::size_t m = 0; m < MR; ++m) {
                        const float sum = from_bits(static_cast<std::uint32_t>(offsets[m]));
                        const Floats signed_sum = Floats::all(FORM.numbers == Numbers::none ? sum : -sum);
                        for (std::size_t v = 0; v < VECTORS; ++v)
                            totals[m][v] = Floats::fma(scales[v], signed_sum, totals[m][v]);
                    }
                }
            }
        }
        for (std::size_t m = 0; m < MR; ++m) put(a, row + m, panel, totals[m]);
    }
};

#if defined(ENGINE_CPU_MANY_CODES)
// Where a block of 32 outputs has what. `room`: for its numbers, as long as this is.
template <Format F>
struct Parts {
    static constexpr BlockForm FORM = block_form(F);
    static constexpr std::size_t ROOM = FORM.rows_of_numbers() * PANEL + 1;
    const fp16 *scales, *minima;
    const std::int8_t* number = nullptr;
    const std::uint8_t* codes;

    Parts(const std::uint8_t* block, [[maybe_unused]] std::int8_t* room)
        : scales(reinterpret_cast<const fp16*>(block)),
          minima(scales + PANEL),
          codes(block + PANEL * 2 * (FORM.minima ? 2 : 1) + FORM.number_bytes()) {
        if constexpr (FORM.numbers != Numbers::none) number = numbers<F>(codes - FORM.number_bytes(), room);
    }
    // Register v of a group's scales, or minima.
    Floats scale(std::size_t g, std::size_t v) const { return of(scales, g, v); }
    Floats minimum(std::size_t g, std::size_t v) const { return of(minima, FORM.groups() + g, v); }

private:
    Floats of(const fp16* of_block, std::size_t row, std::size_t v) const {
        const Floats found = Floats::load(of_block + v * Floats::LANES);
        if constexpr (FORM.numbers == Numbers::none) return found;
        return found * Floats::load(number + row * PANEL + v * Floats::LANES);
    }
};

// For many_codes.
template <Format F>
struct FromBlocks {
    static constexpr BlockForm FORM = block_form(F);
    static constexpr std::size_t RUN = run_of(FORM.as_bytes || FORM.table ? 255
                                              : FORM.one >= 0             ? (2 << std::max(FORM.one, FORM.two + 1)) - 1
                                              : FORM.two >= 0             ? (4 << FORM.two) - 1
                                                                          : 15);
    static constexpr Beside BESIDE = FORM.minima ? Beside::minima : Beside::middle;
    static constexpr std::size_t FROM = FORM.group == 16 ? MANY_FROM : 4;
    static constexpr float START = 0.0f;
    const Packed& a;
    std::size_t group = FORM.group / 4;

    void widen(std::size_t panel, std::size_t unit, std::size_t part, Stretch& to) const {
        const std::uint8_t* w = static_cast<const std::uint8_t*>(a.weight) + panel * a.layout.panel_bytes() +
                                unit * 4 / FORM.inputs * PANEL * FORM.bytes;
        for (std::size_t at = 0, first = 0; at < part; first += FORM.groups(), w += PANEL * FORM.bytes) {
            alignas(64) std::int8_t room[Parts<F>::ROOM];
            const Parts<F> parts(w, room);
            for (std::size_t g = 0; g < FORM.groups(); ++g)
                for (std::size_t v = 0; v < VECTORS; ++v) {
                    parts.scale(g, v).store(to.scales[first + g] + v * Floats::LANES);
                    if constexpr (FORM.minima) {
                        const Floats sign = Floats::all(FORM.numbers == Numbers::none ? 1.0f : -1.0f);
                        (parts.minimum(g, v) * sign).store(to.minima[first + g] + v * Floats::LANES);
                    }
                }
            const std::uint8_t* quad = parts.codes;
            for (std::size_t q = 0; q < FORM.inputs / 16; ++q, at += 4, quad += FORM.code_bytes())
#pragma GCC unroll 4
                for (std::size_t v = 0; v < VECTORS; ++v) {
                    to.put<RUN>(at, v, unit_codes<F, 0>(quad, v));
                    to.put<RUN>(at + 1, v, unit_codes<F, 1>(quad, v));
                    to.put<RUN>(at + 2, v, unit_codes<F, 2>(quad, v));
                    to.put<RUN>(at + 3, v, unit_codes<F, 3>(quad, v));
                }
        }
    }
};
#endif

template <Format F, typename T>
void multiply(const Packed& a, int threads) {
    constexpr BlockForm FORM = block_form(F);
    const auto* x = static_cast<const T*>(a.x);
    const auto round = [&](const RoundedRows& rows, std::size_t row, std::size_t size) {
        for (std::size_t m = 0; m < size; ++m)
            rows.round<FORM.group>(x + (row + m) * a.x_stride, a.layout.inputs, FORM.group, row, m, size, FORM.half);
    };
#if defined(ENGINE_CPU_MANY_CODES)
    if (a.rows >= FromBlocks<F>::FROM) return many_codes<T>(a, threads, FromBlocks<F>{a}, round);
#endif
    const RoundedRows rows(a);
    const InBlocks<F> kernel{a, rows};
    over_panels<MOST>(a.layout, a.weight, a.rows, kernel, threads,
                      [&](std::size_t row, std::size_t size) { round(rows, row, size); });
}

// float16: a unit is one input, of 32 outputs.
struct Halves {
    static constexpr std::size_t PLANES = 1;
    const Packed& a;
    const float* wide;  // of x

    template <std::size_t MR>
    void tile(std::size_t panel, std::size_t row, Fetch fetch) const {
        const std::size_t units = a.layout.units();
        const auto* w = static_cast<const fp16*>(a.weight) + panel * a.layout.panel_bytes() / 2;
        const float* x = wide + row * units;
        Floats sums[MR][VECTORS];
        for (auto& of_row : sums)
            for (Floats& sum : of_row) sum = Floats::zero();
        for (std::size_t u = 0; u < units; ++u, w += PANEL, x += MR) {
            fetch.unit<PANEL * 2>();
            Floats right[VECTORS];
            for (std::size_t v = 0; v < VECTORS; ++v) right[v] = Floats::load(w + v * Floats::LANES);
#pragma GCC unroll 8
            for (std::size_t m = 0; m < MR; ++m) {
                const Floats left = Floats::all(x[m]);
#pragma GCC unroll 8
                for (std::size_t v = 0; v < VECTORS; ++v) sums[m][v] = Floats::fma(right[v], left, sums[m][v]);
            }
        }
        for (std::size_t m = 0; m < MR; ++m) put(a, row + m, panel, sums[m]);
    }
};

// Units of a panel as floats, for many_rows.
void widen_halves(const std::uint8_t* from, std::size_t units, float* to) {
    const auto* w = reinterpret_cast<const fp16*>(from);
    for (std::size_t u = 0; u < units; ++u, w += PANEL)
        for (std::size_t v = 0; v < VECTORS; ++v)
            Floats::load(w + v * Floats::LANES).store(widened_at(to, u, v * Floats::LANES));
}

template <typename T>
void halves(const Packed& a, int threads) {
    const std::size_t units = a.layout.units();
    if constexpr (WIDENS_ONCE)
        if (a.rows >= MANY_FROM) return many_rows<T, 1>(a, threads, widen_halves);
    const auto* x = static_cast<const T*>(a.x);
    auto* wide = static_cast<float*>(a.scratch);
    const Halves kernel{a, wide};
    over_panels<MOST_HALF>(a.layout, a.weight, a.rows, kernel, threads, [&](std::size_t row, std::size_t size) {
        for (std::size_t m = 0; m < size; ++m)
            for (std::size_t u = 0; u < units; ++u) wide[row * units + u * size + m] = widen(x[(row + m) * a.x_stride + u]);
    });
}

template <Format F>
void of_dtype(const Packed& a, int threads) {
    a.dtype == DType::bfloat16 ? multiply<F, bf16>(a, threads) : multiply<F, float>(a, threads);
}

}  // namespace

void blocks(const Packed& a, int threads) {
    switch (a.layout.format) {
        case Format::float16:
            return a.dtype == DType::bfloat16 ? halves<bf16>(a, threads) : halves<float>(a, threads);
        case Format::q4_0:
            return of_dtype<Format::q4_0>(a, threads);
        case Format::q4_1:
            return of_dtype<Format::q4_1>(a, threads);
        case Format::q5_0:
            return of_dtype<Format::q5_0>(a, threads);
        case Format::q5_1:
            return of_dtype<Format::q5_1>(a, threads);
        case Format::q8_0:
            return of_dtype<Format::q8_0>(a, threads);
        case Format::q2_k:
            return of_dtype<Format::q2_k>(a, threads);
        case Format::q3_k:
            return of_dtype<Format::q3_k>(a, threads);
        case Format::q4_k:
            return of_dtype<Format::q4_k>(a, threads);
        case Format::q5_k:
            return of_dtype<Format::q5_k>(a, threads);
        case Format::q6_k:
            return of_dtype<Format::q6_k>(a, threads);
        case Format::iq4_nl:
            return of_dtype<Format::iq4_nl>(a, threads);
        case Format::iq4_xs:
            return of_dtype<Format::iq4_xs>(a, threads);
        default:
            return;
    }
}

}  // namespace engine_cpu::ENGINE_CPU_LEVEL
