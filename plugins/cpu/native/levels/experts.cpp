// Routing, and what stands around the products of experts. Plain loops that the compiler turns into this level's
// instructions.
#include "experts.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "levels/convert.h"
#include "levels/functions.h"
#include "levels/table.h"
#include "parallel.h"

namespace engine_cpu::ENGINE_CPU_LEVEL {
namespace {

constexpr std::size_t PIECE = 16384;  // elements that are worth a thread
constexpr float LOWEST = -std::numeric_limits<float>::infinity();
constexpr float SMALLEST = 1e-20f;  // of a sum that is divided by: sigmoids may all be 0

std::size_t rows_a_piece(std::size_t width) { return width >= PIECE ? 1 : PIECE / (width ? width : 1); }

float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }

// The sum of products in so many parts, which need no order among themselves: the compiler may not make them up.
constexpr std::size_t LANES = 32;
constexpr std::size_t SOME_EXPERTS = 8;  // for which a row is widened once

template <typename T>
void logits_of_rows(const RouterLogits& a, int threads) {
    const std::size_t blocks = (a.experts + SOME_EXPERTS - 1) / SOME_EXPERTS;
    const std::size_t piece = rows_a_piece(a.size * SOME_EXPERTS);
    parallel_for(threads, a.rows * blocks, piece, [&](std::size_t begin, std::size_t end) {
        std::vector<float> wide(a.size);
        std::size_t widened = a.rows;
        for (std::size_t index = begin; index < end; ++index) {
            const std::size_t row = index / blocks, first = index % blocks * SOME_EXPERTS;
            const T* x = static_cast<const T*>(a.x) + row * a.x_stride;
            if (row != widened)
                for (std::size_t i = 0; i < a.size; ++i) wide[i] = widen(x[i]);
            widened = row;
            for (std::size_t e = first; e < std::min(a.experts, first + SOME_EXPERTS); ++e) {
                const float* weight = a.weight + e * a.size;
                float parts[LANES] = {};
                std::size_t i = 0;
                for (; i + LANES <= a.size; i += LANES)
                    for (std::size_t j = 0; j < LANES; ++j) parts[j] += wide[i + j] * weight[i + j];
                float total = 0;
                for (; i < a.size; ++i) total += wide[i] * weight[i];
                for (const float part : parts) total += part;
                a.out[row * a.experts + e] = total;
            }
        }
    });
}

// The places of the `count` largest of values [size], the first among equals first. What is no number stands in nobody's
// way: whatever the values are, the places are `count` different ones.
void largest(const float* values, std::size_t size, std::size_t count, std::int32_t* places) {
    std::size_t found = 0;
    for (std::size_t i = 0; i < size; ++i) {
        if (found == count && !(values[i] > values[places[count - 1]])) continue;
        std::size_t at = found < count ? found++ : count - 1;
        for (; at > 0 && values[i] > values[places[at - 1]]; --at) places[at] = places[at - 1];
        places[at] = static_cast<std::int32_t>(i);
    }
}

// Room for one row after another.
struct RouteRow {
    std::vector<float> logits, scores, choice, best;
    std::vector<std::int32_t> groups;

