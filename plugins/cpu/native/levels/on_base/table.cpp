// A level that multiplies by packed weights in a way of its own (`packed`); all its other kernels are the level's below.
#include "levels/table.h"

namespace engine_cpu {

namespace ENGINE_CPU_BASE {
const Kernels& table();
}

namespace ENGINE_CPU_LEVEL {

const Kernels& table() {
    static const Kernels kernels = [] {
        Kernels all = ENGINE_CPU_BASE::table();
        all.packed = packed;
        all.packed_all = packed_all;
        return all;
    }();
    return kernels;
}

}  // namespace ENGINE_CPU_LEVEL
}  // namespace engine_cpu
