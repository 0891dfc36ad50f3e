// Which instructions this processor has, and the kernels compiled for each level of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "elementwise.h"
#include "layout.h"

namespace engine_cpu {

enum class DType : int { float64, float32, bfloat16, float16, int64, int32, int8, uint8, float8 };  // float8: e4m3fn

std::size_t size_of(DType dtype);

// What the kernels below work on. Strides and sizes count elements; the last dimension is dense. float32 and bfloat16.

// out [rows, outputs] = x [rows, inputs] @ weight.T + bias, with the weight as layout.h says. x and out have one dtype: the
// format's own, or float32 or bfloat16 where it is neither. A row's bits do not depend on the rows beside it.
struct Packed {
    Layout layout;
    DType dtype;
    const void* x;
    std::size_t x_stride, rows;
    const void* weight;
    const float* scales;  // int8's [panels * 32]; of codes4 and values4 what codes stand for, [16]; else null
    const float* bias;    // [panels * 32], or null
    void* out;
    void* scratch;  // layout.scratch_bytes(rows)
    const std::int32_t* order = nullptr;  // of stored codes, [inputs]: which input of x comes where; null: as they stand
    std::size_t out_stride = 0;           // from a row of out to the next; 0: they lie side by side
};

// out [rows, heads, size], dense, = x [rows, heads, size] / rms * weight [size]
struct Norm {
    const void* x;
    std::size_t row_stride, head_stride, rows, heads, size;
    const void* weight;
    void* out;
    float eps;
};

// residual += x; x = norm of residual. Both [rows, size], dense.
struct AddNorm {
    void* x;
    void* residual;
    std::size_t rows, size;
    const void* weight;
    float eps;
};

// Rotates the first rotary_dim elements of every head of x [rows, heads, ...] in two halves, in place.
struct Rope {
    void* x;
    std::size_t row_stride, head_stride, rows, heads, rotary_dim;
    const std::int64_t* positions;  // [rows]
    const float* cos_sin;           // [positions, rotary_dim]
};

// out [rows, size], dense, = silu(gate) * up of gate_up [rows, 2 * size]
struct SiluMul {
    const void* gate_up;
    std::size_t row_stride, rows, size;
    void* out;
};

// Attention's arguments and what it computes in: attention.h.
struct AttentionForward;
struct AttentionWrite;
class AttentionScratch;

// Sampling's: sampling.h.
struct Sample;
struct Logprobs;
struct Penalties;
struct Bitmask;
class SamplingScratch;

// Mixtures of experts': experts.h.
struct RouterLogits;
struct Route;
struct GatedAct;
struct RowGate;
struct Combine;

// Of layers that keep states: states.h.
struct CausalConv;
struct Ssd;
struct SelectiveScan;
struct GatedDelta;
struct GatedNorm;
struct GateBy;

// The kernels of one level. A level holds every one of them: what it has no instructions for, it computes plainly.
struct Kernels {
    // dst[i] = src[0][i] + ... + src[n - 1][i], added in that order; 16-bit floats in float32, rounded once.
    void (*sum)(DType dtype, void* dst, const void* const* src, int n, std::size_t count);
    void (*packed)(const Packed& arguments, int threads);
    void (*norm)(DType dtype, const Norm& arguments, int threads);
    void (*add_norm)(DType dtype, const AddNorm& arguments, int threads);
    void (*rope)(DType dtype, const Rope& arguments, int threads);
    void (*silu_mul)(DType dtype, const SiluMul& arguments, int threads);
    void (*elementwise)(DType dtype, const Elementwise& arguments, int threads);
    void (*layer_norm)(DType dtype, const LayerNorm& arguments, int threads);
    void (*check_logits)(DType dtype, const CheckLogits& arguments, int threads);
    void (*attention)(const AttentionForward& arguments, AttentionScratch& scratch, int threads);
    void (*attention_write)(const AttentionWrite& arguments, int threads);
    void (*sample)(const Sample& arguments, SamplingScratch& scratch, int threads);
    void (*logprobs)(const Logprobs& arguments, SamplingScratch& scratch, int threads);
    void (*penalties)(const Penalties& arguments, SamplingScratch& scratch, int threads);
    void (*apply_bitmask)(const Bitmask& arguments, int threads);
    void (*router_logits)(DType dtype, const RouterLogits& arguments, int threads);
    void (*route)(const Route& arguments, int threads);
    void (*gated_act)(DType dtype, const GatedAct& arguments, int threads);
    void (*row_gate)(DType dtype, const RowGate& arguments, int threads);
    void (*combine)(DType dtype, const Combine& arguments, int threads);
    void (*causal_conv)(DType dtype, const CausalConv& arguments, int threads);
    void (*ssd)(DType dtype, const Ssd& arguments, int threads);
    void (*selective_scan)(DType dtype, const SelectiveScan& arguments, int threads);
    void (*gated_delta)(DType dtype, const GatedDelta& arguments, int threads);
    void (*gated_norm)(DType dtype, const GatedNorm& arguments, int threads);
    void (*gate_by)(DType dtype, const GateBy& arguments, int threads);
    // `packed` of several products of one layout and dtype, whose rows are few: each weight is read once, and threads wait
    // for each other once. Returns false, having done nothing, for a format that this level computes one by one.
    bool (*packed_all)(const Packed* all, std::size_t count, int threads);
};

// The levels that are compiled in and that this processor can run, lowest first.
std::vector<std::string> levels();

// The kernels of a level by name; "auto" is the highest. Throws std::invalid_argument.
const Kernels& kernels(const std::string& level);

}  // namespace engine_cpu
