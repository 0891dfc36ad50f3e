// Products of many rows with weights of whole numbers where there is AVX2 alone: a stretch of a panel is taken apart
// once for all rows of a chunk, as many_rows.h does it with floats. The sums of a group are exact in whatever order they
// are added up, and floats are added in the order of groups: the same bits as those of few rows.
//
// Without VNNI the products of bytes have 16 bits. Where codes are small, RUN units of 4 inputs are added up in them
// before they are widened: half the instructions of a product, and less. Codes of 8 bits, which leave no room for two
// products, are multiplied as pairs of 16 bits instead: RUN is 0. Of codes of 6 bits two units would fit, but their
// groups are short, and sums of 32 bits stay in registers when each unit is widened: RUN is 1.
#pragma once

#include "levels/many_rows.h"
#include "levels/quantize_rows.h"

namespace engine_cpu::ENGINE_CPU_LEVEL {

#if defined(__AVX2__) && !defined(__AVX512F__)
#define ENGINE_CPU_MANY_CODES

constexpr std::size_t PART = STRETCH / 4;                  // units of a stretch
constexpr std::size_t MOST_GROUPS = STRETCH / 4;           // of a stretch
constexpr std::size_t HALF_UNIT = HALF_PANEL * 4;          // bytes
constexpr std::size_t HALVES = HALF_PANEL / Words::LANES;  // registers of half a panel

// RUN for codes up to `most`: of a byte of x and a code, so many times two products fit 16 bits.
constexpr std::size_t run_of(int most) { return most > 63 ? 0 : most > 31 ? 1 : most > 15 ? 4 : 8; }
constexpr bool run_fits(int most) { return static_cast<int>(run_of(most)) * 2 * most * 127 <= 32767; }
static_assert(run_fits(15) && run_fits(31) && run_fits(63) && run_fits(255));

// What a group has beside scales: nothing, as all codes have one middle; a code for zero; a minimum, to be added.
enum class Beside { middle, zeros, minima };

// A stretch of a panel: of each group 32 scales, and of what is beside them.
struct Stretch {
    alignas(64) std::uint8_t codes[2 * STRETCH * PANEL];
    alignas(64) float scales[MOST_GROUPS][PANEL];
    union {
        alignas(64) float minima[MOST_GROUPS][PANEL];
        alignas(64) std::uint32_t zeros[MOST_GROUPS][PANEL];
    };
    alignas(64) std::uint32_t begun[MOST_CHUNK * PANEL];  // sums of a group that is longer than a stretch

