// y = x @ weight.T + bias with codes as a checkpoint stores them, in groups of inputs that share a scale (layout.h).
//
// Whole numbers are multiplied as integers with rows rounded to 8 bits in the same groups. What a code that stands for zero
// adds to a product is taken off by the sum of the row's codes: sums are exact, and the same at all levels. Codes that
// stand for floats become these in registers, and rows stay as they are.
#include <vector>

#include "levels/many_codes.h"
#include "levels/quantize_rows.h"
#include "levels/table.h"

namespace engine_cpu::ENGINE_CPU_LEVEL {
namespace {

#if defined(__AVX512F__)
constexpr std::size_t MOST = 8;  // rows of a tile
#elif defined(__AVX2__) || defined(ENGINE_CPU_NEON)
constexpr std::size_t MOST = 2;
#else
constexpr std::size_t MOST = 1;
#endif

// -- what this level's registers can do besides -----------------------------------------------------------------------
#if defined(__AVX512F__)

inline Words bytes(const std::uint8_t* p) {  // LANES of them, widened
    return {_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
inline Words times(Words a, Words b) { return {_mm512_mullo_epi32(a.v, b.v)}; }
inline Floats load_bf16(const std::uint8_t* p) {
    const __m256i narrow = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(narrow), 16))};
}

struct WholeTable {  // bytes below 16 -> bytes
    __m512i v;
    explicit WholeTable(const std::uint8_t* p)
        : v(_mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))) {}
    Words operator[](Words at) const { return {_mm512_shuffle_epi8(v, at.v)}; }
};

struct Nibble {  // the floats that nibble SHIFT / 4 of each word stands for
    __m512 v;
    explicit Nibble(const float* p) : v(_mm512_loadu_ps(p)) {}
    template <int SHIFT>
    Floats at(Words w) const {
        return {_mm512_permutexvar_ps(_mm512_srli_epi32(w.v, SHIFT), v)};
    }
};

template <int SHIFT>
Floats e4m3(Words w) {  // of byte SHIFT / 8 of each word
    const __m512i moved = _mm512_srai_epi32(_mm512_slli_epi32(w.v, 24 - SHIFT), 4);
    const __m512i bits = _mm512_and_si512(moved, _mm512_set1_epi32(static_cast<int>(0x87f00000u)));
    return {_mm512_mul_ps(_mm512_castsi512_ps(bits), _mm512_set1_ps(0x1p120f))};
}

#elif defined(__AVX2__)

inline Words bytes(const std::uint8_t* p) {
    return {_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)))};
}
inline Words times(Words a, Words b) { return {_mm256_mullo_epi32(a.v, b.v)}; }
inline Floats load_bf16(const std::uint8_t* p) {
    const __m128i narrow = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(narrow), 16))};
}

struct WholeTable {
    __m256i v;
    explicit WholeTable(const std::uint8_t* p)
        : v(_mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))) {}
    Words operator[](Words at) const { return {_mm256_shuffle_epi8(v, at.v)}; }
};

struct Nibble {
    __m256 low, high;
    explicit Nibble(const float* p) : low(_mm256_loadu_ps(p)), high(_mm256_loadu_ps(p + 8)) {}
    template <int SHIFT>
    Floats at(Words w) const {
        const __m256i index = _mm256_srli_epi32(w.v, SHIFT);  // of which each half of the table reads three bits
        const __m256 fourth = _mm256_castsi256_ps(_mm256_slli_epi32(index, 28));
        return {_mm256_blendv_ps(_mm256_permutevar8x32_ps(low, index), _mm256_permutevar8x32_ps(high, index), fourth)};
    }
};

template <int SHIFT>
Floats e4m3(Words w) {
    const __m256i moved = _mm256_srai_epi32(_mm256_slli_epi32(w.v, 24 - SHIFT), 4);
    const __m256i bits = _mm256_and_si256(moved, _mm256_set1_epi32(static_cast<int>(0x87f00000u)));
    return {_mm256_mul_ps(_mm256_castsi256_ps(bits), _mm256_set1_ps(0x1p120f))};
}

#elif defined(ENGINE_CPU_NEON)

inline Words bytes(const std::uint8_t* p) {
    return {vmovl_u16(vget_low_u16(vmovl_u8(vreinterpret_u8_u32(vdup_n_u32(load_word(p))))))};
}
inline Words times(Words a, Words b) { return {vmulq_u32(a.v, b.v)}; }
inline Floats load_bf16(const std::uint8_t* p) {
    return {vreinterpretq_f32_u32(vshll_n_u16(vreinterpret_u16_u8(vld1_u8(p)), 16))};
}

struct WholeTable {
    uint8x16_t v;
    explicit WholeTable(const std::uint8_t* p) : v(vld1q_u8(p)) {}
    Words operator[](Words at) const {
        return {vreinterpretq_u32_u8(vqtbl1q_u8(v, vreinterpretq_u8_u32(at.v)))};
    }
};

