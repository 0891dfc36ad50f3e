// The formats in which ggml stores weights in blocks (GGUF files), and how they are laid out in panels: the same bits in
// another order, not one more.
//
// A block is 32 or 256 inputs of one output. A weight is scale * (code - half) - minimum, with a scale, and where there
// are minima one of those, for each group of 16 or 32 inputs. Of a panel's 32 outputs one block has, in this order:
//
//   32 scales of blocks, float16; then 32 of minima, where there are such (what multiplies them in blocks of 256)
//   in blocks of 256: a whole number for each group and output, then one for each minimum, see `Numbers`
//   the codes of 16 inputs, 4 units (layout.h), after one another; of a code's bits
//     the only one  at `one`: 64 bytes; bit 2 * u + h of byte 4 * lane + i is input i's of unit u, of output 16 * h + lane
//     the two       at `two`: 64 bytes for each two units; bits 4 * (u % 2) + 2 * h and the next one are
//     the lowest 4, `nibbles`: 64 bytes a unit, as in int4
//     all 8, `bytes`: 128 bytes a unit, as in int8
//
// Numbers of 6 bits, rows [N][32 outputs]: first the lower 4 of row r and, in the upper half of the byte, of row r + N / 2,
// for r < N / 2; then for r < N / 4 the upper 2 of rows r, r + N / 4, r + N / 2 and r + 3 * N / 4, from the lowest bits
// on. Numbers of 4 bits: the first alone.
#pragma once

#include <cstddef>
#include <cstdint>

namespace engine_cpu {

enum class Format : int {
    float32, bfloat16, int8, int4, codes4, codes8, values4, values8, float16,
    q4_0, q4_1, q5_0, q5_1, q8_0, q2_k, q3_k, q4_k, q5_k, q6_k, iq4_nl, iq4_xs
};

constexpr std::size_t PANEL = 32;  // outputs

constexpr bool in_blocks(Format format) { return format >= Format::q4_0; }

enum class Numbers { none, of_4, of_6, of_8 };

struct BlockForm {
    std::size_t inputs, bytes, group;
    std::int32_t half;
    bool minima;      // a group has one: added where blocks have 32 inputs, subtracted where they have 256
    Numbers numbers;  // by which scales and minima are multiplied
    std::int32_t below;  // of a number, before it multiplies
    bool nibbles, as_bytes;
    int two, one;  // the lowest bit of a code that is stored so, or -1
    bool table;    // a code is a place in IQ4

    constexpr std::size_t groups() const { return inputs / group; }
    constexpr std::size_t rows_of_numbers() const {
        return numbers == Numbers::none ? 0 : groups() * (minima ? 2 : 1);
    }
    constexpr std::size_t number_bytes() const {
        const std::size_t bits = numbers == Numbers::of_4 ? 4 : numbers == Numbers::of_6 ? 6 : 8;
        return rows_of_numbers() * PANEL * bits / 8;
    }
    // of 16 inputs of a panel
    constexpr std::size_t code_bytes() const {
        return (one < 0 ? 0 : 64) + (two < 0 ? 0 : 128) + (nibbles ? 256 : 0) + (as_bytes ? 512 : 0);
    }
};

// What a code of 4 bits stands for in IQ4_NL and IQ4_XS, and 128 more: no code is below 0.
constexpr std::uint8_t IQ4[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};

constexpr BlockForm block_form(Format format) {
    switch (format) {
        case Format::q4_0:
            return {32, 18, 32, 8, false, Numbers::none, 0, true, false, -1, -1, false};
        case Format::q4_1:
            return {32, 20, 32, 0, true, Numbers::none, 0, true, false, -1, -1, false};
        case Format::q5_0:
            return {32, 22, 32, 16, false, Numbers::none, 0, true, false, -1, 4, false};
        case Format::q5_1:
            return {32, 24, 32, 0, true, Numbers::none, 0, true, false, -1, 4, false};
        case Format::q8_0:
            return {32, 34, 32, 128, false, Numbers::none, 0, false, true, -1, -1, false};
        case Format::q2_k:
            return {256, 84, 16, 0, true, Numbers::of_4, 0, false, false, 0, -1, false};
        case Format::q3_k:
            return {256, 110, 16, 4, false, Numbers::of_6, 32, false, false, 0, 2, false};
        case Format::q4_k:
            return {256, 144, 32, 0, true, Numbers::of_6, 0, true, false, -1, -1, false};
        case Format::q5_k:
            return {256, 176, 32, 0, true, Numbers::of_6, 0, true, false, -1, 4, false};
        case Format::q6_k:
            return {256, 210, 16, 32, false, Numbers::of_8, 0, true, false, 4, -1, false};
        case Format::iq4_nl:
            return {32, 18, 32, 128, false, Numbers::none, 0, true, false, -1, -1, true};
        case Format::iq4_xs:
            return {256, 136, 32, 128, false, Numbers::of_6, 32, true, false, -1, -1, true};
        default:
            return {1, 0, 1, 0, false, Numbers::none, 0, false, false, -1, -1, false};
    }
}

// That each form has as many bytes in a panel as in the file.
constexpr bool as_large_as_stored(Format format) {
    const BlockForm form = block_form(format);
    return 64 * (form.minima ? 2 : 1) + form.number_bytes() + form.inputs / 16 * form.code_bytes() == PANEL * form.bytes;
}
static_assert(as_large_as_stored(Format::q4_0) && as_large_as_stored(Format::q4_1) &&
              as_large_as_stored(Format::q5_0) && as_large_as_stored(Format::q5_1) &&
              as_large_as_stored(Format::q8_0) && as_large_as_stored(Format::q2_k) &&
              as_large_as_stored(Format::q3_k) && as_large_as_stored(Format::q4_k) &&
              as_large_as_stored(Format::q5_k) && as_large_as_stored(Format::q6_k) &&
              as_large_as_stored(Format::iq4_nl) && as_large_as_stored(Format::iq4_xs));

}  // namespace engine_cpu
