// Puts weights into the layout of layout.h, and takes rows out of it.
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

// out [count, inputs], dense, = rows index[i] - first of a packed layer of float32, bfloat16, float16 or blocks, in float32
// or bfloat16, as ggml's package works them out.
struct LookUp {
    Layout layout;
    DType dtype;  // of out
    const void* weight;
    const void* index;  // int32 or int64 [count]
    bool wide;          // int64
    std::size_t count;
    std::int64_t first;
    bool part;  // an index outside gives zeros; else it is an error
    void* out;
};

// Throws std::out_of_range, and std::invalid_argument for another format or dtype.
void look_up(const LookUp& arguments, int threads);

}  // namespace engine_cpu