struct Nibble {
    uint8x16x4_t v;
    explicit Nibble(const float* p) {
        for (int i = 0; i < 4; ++i) v.val[i] = vreinterpretq_u8_f32(vld1q_f32(p + 4 * i));
    }
    template <int SHIFT>
    Floats at(Words w) const {
        uint32x4_t index = w.v;
        if constexpr (SHIFT > 0) index = vshrq_n_u32(index, SHIFT);
        index = vmulq_n_u32(vandq_u32(index, vdupq_n_u32(15)), 0x04040404u);  // where a float's four bytes begin
        const uint32x4_t bytes_of = vaddq_u32(index, vdupq_n_u32(0x03020100u));
        return {vreinterpretq_f32_u8(vqtbl4q_u8(v, vreinterpretq_u8_u32(bytes_of)))};
    }
};

template <int SHIFT>
Floats e4m3(Words w) {
    uint32x4_t top = w.v;
    if constexpr (SHIFT < 24) top = vshlq_n_u32(top, 24 - SHIFT);
    const uint32x4_t moved = vreinterpretq_u32_s32(vshrq_n_s32(vreinterpretq_s32_u32(top), 4));
    return {vmulq_n_f32(vreinterpretq_f32_u32(vandq_u32(moved, vdupq_n_u32(0x87f00000u))), 0x1p120f)};
}

#else

inline Words bytes(const std::uint8_t* p) { return {*p}; }
inline Words times(Words a, Words b) { return {a.v * b.v}; }
inline Floats load_bf16(const std::uint8_t* p) {
    bf16 x;
    std::memcpy(&x, p, 2);
    return {widen(x)};
}

struct WholeTable {
    const std::uint8_t* p;
    explicit WholeTable(const std::uint8_t* table) : p(table) {}
    Words operator[](Words at) const {
        std::uint32_t found = 0;
        for (int i = 0; i < 32; i += 8) found |= static_cast<std::uint32_t>(p[at.v >> i & 15]) << i;
        return {found};
    }
};

struct Nibble {
    const float* p;
    explicit Nibble(const float* table) : p(table) {}
    template <int SHIFT>
    Floats at(Words w) const {
        return {p[w.v >> SHIFT & 15]};
    }
};

template <int SHIFT>
Floats e4m3(Words w) {
    const std::uint32_t byte = w.v >> SHIFT & 0xff;
    return {from_bits((byte & 0x80) << 24 | (byte & 0x7f) << 20) * 0x1p120f};
}

#endif

// Of LANES outputs from `lane` on.
inline Floats scales(ScaleType type, const std::uint8_t* p, std::size_t lane) {
    switch (type) {
        case ScaleType::float16:
            return Floats::load(reinterpret_cast<const fp16*>(p) + lane);
        case ScaleType::bfloat16:
            return load_bf16(p + lane * 2);
        default:
            return Floats::load(reinterpret_cast<const float*>(p) + lane);
    }
}

// -- products ----------------------------------------------------------------------------------------------------------
template <Format F, bool TABLE, typename T>
struct Whole {
    static constexpr std::size_t PLANES = 1, BYTES = F == Format::codes4 ? PANEL * 2 : PANEL * 4;
    const Packed& a;
    RoundedRows rows;
    Output<T> out;
    WholeTable table;

    template <std::size_t MR>
    void tile(std::size_t panel, std::size_t row, Fetch fetch) const {
        const Layout& layout = a.layout;
        const std::uint8_t* w = static_cast<const std::uint8_t*>(a.weight) + panel * layout.panel_bytes();
        const std::uint8_t* x = rows.words + row * rows.units * 4;
        const std::size_t units = layout.group_size / 4, ahead = layout.scale_bytes();
        const float* row_scales = rows.scales + row * rows.groups;
        const std::int32_t* row_sums = rows.offsets + row * rows.groups;
        Floats totals[MR][VECTORS];
        for (auto& of_row : totals)
            for (Floats& total : of_row) total = Floats::zero();
        for (std::size_t g = 0; g < rows.groups; ++g, row_scales += MR, row_sums += MR) {
            const std::uint8_t* group = w;
            w += ahead;
            fetch.unit<PANEL * 4>();
            Words sums[MR][VECTORS];
#pragma GCC unroll 8
            for (std::size_t m = 0; m < MR; ++m)
                for (Words& sum : sums[m]) sum = Words::zero();
            for (std::size_t u = 0; u < units; ++u, w += BYTES, x += MR * 4) {
                fetch.unit<BYTES>();
                const auto right = [&](std::size_t v) {
                    const Words found = F == Format::codes4 ? nibbles(w, v) : Words::load(w + v * Words::LANES * 4);
                    if constexpr (TABLE) return table[found];
                    return found;
                };
                add_unit(
                    sums, right, [&](std::size_t m) { return Words::all(load_word(x + m * 4)); },
                    [](Words sum, Words weights, Words of_row) {
                        return F == Format::codes4 && !TABLE ? Words::dot_small(sum, weights, of_row)
                                                             : Words::dot(sum, weights, of_row);
                    });
            }
            const std::uint8_t* zeros = group + ahead - PANEL;
            for (std::size_t v = 0; v < VECTORS; ++v) {
                const Words zero = bytes(zeros + v * Words::LANES);
                const Floats scale = scales(layout.scale, group, v * Words::LANES);
#pragma GCC unroll 8
                for (std::size_t m = 0; m < MR; ++m) {
                    const Words off = times(zero, Words::all(static_cast<std::uint32_t>(row_sums[m])));
                    totals[m][v] = Floats::fma((sums[m][v] - off).to_floats(), scale * Floats::all(row_scales[m]),
                                               totals[m][v]);
                }
            }
        }
        for (std::size_t m = 0; m < MR; ++m) out.put(row + m, panel, totals[m]);
    }
};

