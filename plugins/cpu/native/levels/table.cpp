#include "levels/table.h"

namespace engine_cpu::ENGINE_CPU_LEVEL {

const Kernels& table() {
    static const Kernels kernels{
        sum, packed, norm, add_norm, rope, silu_mul, elementwise, layer_norm, check_logits, attention,
        attention_write, sample, logprobs, penalties, apply_bitmask, router_logits, route, gated_act, row_gate,
        combine, causal_conv, ssd, selective_scan, gated_delta, gated_norm, gate_by, packed_all};
    return kernels;
}

}  // namespace engine_cpu::ENGINE_CPU_LEVEL
