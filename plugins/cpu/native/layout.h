// Weights of linear layers laid out for the kernels of levels/packed.cpp, levels/quantized.cpp and levels/blocks.cpp, once,
// after loading.
//
// Outputs are divided into panels of 32, the last filled up with zeros, and a panel is read from its beginning to its
// end. It goes over the inputs unit by unit; a unit has 32 bits of each output:
//
//   float32    1 input                    float
//   bfloat16   2 inputs                   bfloat16, the earlier one in the lower half
//   float16    1 input, 16 bits           float16
//   int8       4 inputs                   one byte each: code + 128, in the order of inputs
//   int4       4 inputs, 16 bits each     64 bytes: byte 4 * lane + i has input i of output `lane` in its lower half and
//                                         that of output 16 + `lane` in its upper one: code + 8
//
// int8 has a float32 scale for each output. int4 has a float16 scale for each group of inputs, 32 of them in front of
// the units of a group. A code is the weight divided by its scale, rounded to nearest even, where the scale makes the
// weight farthest from zero -128 (or -8) exactly, as Q4_0 of ggml does; a code that would be 128 (or 8) is one less.
//
// The others are stored in blocks by ggml, and laid out as blocks.h says, in as many bits as they have in the file.
#pragma once

#include <cstddef>
#include <cstdint>

#include "blocks.h"

namespace engine_cpu {

// The sizes of a packed layer. `group_size` is int4's, a multiple of 4; int8 has one group, which is the row.
struct Layout {
    Format format;
    std::size_t outputs, inputs, group_size;

    std::size_t panels() const { return (outputs + PANEL - 1) / PANEL; }
    BlockForm block() const { return block_form(format); }
    std::size_t groups() const {
        if (in_blocks(format)) return inputs / block().group;
        return format == Format::int4 ? (inputs + group_size - 1) / group_size : 1;
    }
    // 32-bit units of a row of inputs, padding included
    std::size_t units() const {
        switch (format) {
            case Format::float32:
            case Format::float16:
                return inputs;
            case Format::bfloat16:
                return (inputs + 1) / 2;
            case Format::int8:
                return (inputs + 3) / 4;
            case Format::int4:
                return groups() * group_size / 4;
            default:  // in blocks
                return inputs / 4;
        }
    }
    bool quantized() const { return format == Format::int8 || format == Format::int4 || in_blocks(format); }
    std::size_t panel_bytes() const {
        if (in_blocks(format)) return inputs / block().inputs * PANEL * block().bytes;
        if (format == Format::float16) return units() * PANEL * 2;
        return format == Format::int4 ? groups() * PANEL * 2 + units() * 64 : units() * PANEL * 4;
    }
    std::size_t bytes() const { return panels() * panel_bytes(); }
    // What the kernels need for so many rows: their units, of bfloat16 as floats, and for quantised rows a scale and an
    // offset for each group.
    std::size_t scratch_bytes(std::size_t rows) const {
        return rows * (units() * (format == Format::bfloat16 ? 8 : 4) + (quantized() ? groups() * 8 : 0));
    }
};

}  // namespace engine_cpu
