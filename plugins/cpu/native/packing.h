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

}  // namespace engine_cpu
