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
// Codes that a checkpoint stores keep their bits (levels/codes.cpp). In front of the units of each group of inputs stand 32
// scales of the dtype `scale`; with whole numbers, 32 bytes follow: the code that stands for zero.
//
//   codes4, codes8     whole numbers, in units as those of int4 and int8; a weight is scale * (code - zero). codes4 may
//                      stand for other whole numbers below 256 by a table
//   values4            as codes4, each standing for a float of a table of 16; a weight is scale * value
//   values8            as codes8, each an 8-bit float (e4m3)
//
// The others are stored in blocks by ggml, and laid out as blocks.h says, in as many bits as they have in the file.
#pragma once

#include <cstddef>
#include <cstdint>

#include "blocks.h"

namespace engine_cpu {

enum class ScaleType : int { float32, float16, bfloat16 };

// The sizes of a packed layer. `group_size`, a multiple of 4, is int4's and that of stored codes; others have one group,
// which is the row.
struct Layout {
    Format format;
    std::size_t outputs, inputs, group_size;
    ScaleType scale = ScaleType::float32;

    bool codes() const { return format >= Format::codes4 && format <= Format::values8; }
    bool whole_numbers() const { return format == Format::codes4 || format == Format::codes8; }
    bool nibbles() const { return format == Format::int4 || format == Format::codes4 || format == Format::values4; }
    bool grouped() const { return format == Format::int4 || codes(); }
    // bytes in front of a group
    std::size_t scale_bytes() const {
        if (!codes()) return PANEL * 2;
        return PANEL * ((scale == ScaleType::float32 ? 4 : 2) + (whole_numbers() ? 1 : 0));
    }

    std::size_t panels() const { return (outputs + PANEL - 1) / PANEL; }
    BlockForm block() const { return block_form(format); }
    std::size_t groups() const {
        if (in_blocks(format)) return inputs / block().group;
        return grouped() ? (inputs + group_size - 1) / group_size : 1;
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
            default:
                return in_blocks(format) ? inputs / 4 : groups() * group_size / 4;
        }
    }
    bool quantized() const {
        return format == Format::int8 || format == Format::int4 || whole_numbers() || in_blocks(format);
    }
    std::size_t panel_bytes() const {
        if (in_blocks(format)) return inputs / block().inputs * PANEL * block().bytes;
        if (format == Format::float16) return units() * PANEL * 2;
        return (grouped() ? groups() * scale_bytes() : 0) + units() * PANEL * (nibbles() ? 2 : 4);
    }
    std::size_t bytes() const { return panels() * panel_bytes(); }
    // What the kernels need for so many rows: their units, of bfloat16 as floats and of bytes as 16 bits each at most, and for
    // quantised rows a scale and an offset for each group.
    std::size_t scratch_bytes(std::size_t rows) const {
        const std::size_t unit = codes() && !quantized() ? 16 : format == Format::bfloat16 || quantized() ? 8 : 4;
        return rows * (units() * unit + (quantized() ? groups() * 8 : 0));
    }
};

}  // namespace engine_cpu
