// Rows of packed weights, back as they were: an embedding's vectors. Levels have no part in it: nothing is multiplied but a
// code by its scale, each product and sum rounded by itself, as ggml's package does it.
#include <cstring>
#include <stdexcept>
#include <string>

#define ENGINE_CPU_LEVEL packing  // conversions at the level that all processors have
#include "levels/convert.h"
#include "packing.h"
#include "parallel.h"

namespace engine_cpu {
namespace {

using packing::bf16;
using packing::fp16;
using packing::narrow;
using packing::widen;

constexpr std::size_t ROWS = 4;  // that are worth a thread
constexpr std::size_t HALF = PANEL / 2;

float half_at(const std::uint8_t* from) {
    fp16 half;
    std::memcpy(&half, from, 2);
    return widen(half);
}

// Number `r` of a block, of output `lane`.
float number(const BlockForm& form, const std::uint8_t* from, std::size_t r, std::size_t lane) {
    const std::size_t rows = form.rows_of_numbers();
    if (form.numbers == Numbers::of_8) return static_cast<std::int8_t>(from[r * PANEL + lane]);
    std::int32_t value = from[r % (rows / 2) * PANEL + lane] >> (r < rows / 2 ? 0 : 4) & 15;
    if (form.numbers == Numbers::of_6) {
        const std::uint8_t upper = from[(rows / 2 + r % (rows / 4)) * PANEL + lane];
        value |= (upper >> 2 * (r / (rows / 4)) & 3) << 4;
    }
    return static_cast<float>(value - form.below);
}

// The codes of 16 inputs of output `lane`: four at a time, as the bytes of a word.
void take_codes(const BlockForm& form, const std::uint8_t* from, std::size_t lane, std::uint8_t* codes) {
    constexpr std::uint32_t EACH = 0x01010101u;
    if (form.as_bytes) {
        for (std::size_t u = 0; u < 4; ++u) std::memcpy(codes + u * 4, from + (u * PANEL + lane) * 4, 4);
        return;
    }
    const std::size_t at = lane % HALF * 4, upper = lane / HALF;
    const std::uint8_t* two = from + (form.one < 0 ? 0 : 64);
    const std::uint8_t* lower = two + (form.two < 0 ? 0 : 128);
    for (std::size_t u = 0; u < 4; ++u) {
        std::uint32_t word = 0, part;
        if (form.nibbles) {
            std::memcpy(&part, lower + u * 64 + at, 4);
            word = part >> 4 * upper & 15 * EACH;
        }
        if (form.two >= 0) {
            std::memcpy(&part, two + u / 2 * 64 + at, 4);
            word |= (part >> (4 * (u % 2) + 2 * upper) & 3 * EACH) << form.two;
        }
        if (form.one >= 0) {
            std::memcpy(&part, from + at, 4);
            word |= (part >> (2 * u + upper) & EACH) << form.one;
        }
        std::memcpy(codes + u * 4, &word, 4);
    }
}

template <typename T>
void row_of_blocks(const Layout& layout, const std::uint8_t* from, std::size_t lane, T* to) {
    const BlockForm form = layout.block();
    for (std::size_t b = 0; b < layout.inputs / form.inputs; ++b) {
        const float scale = half_at(from + lane * 2);
        from += PANEL * 2;
        const float minimum = form.minima ? half_at(from + lane * 2) : 0.0f;
        from += form.minima ? PANEL * 2 : 0;
        const std::uint8_t* numbers = from;
        from += form.number_bytes();
        for (std::size_t g = 0; g < form.groups(); ++g) {
            float of_group = scale, added = minimum;
            if (form.numbers != Numbers::none) {
                of_group = scale * number(form, numbers, g, lane);
                if (form.minima) added = -(minimum * number(form, numbers, form.groups() + g, lane));
            }
            for (std::size_t i = 0; i < form.group; i += 16, from += form.code_bytes(), to += 16) {
                std::uint8_t codes[16];
                take_codes(form, from, lane, codes);
                for (std::size_t k = 0; k < 16; ++k) {
                    const std::int32_t code = (form.table ? IQ4[codes[k]] : codes[k]) - form.half;
                    const float weight = of_group * static_cast<float>(code);
                    to[k] = narrow<T>(form.minima ? weight + added : weight);
                }
            }
        }
    }
}

// A unit is EACH inputs.
template <std::size_t EACH, typename W, typename T>
void row_of_units(const Layout& layout, const W* from, std::size_t lane, T* to) {
    for (std::size_t i = 0; i < layout.inputs; ++i)
        to[i] = narrow<T>(widen(from[(i / EACH * PANEL + lane) * EACH + i % EACH]));
}

template <typename T>
void row(const Layout& layout, const void* panel, std::size_t lane, T* to) {
    switch (layout.format) {
        case Format::float32:
            return row_of_units<1>(layout, static_cast<const float*>(panel), lane, to);
        case Format::bfloat16:
            return row_of_units<2>(layout, static_cast<const bf16*>(panel), lane, to);
        case Format::float16:
            return row_of_units<1>(layout, static_cast<const fp16*>(panel), lane, to);
        default:
            return row_of_blocks(layout, static_cast<const std::uint8_t*>(panel), lane, to);
    }
}

template <typename T>
void rows(const LookUp& a, int threads) {
    auto* out = static_cast<T*>(a.out);
    const auto* weight = static_cast<const std::uint8_t*>(a.weight);
    const std::size_t inputs = a.layout.inputs;
    parallel_for(threads, a.count, ROWS, [&](std::size_t begin, std::size_t end) {
        for (std::size_t i = begin; i < end; ++i) {
            const std::int64_t id =
                (a.wide ? static_cast<const std::int64_t*>(a.index)[i] : static_cast<const std::int32_t*>(a.index)[i]) -
                a.first;
            const auto place = static_cast<std::size_t>(id);
            if (id >= 0 && place < a.layout.outputs)
                row(a.layout, weight + place / PANEL * a.layout.panel_bytes(), place % PANEL, out + i * inputs);
            else if (a.part)
                std::memset(static_cast<void*>(out + i * inputs), 0, inputs * sizeof(T));
            else
                throw std::out_of_range("row " + std::to_string(id) + " of " + std::to_string(a.layout.outputs));
        }
    });
}

}  // namespace

void look_up(const LookUp& a, int threads) {
    const Format format = a.layout.format;
    if (!in_blocks(format) && format != Format::float32 && format != Format::bfloat16 && format != Format::float16)
        throw std::invalid_argument("rows of this format are not looked up");
    if (a.dtype != DType::float32 && a.dtype != DType::bfloat16)
        throw std::invalid_argument("rows are looked up in float32 and bfloat16");
    a.dtype == DType::bfloat16 ? rows<bf16>(a, threads) : rows<float>(a, threads);
}

}  // namespace engine_cpu