    // Register v of the codes of a unit.
    template <std::size_t RUN>
    void put(std::size_t unit, std::size_t v, Words w) {
        constexpr std::size_t BYTES = HALF_UNIT * (RUN ? 1 : 2);
        std::uint8_t* to = codes + v / HALVES * PART * BYTES + unit * BYTES + v % HALVES * 32;
        if constexpr (RUN) return store(to, w.v);
        store(to, _mm256_and_si256(w.v, _mm256_set1_epi16(0xff)));
        store(to + HALF_UNIT, _mm256_srli_epi16(w.v, 8));
    }
    static void store(void* to, __m256i v) { _mm256_store_si256(static_cast<__m256i*>(to), v); }
};

// Calls take(group, unit of it, unit of the stretch, units) for what a stretch has of each group.
template <typename Take>
void over_groups(std::size_t unit, std::size_t part, std::size_t group, Take&& take) {
    for (std::size_t g = 0, at = 0, count; at < part; ++g, at += count) {
        const std::size_t within = (unit + at) % group;
        count = std::min(group - within, part - at);
        take(g, within, at, count);
    }
}

// gcc 12 would compute the products of a whole unit before it adds them, and runs out of registers.
inline __m256i add_pairs(__m256i sum, __m256i w, __m256i x) {  // of 16 bits each, to sums of 32
    __m256i product;
    asm("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0" : "+x"(sum), "=&x"(product) : "x"(w), "x"(x));
    return sum;
}
inline __m256i add_bytes(__m256i sum, __m256i w, __m256i x) {  // unsigned and signed ones, to sums of 16
    __m256i product;
    asm("vpmaddubsw %3, %2, %1\n\tvpaddw %1, %0, %0" : "+x"(sum), "=&x"(product) : "x"(w), "x"(x));
    return sum;
}

inline __m256i add_quads(__m256i sum, __m256i w, __m256i x) {  // the same, to sums of 32
    alignas(32) static constexpr std::int16_t ONES[16] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
    __m256i product;
    asm("vpmaddubsw %3, %2, %1\n\tvpmaddwd %4, %1, %1\n\tvpaddd %1, %0, %0"
        : "+x"(sum), "=&x"(product) : "x"(w), "x"(x), "m"(ONES));
    return sum;
}

// sums += x . w over a unit: x [MR] words; w as Stretch::put left it.
template <std::size_t MR, typename Add>
inline void add_words(const std::uint8_t* x, const std::uint8_t* w, __m256i (&sums)[MR][HALVES], Add&& add) {
    __m256i right[HALVES];
    for (std::size_t v = 0; v < HALVES; ++v)
        right[v] = _mm256_load_si256(reinterpret_cast<const __m256i*>(w + v * 32));
#pragma GCC unroll 6
    for (std::size_t m = 0; m < MR; ++m) {
        const __m256i left = Words::all(load_word(x + m * 4)).v;
        for (std::size_t v = 0; v < HALVES; ++v) sums[m][v] = add(sums[m][v], right[v], left);
    }
}

// The same over several: x [units][MR], of pairs in two planes.
template <std::size_t RUN, std::size_t MR>
inline void add_units(const std::uint8_t* x, [[maybe_unused]] std::size_t plane, const std::uint8_t* w,
                      std::size_t units, __m256i (&sums)[MR][HALVES], Fetch& fetch) {
    if constexpr (RUN == 1) {
        for (std::size_t u = 0; u < units; ++u, x += MR * 4, w += HALF_UNIT) {
            fetch.unit<64>();
            add_words(x, w, sums, add_quads);
        }
    } else if constexpr (RUN == 0) {
        for (std::size_t u = 0; u < units; ++u, x += MR * 4, w += 2 * HALF_UNIT) {
            fetch.unit<64>();
            add_words(x, w, sums, add_pairs);
            add_words(x + plane, w + HALF_UNIT, sums, add_pairs);
        }
    } else {
        for (std::size_t run; units; units -= run) {
            run = std::min(RUN, units);
            __m256i pairs[MR][HALVES];
            for (auto& of_row : pairs)
                for (__m256i& sum : of_row) sum = _mm256_setzero_si256();
            for (std::size_t i = 0; i < run; ++i, x += MR * 4, w += HALF_UNIT) {
                fetch.unit<64>();
                add_words(x, w, pairs, add_bytes);
            }
#pragma GCC unroll 6
            for (std::size_t m = 0; m < MR; ++m)
                for (std::size_t v = 0; v < HALVES; ++v)
                    sums[m][v] = _mm256_add_epi32(sums[m][v], _mm256_madd_epi16(pairs[m][v], _mm256_set1_epi16(1)));
        }
    }
}

// Source: where codes come from. It has RUN, BESIDE and START, the units of a group, widen(panel, unit, part, stretch),
// and FROM, the rows from which on this is faster (measured on a Zen 5 held to AVX2).
template <typename Source>
struct ManyCodes {
    static constexpr std::size_t RUN = Source::RUN, PLANES = RUN ? 1 : 2;
    static constexpr float START = Source::START;
    using Room = Stretch;
    const Source& source;
    RoundedRows rows;

    std::uint8_t* words(std::size_t row) const { return rows.words + row * rows.units * 4 * PLANES; }
    // Whole groups, or what is left of one.
    std::size_t part(std::size_t unit, std::size_t left) const {
        const std::size_t group = source.group;
        return std::min(group > PART ? std::min(PART, group - unit % group) : PART / group * group, left);
    }
    std::size_t steps(std::size_t part) const { return part; }
    void widen(std::size_t panel, std::size_t unit, std::size_t part, Room& room) const {
        source.widen(panel, unit, part, room);
    }
    void tile(std::size_t size, std::size_t row, std::size_t chunk_row, std::size_t unit, std::size_t part,
              std::size_t half, Room& room, float* sums, Fetch& fetch) const {
        of_size(size, [&](auto rows_of) {
            of_rows<decltype(rows_of)::value>(row, chunk_row, unit, part, half, room, sums, fetch);
        });
    }

