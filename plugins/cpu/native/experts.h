// Mixtures of experts: who computes which token, and what experts make of them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels.h"

namespace engine_cpu {

// out float32 [rows, experts], dense, = x [rows, size] @ weight.T; weight float32 [experts, size], dense.
struct RouterLogits {
    const void* x;
    std::size_t x_stride, rows, size, experts;
    const float* weight;
    float* out;
};

// ids and weights [rows, top_k] of logits [rows, experts], all dense, as engine_kit.routing.RouteForm says.
struct Route {
    const float* logits;
    std::size_t rows, experts;
    const float* bias;  // [experts] or null
    std::size_t top_k, groups, top_groups;
    bool sigmoid, renormalise, pairs, one_by_one, biased_logits;
    float scale, jitter;
    std::int32_t* ids;
    float* weights;
};

enum class Act : int { silu, gelu, gelu_tanh, relu, relu2, clamped };

// out [rows, size], dense, = act(gate) * up of x [rows, 2 * size], or act(x) of x [rows, size] without gates
struct GatedAct {
    Act act;
    bool gated;
    float alpha, limit;  // of clamped
    const void* x;
    std::size_t x_stride, rows, size;
    void* out;
};

// out [rows, size], dense, = x * sigmoid(gate [rows]); gate's rows are `gate_stride` apart
struct RowGate {
    const void* x;
    std::size_t x_stride;
    const void* gate;
    std::size_t gate_stride, rows, size;
    void* out;
};

// out[t] = sum over i of weights[t, i] * terms[places[t, i]], added in this order, without those whose place is negative;
// terms [.., size] and out [rows, size] dense, places and weights [rows, per_token].
struct Combine {
    const void* terms;
    const std::int32_t* places;
    const float* weights;
    std::size_t rows, per_token, size;
    void* out;
};

// A projection of all experts, packed: for each of them addresses, 0 where it has none.
struct ExpertMatrices {
    Layout layout;
    const std::uintptr_t* weights;  // [experts]
    const std::uintptr_t* scales;   // likewise, of int8; of stored codes their table
    const std::uintptr_t* biases;   // likewise
    const std::uintptr_t* orders = nullptr;  // likewise, of stored codes; null: of none
};

// One layer. out[t] = sum over i of weights[t, i] * last(act(first(x[t]))) by expert ids[t, i]; x and out have one dtype.
struct Experts {
    DType dtype;
    ExpertMatrices first, last;
    GatedAct act;  // its first four fields
    std::size_t experts;
    const void* x;
    std::size_t x_stride, rows, per_token;
    const std::int32_t* ids;  // [rows, per_token]; `experts`: of nobody, which adds nothing
    const float* weights;     // likewise
    void* out;                // [rows, outputs of last], dense
    void* scratch;            // experts_scratch_bytes
};

std::size_t experts_scratch_bytes(const Layout& first, const Layout& last, std::size_t experts, std::size_t rows,
                                  std::size_t per_token, DType dtype);

// Each expert that has tokens reads its weights once, for all of them. Throws std::out_of_range for an expert that there
// is not.
void experts(const Kernels& kernels, const Experts& arguments, int threads);

// Which of the places first .. first + count - 1 computes whom: out [rows, per_token] = place - first, or count where it
// is none of them. Expert e's token of row t is at table[e, t % replicas]. load[place] grows by the tokens that it gets.
struct PlaceExperts {
    const std::int32_t* ids;  // [rows, per_token]
    std::size_t rows, per_token;
    const std::int32_t* table;  // [experts, replicas]
    std::size_t experts, replicas;
    std::int32_t first;
    std::size_t count;
    std::int64_t* load;  // [count]
    std::int32_t* out;   // [rows, per_token]
};

// Throws std::out_of_range for an expert that there is not.
void place_experts(const PlaceExperts& arguments);

}  // namespace engine_cpu
