// What the sources of one level give each other.
#pragma once

#include "kernels.h"

namespace engine_cpu::ENGINE_CPU_LEVEL {

void sum(DType dtype, void* dst, const void* const* src, int n, std::size_t count);
void packed(const Packed& arguments, int threads);
bool packed_all(const Packed* all, std::size_t count, int threads);
void int8(const Packed& arguments, int threads);
void int4(const Packed& arguments, int threads);
void blocks(const Packed& arguments, int threads);  // float16 too
void codes(const Packed& arguments, int threads);
void norm(DType dtype, const Norm& arguments, int threads);
void add_norm(DType dtype, const AddNorm& arguments, int threads);
void rope(DType dtype, const Rope& arguments, int threads);
void silu_mul(DType dtype, const SiluMul& arguments, int threads);
void elementwise(DType dtype, const Elementwise& arguments, int threads);
void layer_norm(DType dtype, const LayerNorm& arguments, int threads);
void check_logits(DType dtype, const CheckLogits& arguments, int threads);
void attention(const AttentionForward& arguments, AttentionScratch& scratch, int threads);
void attention_write(const AttentionWrite& arguments, int threads);
void sample(const Sample& arguments, SamplingScratch& scratch, int threads);
void logprobs(const Logprobs& arguments, SamplingScratch& scratch, int threads);
void penalties(const Penalties& arguments, SamplingScratch& scratch, int threads);
void apply_bitmask(const Bitmask& arguments, int threads);
void router_logits(DType dtype, const RouterLogits& arguments, int threads);
void route(const Route& arguments, int threads);
void gated_act(DType dtype, const GatedAct& arguments, int threads);
void row_gate(DType dtype, const RowGate& arguments, int threads);
void combine(DType dtype, const Combine& arguments, int threads);
void causal_conv(DType dtype, const CausalConv& arguments, int threads);
void ssd(DType dtype, const Ssd& arguments, int threads);
void selective_scan(DType dtype, const SelectiveScan& arguments, int threads);
void gated_delta(DType dtype, const GatedDelta& arguments, int threads);
void gated_norm(DType dtype, const GatedNorm& arguments, int threads);
void gate_by(DType dtype, const GateBy& arguments, int threads);

}  // namespace engine_cpu::ENGINE_CPU_LEVEL