template <Format F, typename T>
struct Values {
    static constexpr std::size_t PLANES = 4, BYTES = F == Format::values4 ? PANEL * 2 : PANEL * 4;
    const Packed& a;
    const float* inputs;  // of a tile: input i of row m at i * (rows of the tile) + m
    Output<T> out;
    Nibble table;

    // One of the four inputs of a unit.
    template <int I, std::size_t MR>
    void step(const Words* w, const float* x, Floats (&sums)[MR][VECTORS]) const {
        Floats right[VECTORS];
        if constexpr (F == Format::values4) {
            for (std::size_t v = 0; v < NIBBLES; ++v) {
                right[v] = table.template at<8 * I>(w[v]);
                right[NIBBLES + v] = table.template at<8 * I + 4>(w[v]);
            }
        } else {
            for (std::size_t v = 0; v < VECTORS; ++v) right[v] = e4m3<8 * I>(w[v]);
        }
#pragma GCC unroll 8
        for (std::size_t m = 0; m < MR; ++m) {
            const Floats left = Floats::all(x[I * MR + m]);
#pragma GCC unroll 8
            for (std::size_t v = 0; v < VECTORS; ++v) sums[m][v] = Floats::fma(right[v], left, sums[m][v]);
        }
    }

    template <std::size_t MR>
    void tile(std::size_t panel, std::size_t row, Fetch fetch) const {
        constexpr std::size_t COUNT = F == Format::values4 ? NIBBLES : VECTORS;
        const Layout& layout = a.layout;
        const std::uint8_t* w = static_cast<const std::uint8_t*>(a.weight) + panel * layout.panel_bytes();
        const float* x = inputs + row * layout.units() * 4;
        const std::size_t units = layout.group_size / 4, ahead = layout.scale_bytes(), groups = layout.groups();
        Floats totals[MR][VECTORS];
        for (auto& of_row : totals)
            for (Floats& total : of_row) total = Floats::zero();
        for (std::size_t g = 0; g < groups; ++g) {
            const std::uint8_t* group = w;
            w += ahead;
            fetch.unit<PANEL * 4>();
            Floats sums[MR][VECTORS];
#pragma GCC unroll 8
            for (std::size_t m = 0; m < MR; ++m)
                for (Floats& sum : sums[m]) sum = Floats::zero();
            for (std::size_t u = 0; u < units; ++u, w += BYTES, x += MR * 4) {
                fetch.unit<BYTES>();
                Words words[COUNT];
                for (std::size_t v = 0; v < COUNT; ++v) words[v] = Words::load(w + v * Words::LANES * 4);
                step<0, MR>(words, x, sums);
                step<1, MR>(words, x, sums);
                step<2, MR>(words, x, sums);
                step<3, MR>(words, x, sums);
            }
            for (std::size_t v = 0; v < VECTORS; ++v) {
                const Floats scale = scales(layout.scale, group, v * Words::LANES);
#pragma GCC unroll 8
                for (std::size_t m = 0; m < MR; ++m) totals[m][v] = Floats::fma(sums[m][v], scale, totals[m][v]);
            }
        }
        for (std::size_t m = 0; m < MR; ++m) out.put(row + m, panel, totals[m]);
    }
};

// Gives each row of a tile, with its inputs in the order of the weight's, to take(m, row).
template <typename T, typename Take>
void over_rows(const Packed& a, std::size_t row, std::size_t size, Take&& take) {
    const auto* x = static_cast<const T*>(a.x);
    std::vector<T> sorted(a.order ? a.layout.inputs : 0);
    for (std::size_t m = 0; m < size; ++m) {
        const T* given = x + (row + m) * a.x_stride;
        for (std::size_t i = 0; i < sorted.size(); ++i) sorted[i] = given[a.order[i]];
        take(m, a.order ? sorted.data() : given);
    }
}

