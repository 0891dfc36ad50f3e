// What Python sees.
#include "bindings.h"

NB_MODULE(_native, m) {
    engine_cpu::bind_tape(m);
    engine_cpu::bind_ops(m);
    engine_cpu::bind_packed(m);
    engine_cpu::bind_parallel(m);
    engine_cpu::bind_rows(m);
    engine_cpu::bind_shm(m);
    engine_cpu::bind_attention(m);
    engine_cpu::bind_sampling(m);
    engine_cpu::bind_experts(m);
    engine_cpu::bind_lora(m);
    engine_cpu::bind_states(m);
}
