// VNNI multiplies bytes: weights of 8 and 4 bits and those in blocks are this level's
// own (levels/quantized.cpp, levels/blocks.cpp). All else is the level below's.
#include "levels/table.h"

namespace engine_cpu {

namespace ENGINE_CPU_BASE {
const Kernels& table();
}

namespace ENGINE_CPU_LEVEL {

void packed(const Packed& a, int threads) {
    if (a.layout.format == Format::int8)
        int8(a, threads);
    else if (a.layout.format == Format::int4)
        int4(a, threads);
    else if (a.layout.codes())
        codes(a, threads);
    else if (in_blocks(a.layout.format))
        blocks(a, threads);
    else
        ENGINE_CPU_BASE::table().packed(a, threads);
}

bool packed_all(const Packed* all, std::size_t count, int threads) {
    return ENGINE_CPU_BASE::table().packed_all(all, count, threads);
}

}  // namespace ENGINE_CPU_LEVEL
}  // namespace engine_cpu
