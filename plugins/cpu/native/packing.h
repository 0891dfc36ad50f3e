// Puts weights into the layout of layout.h.
#pragma once

#include <cstddef>

#include "kernels.h"

namespace engine_cpu {

// Lays out weight [outputs, inputs] of dtype float32 or bfloat16 (for the formats of these names: of the same), whose
// rows are `stride` elements apart, into `packed` [layout.bytes()]; int8 fills scales [panels * 32] too. On so many
// threads.
void pack(const Layout& layout, DType dtype, const void* weight, std::size_t stride, void* packed, float* scales,
          int threads);

// The same of weights [outputs] of blocks, whose rows are `stride` bytes apart. Throws std::invalid_argument where the layout
// is another's, or its inputs are no whole blocks.
void pack_blocks(const Layout& layout, const void* weight, std::size_t stride, void* packed, int threads);

// Lays out codes that a checkpoint stores: codes [outputs, inputs], one byte each, of formats codes4 .. values8 and of int8
// (whose scales stay where they are); scales [outputs, groups] of layout.scale; zeros [outputs, groups] of whole numbers.
// All dense.
void pack_codes(const Layout& layout, const std::uint8_t* codes, const void* scales, const std::uint8_t* zeros,
                std::uint8_t* packed, int threads);

}  // namespace engine_cpu