    explicit RouteRow(const Route& a)
        : logits(a.experts), scores(a.experts), choice(a.experts), best(a.groups), groups(a.top_groups) {}
};

// Each is the best of those left, and weighs as much as a softmax over the near ones of them gives it.
void one_by_one(const Route& a, const float* logits, float* left, std::int32_t* ids, float* weights) {
    std::copy(logits, logits + a.experts, left);
    for (std::size_t place = 0; place < a.top_k; ++place) {
        std::int32_t chosen = 0;
        largest(left, a.experts, 1, &chosen);
        const float best = left[chosen];
        float sum = 0;
        for (std::size_t e = 0; e < a.experts; ++e) {
            const float size = std::fabs(logits[e]);
            const bool far = (best - logits[e]) / (size > best ? size : best) > 2 * a.jitter;
            sum += far ? 0.0f : exponential(left[e] - best);
        }
        ids[place] = chosen;
        weights[place] = 1.0f / sum;
        left[chosen] = LOWEST;
    }
}

void close_groups(const Route& a, RouteRow& row) {
    const std::size_t size = a.experts / a.groups;
    for (std::size_t g = 0; g < a.groups; ++g) {
        std::int32_t two[2] = {};
        const float* of = row.choice.data() + g * size;
        largest(of, size, a.pairs ? 2 : 1, two);
        row.best[g] = a.pairs ? of[two[0]] + of[two[1]] : of[two[0]];
    }
    largest(row.best.data(), a.groups, a.top_groups, row.groups.data());
    for (std::size_t g = 0; g < a.groups; ++g)
        if (std::find(row.groups.begin(), row.groups.end(), static_cast<std::int32_t>(g)) == row.groups.end())
            std::fill_n(row.choice.begin() + static_cast<std::ptrdiff_t>(g * size), size, LOWEST);
}

void route_row(const Route& a, RouteRow& row, const float* logits, std::int32_t* ids, float* weights) {
    const std::size_t count = a.experts;
    if (a.bias && a.biased_logits) {
        for (std::size_t e = 0; e < count; ++e) row.logits[e] = logits[e] + a.bias[e];
        logits = row.logits.data();
    }
    float* scores = row.scores.data();
    if (a.one_by_one) return one_by_one(a, logits, scores, ids, weights);
    if (a.sigmoid) {
        for (std::size_t e = 0; e < count; ++e) scores[e] = sigmoid(logits[e]);
    } else {
        float most = LOWEST, sum = 0;
        for (std::size_t e = 0; e < count; ++e) most = logits[e] > most ? logits[e] : most;
        for (std::size_t e = 0; e < count; ++e) scores[e] = exponential(logits[e] - most);
        for (std::size_t e = 0; e < count; ++e) sum += scores[e];
        for (std::size_t e = 0; e < count; ++e) scores[e] /= sum;
    }
    const bool biased = a.bias && !a.biased_logits;
    for (std::size_t e = 0; e < count; ++e) row.choice[e] = biased ? scores[e] + a.bias[e] : scores[e];
    if (a.top_groups < a.groups) close_groups(a, row);
    largest(row.choice.data(), count, a.top_k, ids);
    float sum = 0;
    for (std::size_t i = 0; i < a.top_k; ++i) sum += scores[ids[i]];
    const float factor = a.renormalise ? a.scale / (sum + SMALLEST) : a.scale;
    for (std::size_t i = 0; i < a.top_k; ++i) weights[i] = scores[ids[i]] * factor;
}

template <Act ACT>
float act(float x, float alpha) {
    switch (ACT) {
        case Act::silu:
            return x * sigmoid(x);
        case Act::gelu:
            return 0.5f * x * (1.0f + error_function(x * 0.70710678f));
        case Act::gelu_tanh:
            return 0.5f * x * (1.0f + hyperbolic_tangent(0.79788456f * (x + 0.044715f * x * x * x)));
        case Act::relu:
            return x > 0 ? x : 0.0f;
        case Act::relu2:
            return x > 0 ? x * x : 0.0f;
        case Act::clamped:
            return x * sigmoid(alpha * x);
    }
    return x;
}

template <typename T, Act ACT>
void act_rows(const GatedAct& a, int threads) {
    parallel_for(threads, a.rows, rows_a_piece(a.size), [&](std::size_t begin, std::size_t end) {
        for (std::size_t row = begin; row < end; ++row) {
            const T* gate = static_cast<const T*>(a.x) + row * a.x_stride;
            const T* up = gate + a.size;
            T* out = static_cast<T*>(a.out) + row * a.size;
            if (ACT == Act::clamped)
                for (std::size_t i = 0; i < a.size; ++i) {
                    const float g = std::min(widen(gate[i]), a.limit);
                    const float u = std::max(-a.limit, std::min(widen(up[i]), a.limit));
                    out[i] = narrow<T>((u + 1.0f) * act<ACT>(g, a.alpha));
                }
            else if (a.gated)
                for (std::size_t i = 0; i < a.size; ++i)
                    out[i] = narrow<T>(act<ACT>(widen(gate[i]), a.alpha) * widen(up[i]));
            else
                for (std::size_t i = 0; i < a.size; ++i) out[i] = narrow<T>(act<ACT>(widen(gate[i]), a.alpha));
        }
    });
}

template <typename T>
void acts(const GatedAct& a, int threads) {
    switch (a.act) {
        case Act::silu:
            return act_rows<T, Act::silu>(a, threads);
        case Act::gelu:
            return act_rows<T, Act::gelu>(a, threads);
        case Act::gelu_tanh:
            return act_rows<T, Act::gelu_tanh>(a, threads);
        case Act::relu:
            return act_rows<T, Act::relu>(a, threads);
        case Act::relu2:
            return act_rows<T, Act::relu2>(a, threads);
        case Act::clamped:
            return act_rows<T, Act::clamped>(a, threads);
    }
}

template <typename T>
void gate_rows(const RowGate& a, int threads) {
    parallel_for(threads, a.rows, rows_a_piece(a.size), [&](std::size_t begin, std::size_t end) {
        for (std::size_t row = begin; row < end; ++row) {
            const T* x = static_cast<const T*>(a.x) + row * a.x_stride;
            T* out = static_cast<T*>(a.out) + row * a.size;
            const float factor = sigmoid(widen(static_cast<const T*>(a.gate)[row * a.gate_stride]));
            for (std::size_t i = 0; i < a.size; ++i) out[i] = narrow<T>(widen(x[i]) * factor);
        }
    });
}

template <typename T>
void combine_rows(const Combine& a, int threads) {
    constexpr std::size_t BLOCK = 256;
    parallel_for(threads, a.rows, rows_a_piece(a.size * a.per_token), [&](std::size_t begin, std::size_t end) {
        for (std::size_t row = begin; row < end; ++row)
            for (std::size_t first = 0; first < a.size; first += BLOCK) {
                const std::size_t count = std::min(BLOCK, a.size - first);
                float sums[BLOCK] = {};
                for (std::size_t i = 0; i < a.per_token; ++i) {
                    if (a.places[row * a.per_token + i] < 0) continue;
                    const std::size_t place = static_cast<std::size_t>(a.places[row * a.per_token + i]);
                    const T* term = static_cast<const T*>(a.terms) + place * a.size + first;
                    const float weight = a.weights[row * a.per_token + i];
                    for (std::size_t j = 0; j < count; ++j) sums[j] += weight * widen(term[j]);
                }
                T* out = static_cast<T*>(a.out) + row * a.size + first;
                for (std::size_t j = 0; j < count; ++j) out[j] = narrow<T>(sums[j]);
            }
    });
}

}  // namespace

void router_logits(DType dtype, const RouterLogits& a, int threads) {
    dtype == DType::bfloat16 ? logits_of_rows<bf16>(a, threads) : logits_of_rows<float>(a, threads);
}
void route(const Route& a, int threads) {
    parallel_for(threads, a.rows, rows_a_piece(a.experts * 8), [&](std::size_t begin, std::size_t end) {
        RouteRow room(a);
        for (std::size_t row = begin; row < end; ++row)
            route_row(a, room, a.logits + row * a.experts, a.ids + row * a.top_k, a.weights + row * a.top_k);
    });
}
void gated_act(DType dtype, const GatedAct& a, int threads) {
    dtype == DType::bfloat16 ? acts<bf16>(a, threads) : acts<float>(a, threads);
}
void row_gate(DType dtype, const RowGate& a, int threads) {
    dtype == DType::bfloat16 ? gate_rows<bf16>(a, threads) : gate_rows<float>(a, threads);
}
void combine(DType dtype, const Combine& a, int threads) {
    dtype == DType::bfloat16 ? combine_rows<bf16>(a, threads) : combine_rows<float>(a, threads);
}

}  // namespace engine_cpu::ENGINE_CPU_LEVEL