#if defined(ENGINE_CPU_MANY_CODES)
// For many_codes.
template <Format F, bool TABLE>
struct FromCodes {
    static constexpr std::size_t RUN = run_of(F == Format::codes4 && !TABLE ? 15 : 255);
    static constexpr std::size_t BYTES = F == Format::codes4 ? PANEL * 2 : PANEL * 4;
    static constexpr Beside BESIDE = Beside::zeros;
    static constexpr std::size_t FROM = 4;
    static constexpr float START = 0.0f;
    const Packed& a;
    WholeTable table;
    std::size_t group = a.layout.group_size / 4;

    void widen(std::size_t panel, std::size_t unit, std::size_t part, Stretch& to) const {
        const std::size_t ahead = a.layout.scale_bytes();
        const auto* w = static_cast<const std::uint8_t*>(a.weight) + panel * a.layout.panel_bytes();
        over_groups(unit, part, group, [&](std::size_t g, std::size_t within, std::size_t at, std::size_t count) {
            const std::uint8_t* first = w + (unit + at) / group * (ahead + group * BYTES);
            for (std::size_t v = 0; v < VECTORS; ++v) {
                const std::size_t lane = v * Words::LANES;
                scales(a.layout.scale, first, lane).store(to.scales[g] + lane);
                Stretch::store(to.zeros[g] + lane, bytes(first + ahead - PANEL + lane).v);
            }
            const std::uint8_t* codes = first + ahead + within * BYTES;
            for (std::size_t u = 0; u < count; ++u, codes += BYTES)
                for (std::size_t v = 0; v < VECTORS; ++v) {
                    Words found = F == Format::codes4 ? nibbles(codes, v) : Words::load(codes + v * Words::LANES * 4);
                    if constexpr (TABLE) found = table[found];
                    to.put<RUN>(at + u, v, found);
                }
        });
    }
};
#endif

template <Format F, bool TABLE, typename T>
void whole(const Packed& a, int threads) {
    alignas(16) std::uint8_t table[16] = {};
    if (TABLE)
        for (std::size_t i = 0; i < 16; ++i) table[i] = static_cast<std::uint8_t>(a.scales[i]);
    const auto round = [&](const RoundedRows& rows, std::size_t row, std::size_t size) {
        over_rows<T>(a, row, size, [&](std::size_t m, const T* x) {
            rows.round(x, a.layout.inputs, a.layout.group_size, row, m, size, 1);
        });
    };
#if defined(ENGINE_CPU_MANY_CODES)
    if (a.rows >= FromCodes<F, TABLE>::FROM)
        return many_codes<T>(a, threads, FromCodes<F, TABLE>{a, WholeTable(table)}, round);
#endif
    const RoundedRows rows(a);
    const Whole<F, TABLE, T> kernel{a, rows, Output<T>(a), WholeTable(table)};
    over_panels<MOST>(a.layout, a.weight, a.rows, kernel, threads,
                      [&](std::size_t row, std::size_t size) { round(rows, row, size); });
}

template <Format F, typename T>
void values(const Packed& a, int threads) {
    const std::size_t inputs = a.layout.inputs, padded = a.layout.units() * 4;
    auto* words = static_cast<float*>(a.scratch);
    const float none[16] = {};
    const Values<F, T> kernel{a, words, Output<T>(a),
                              Nibble(F == Format::values4 ? a.scales : none)};
    over_panels<MOST>(a.layout, a.weight, a.rows, kernel, threads, [&](std::size_t row, std::size_t size) {
        float* to = words + row * padded;
        over_rows<T>(a, row, size, [&](std::size_t m, const T* x) {
            for (std::size_t i = 0; i < inputs; ++i) to[i * size + m] = widen(x[i]);
            for (std::size_t i = inputs; i < padded; ++i) to[i * size + m] = 0.0f;
        });
    });
}

template <typename T>
void of_dtype(const Packed& a, int threads) {
    switch (a.layout.format) {
        case Format::codes4:
            return a.scales ? whole<Format::codes4, true, T>(a, threads) : whole<Format::codes4, false, T>(a, threads);
        case Format::codes8:
            return whole<Format::codes8, false, T>(a, threads);
        case Format::values4:
            return values<Format::values4, T>(a, threads);
        default:
            return values<Format::values8, T>(a, threads);
    }
}

}  // namespace

void codes(const Packed& a, int threads) {
    a.dtype == DType::bfloat16 ? of_dtype<bf16>(a, threads) : of_dtype<float>(a, threads);
}

}  // namespace engine_cpu::ENGINE_CPU_LEVEL