    template <std::size_t MR>
    [[gnu::noinline]] void of_rows(std::size_t row, std::size_t chunk_row, std::size_t unit, std::size_t part,
                                   std::size_t half, Room& room, float* totals, Fetch fetch) const {
        constexpr std::size_t BYTES = HALF_UNIT * PLANES;
        const std::size_t plane = rows.units * MR * 4, group = std::min(source.group, part);
        const bool begins = unit % source.group == 0, ends = (unit + part) % source.group == 0;
        const std::uint8_t *x = words(row) + unit * MR * 4, *w = room.codes + half * PART * BYTES;
        const std::size_t at = row * rows.groups + unit / source.group * MR, lane = half * HALF_PANEL;
        const float* row_scales = rows.scales + at;
        const std::int32_t* offsets = rows.offsets + at;
        std::uint32_t* begun = room.begun + chunk_row * PANEL + lane;
        for (std::size_t g = 0; g * group < part; ++g, row_scales += MR, offsets += MR) {
            __m256i sums[MR][HALVES];
            for (std::size_t m = 0; m < MR; ++m)
                for (std::size_t v = 0; v < HALVES; ++v)
                    sums[m][v] = begins ? _mm256_setzero_si256() : Words::load(begun + m * PANEL + v * Words::LANES).v;
            add_units<RUN>(x, plane, w, group, sums, fetch);
            x += group * MR * 4;
            w += group * BYTES;
            if (!ends) {
                for (std::size_t m = 0; m < MR; ++m)
                    for (std::size_t v = 0; v < HALVES; ++v)
                        Stretch::store(begun + m * PANEL + v * Words::LANES, sums[m][v]);
                return;
            }
#pragma GCC unroll 6
            for (std::size_t m = 0; m < MR; ++m) {
                const Words offset = Words::all(static_cast<std::uint32_t>(offsets[m]));
                const Floats row_scale = Floats::all(row_scales[m]);
                for (std::size_t v = 0; v < HALVES; ++v) {
                    const std::size_t from = lane + v * Words::LANES;
                    float* to = totals + m * PANEL + v * Words::LANES;
                    Words sum{sums[m][v]};
                    if constexpr (Source::BESIDE == Beside::middle) sum = sum - offset;
                    if constexpr (Source::BESIDE == Beside::zeros)
                        sum = sum - Words{_mm256_mullo_epi32(Words::load(room.zeros[g] + from).v, offset.v)};
                    const Floats scale = Floats::load(room.scales[g] + from) * row_scale;
                    Floats total = Floats::fma(sum.to_floats(), scale, Floats::load(to));
                    if constexpr (Source::BESIDE == Beside::minima)
                        total = Floats::fma(Floats::load(room.minima[g] + from), offset.as_floats(), total);
                    total.store(to);
                }
            }
        }
    }
};

// So many words, which lie in the second plane: bytes 0 and 2 of each as 16 bits to the first, the others to the
// second.
inline void split_words(std::uint8_t* first, std::size_t count) {
    std::uint8_t* second = first + count * 4;
    for (std::size_t i = 0; i < count; i += Words::LANES) {
        const std::size_t bytes = std::min(Words::LANES, count - i) * 4;
        std::uint8_t room[3][32] = {};
        const bool all = bytes == 32;
        if (!all) std::memcpy(room[2], second + i * 4, bytes);
        const __m256i words = Words::load(all ? second + i * 4 : room[2]).v;
        const auto put = [](std::uint8_t* to, __m256i v) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), v); };
        put(all ? first + i * 4 : room[0], _mm256_srai_epi16(_mm256_slli_epi16(words, 8), 8));
        put(all ? second + i * 4 : room[1], _mm256_srai_epi16(words, 8));
        if (all) continue;
        std::memcpy(first + i * 4, room[0], bytes);
        std::memcpy(second + i * 4, room[1], bytes);
    }
}

// round(rows, row, size): rows of the tile at `row` to 8 bits.
template <typename T, typename Source, typename Round>
void many_codes(const Packed& a, int threads, const Source& source, Round&& round) {
    using How = ManyCodes<Source>;
    const RoundedRows rows(a, How::PLANES);
    const How how{source, rows};
    over_stretches<T>(a, threads, how, [&](std::size_t row, std::size_t size) {
        RoundedRows last = rows;  // of the planes, from which both are made
        last.words = how.words(row) + size * rows.units * 4 * (How::PLANES - 1) - row * rows.units * 4;
        round(last, row, size);
        if constexpr (How::PLANES > 1) split_words(how.words(row), size * rows.units);
    });
}

#endif

}  // namespace engine_cpu::ENGINE_CPU_LEVEL
