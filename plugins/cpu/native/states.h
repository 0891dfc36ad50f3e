// Layers that keep states: convolutions and scans over the tokens of rows, and what stands around them. What is computed
// is defined by the operations of engine_states. T tokens; strides count elements, last dimensions are dense; x and what
// goes with it in float32 or bfloat16, states, rates and steps in float32.
//
// Scans are computed token after token, each column of a state for itself, with the columns in registers: a chunk's
// matrix products would need about as many operations, and a state's bits then depend on where rows were cut.
#pragma once

#include <cstddef>
#include <cstdint>

namespace engine_cpu {

// Where a step's rows find and leave one state. Pages, and the places of states that are left, lie strides apart.
struct StatePlaces {
    const void* pool;
    std::size_t pool_stride;
    const std::int64_t* read;             // [rows]: pages; negative: a row begins with zeros
    std::size_t rows;
    const std::int32_t* query_start_loc;  // [rows + 1]; null: each row has one token, and leaves a state after it
    void* kept;
    std::size_t kept_stride;
    const std::int64_t* kept_at;  // [count], ascending: the tokens after which states are left; null as above
    const std::int64_t* kept_to;  // [count]: their places
    std::size_t count;
};

// y[t] = silu(bias + sum over k of weight[k] * x[t - kernel + 1 + k]); the state is [kernel - 1, channels], in x's dtype
struct CausalConv {
    const void* x;
    std::size_t x_stride, channels, kernel;
    const void* weight;  // [kernel, channels]
    std::size_t weight_stride;
    const void* bias;  // [channels], or null
    void* out;         // [T, channels], dense
    StatePlaces places;
};

// Mamba-2's scan; the state is [heads, state, size]
struct Ssd {
    const void* x;  // [T, heads, size]
    std::size_t x_stride, heads, size;
    const void* dt;  // [T, heads]
    std::size_t dt_stride;
    const void* b;  // [T, groups, state]
    std::size_t b_stride;
    const void* c;
    std::size_t c_stride, groups, state;
    const float *a, *d, *dt_bias;  // [heads]
    float dt_low, dt_high;
    void* out;  // [T, heads, size], dense
    StatePlaces places;
};

// Mamba's scan; the state is [state, channels]
struct SelectiveScan {
    const void* x;  // [T, channels]
    std::size_t x_stride, channels;
    const void* dt;
    std::size_t dt_stride;
    const void* gate;
    std::size_t gate_stride;
    const void* b;  // [T, state]
    std::size_t b_stride;
    const void* c;
    std::size_t c_stride, state;
    const float* a;  // [state, channels]
    const float* d;  // [channels]
    void* out;       // [T, channels], dense
    StatePlaces places;
};

// The gated delta rule; the state is [heads, key_size, value_size]
struct GatedDelta {
    const void* q;  // [T, key_heads, key_size]
    std::size_t q_stride;
    const void* k;
    std::size_t k_stride, key_heads, key_size;
    const void* v;  // [T, heads, value_size]
    std::size_t v_stride, heads, value_size;
    const void* dt;  // [T, heads]
    std::size_t dt_stride;
    const void* beta;
    std::size_t beta_stride;
    const float *a, *dt_bias;  // [heads]
    void* out;                 // [T, heads, value_size], dense
    StatePlaces places;
};

// out [rows, channels], dense: x and silu(gate), of which each `size` elements are divided by the root of their mean
// square: of the product, or with gate_last of x alone. Over ranks, elements of a group that others have too: `squares`
// [rows] of what is here are written where nothing else is to be done, and are read, added up, where they are `given`.
struct GatedNorm {
    const void* x;
    std::size_t x_stride;
    const void* gate;
    std::size_t gate_stride, rows, channels, size;
    const void* weight;  // [channels]
    float eps;
    bool gate_last, given;
    float* squares;  // null where a group's elements are all here
    void* out;
};

enum class Gate : int { sigmoid, silu, gelu, gelu_tanh };

// out [rows, size], dense, = x * what(gate)
struct GateBy {
    Gate what;
    const void* x;
    std::size_t x_stride;
    const void* gate;
    std::size_t gate_stride, rows, size;
    void* out;
};

}  // namespace engine_cpu
