// Rows of inputs rounded to 8 bits on their way into a product with quantised weights: each group of a row by its own
// largest element, so that a row's result does not depend on the others.
#pragma once

#include <algorithm>
#include <cmath>

#include "levels/panels.h"

namespace engine_cpu::ENGINE_CPU_LEVEL {

constexpr float LEAST = 4e-37f;  // 127 / smaller numbers is infinite: they count as zero

// Scratch memory: the words of all tiles (panels.h), then for each group of each row, in the order of tiles, a scale and
// an offset: half of the weights' codes times the sum of the row's codes, which their being unsigned adds to a product.
// Where weights have minima instead, their codes' half being 0, it is the bits of a float: the sum of what the row's codes
// stand for.
struct RoundedRows {
    std::uint8_t* words;
    float* scales;
    std::int32_t* offsets;
    std::size_t units, groups;

    // planes: of a tile's words.
    explicit RoundedRows(const Packed& a, std::size_t planes = 1)
        : words(static_cast<std::uint8_t*>(a.scratch)),
          scales(reinterpret_cast<float*>(words + a.rows * a.layout.units() * 4 * planes)),
          offsets(reinterpret_cast<std::int32_t*>(scales + a.rows * a.layout.groups())),
          units(a.layout.units()),
          groups(a.layout.groups()) {}

    // Rounds row m of the tile at `row`: x [inputs], in groups of so many inputs. BLOCK: of them are looked at together.
    template <std::size_t BLOCK = 64, typename T>
    void round(const T* x, std::size_t inputs, std::size_t group_size, std::size_t row, std::size_t m, std::size_t size,
               std::int32_t half) const {
        for (std::size_t g = 0; g < groups; ++g) {
            const std::size_t begin = g * group_size, end = std::min(inputs, begin + group_size);
            std::uint32_t largest = 0;  // of the bits of magnitudes, which sort as these do; no NaN is lost
            for (std::size_t i = begin; i < end; ++i) largest = std::max(largest, to_bits(widen(x[i])) & 0x7fffffffu);
            const float most = from_bits(largest);
            const bool finite = largest < 0x7f800000u, some = finite && most >= LEAST;
            const float inverse = some ? 127.0f / most : 0.0f;
            std::int32_t sum = 0;
            for (std::size_t i = begin; i < begin + group_size; i += BLOCK) {
                float wide[BLOCK] = {};
                std::int8_t codes[BLOCK];
                const std::size_t count = i < end ? std::min(BLOCK, end - i) : 0;
                const std::size_t room = std::min(BLOCK, begin + group_size - i);
                if (finite)
                    for (std::size_t k = 0; k < count; ++k) wide[k] = widen(x[i + k]);
                for (std::size_t k = 0; k < BLOCK; ++k)
                    codes[k] = static_cast<std::int8_t>(static_cast<std::int32_t>(__builtin_rintf(wide[k] * inverse)));
                for (std::size_t k = 0; k < BLOCK; ++k) sum += codes[k];
                std::uint8_t* to = words + (row * units + i / 4 * size + m) * 4;
                for (std::size_t k = 0; k < room; k += 4) std::memcpy(to + k * size, codes + k, 4);
            }
            const std::size_t at = row * groups + g * size + m;
            scales[at] = some ? most / 127.0f : finite ? 0.0f : NAN;
            offsets[at] = half ? sum * half
                               : static_cast<std::int32_t>(to_bits(scales[at] * static_cast<float>(sum)));
        }
    }
};

}  // namespace engine_cpu::ENGINE_CPU_LEVEL
