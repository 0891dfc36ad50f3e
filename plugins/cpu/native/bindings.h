// The parts of the Python module, each bound in a file bind_X.cpp of its own. Tensors come as addresses and sizes: the
// callers in engine_cpu check what they point at. Whatever computes goes through tape::run.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>

namespace engine_cpu {

template <typename T = void>
T* at(std::uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

using unlocked = nanobind::call_guard<nanobind::gil_scoped_release>;

void bind_attention(nanobind::module_& m);
void bind_experts(nanobind::module_& m);
void bind_lora(nanobind::module_& m);
void bind_ops(nanobind::module_& m);
void bind_packed(nanobind::module_& m);
void bind_parallel(nanobind::module_& m);
void bind_rows(nanobind::module_& m);
void bind_sampling(nanobind::module_& m);
void bind_shm(nanobind::module_& m);
void bind_states(nanobind::module_& m);
void bind_tape(nanobind::module_& m);

}  // namespace engine_cpu
