// Mixtures of experts: who computes which token, what stands around the products, and a whole layer beside its parts.
#include "experts.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "check.h"
#include "packing.h"

namespace self_test {
namespace {

using namespace engine_cpu;

constexpr DType DTYPES[] = {DType::float32, DType::bfloat16};
constexpr std::size_t ROWS = 19, APART = 3;  // numbers between one row and the next, all of them NaN

// Rows of `size` numbers, `APART` more from one to the next.
struct Rows {
    std::size_t size, stride;
    Array x;

    Rows(DType dtype, std::size_t rows, std::size_t size, Random& random, double scale = 1.0)
        : size(size), stride(size + APART), x(dtype, rows * stride - APART) {
        for (std::size_t row = 0; row < rows; ++row)
            for (std::size_t i = 0; i < size; ++i) x.set(row * stride + i, random.normal() * scale);
    }
    double at(std::size_t row, std::size_t i) const { return x[row * stride + i]; }
};

double sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }

template <typename T>
struct Numbers {
    std::size_t count;
    Memory memory;

    explicit Numbers(std::size_t count) : count(count), memory(count * sizeof(T)) {}
    T* data() { return memory.data<T>(); }
};

void check_router(const Kernels& kernels, Random& random) {
    for (const DType dtype : DTYPES)
        for (const std::size_t size : {1, 31, 64, 203})
            for (const std::size_t experts : {1, 7, 8, 17}) {
                Rows x(dtype, ROWS, size, random);
                Array weight(DType::float32, experts * size, random), out(DType::float32, ROWS * experts);
                kernels.router_logits(dtype, {x.x.data(), x.stride, ROWS, size, experts,
                                              static_cast<float*>(weight.data()), static_cast<float*>(out.data())}, 2);
                expect(out.intact(), "logits of %zu experts wrote beyond their end", experts);
                for (std::size_t i = 0; i < out.size(); ++i) {
                    double sum = 0, terms = 0;
                    for (std::size_t j = 0; j < size; ++j) {
                        const double term = x.at(i / experts, j) * weight[i % experts * size + j];
                        sum += term;
                        terms += std::fabs(term);
                    }
                    expect(close(out[i], sum, 1e-6 * terms), "%s logit %zu of %zu, %zu inputs: %.9g, not %.9g",
                           name_of(dtype), i % experts, experts, size, out[i], sum);
                }
            }
}

// The experts of a row and their weights, the best first, as engine_kit.routing says.
struct Chosen {
    std::vector<std::size_t> ids;
    std::vector<double> weights;
};

Chosen choose(const Route& a, const float* logits) {
    std::vector<double> scores(a.experts), choice;
    for (std::size_t e = 0; e < a.experts; ++e) scores[e] = logits[e] + (a.bias && a.biased_logits ? a.bias[e] : 0.0f);
    const std::vector<double> plain = scores;
    const auto best = [](const std::vector<double>& of) {
        return static_cast<std::size_t>(std::max_element(of.begin(), of.end()) - of.begin());
    };
    Chosen found;
    if (a.one_by_one) {
        for (std::size_t i = 0; i < a.top_k; ++i) {
            const std::size_t id = best(scores);
            double sum = 0;
            for (std::size_t e = 0; e < a.experts; ++e)
                if ((scores[id] - plain[e]) / std::max(std::fabs(plain[e]), scores[id]) <= 2 * a.jitter)
                    sum += std::exp(scores[e] - scores[id]);
            found.ids.push_back(id);
            found.weights.push_back(1 / sum);
            scores[id] = -INFINITY;
        }
        return found;
    }
    const double most = plain[best(plain)];
    double sum = 0;
    for (double& score : scores) {
        score = a.sigmoid ? sigmoid(score) : std::exp(score - most);
        sum += score;
    }
    for (double& score : scores) score /= a.sigmoid ? 1.0 : sum;
    choice = scores;
    if (a.bias && !a.biased_logits)
        for (std::size_t e = 0; e < a.experts; ++e) choice[e] += a.bias[e];
    if (a.top_groups < a.groups) {
        const std::size_t size = a.experts / a.groups;
        std::vector<double> of_group(a.groups);
        for (std::size_t g = 0; g < a.groups; ++g) {
            std::vector<double> own(choice.begin() + g * size, choice.begin() + (g + 1) * size);
            std::sort(own.rbegin(), own.rend());
            of_group[g] = own[0] + (a.pairs ? own[1] : 0.0);
        }
        std::vector<bool> open(a.groups, false);
        for (std::size_t i = 0; i < a.top_groups; ++i) {
            open[best(of_group)] = true;
            of_group[best(of_group)] = -INFINITY;
        }
        for (std::size_t e = 0; e < a.experts; ++e)
            if (!open[e / size]) choice[e] = -INFINITY;
    }
    double total = 0;
    for (std::size_t i = 0; i < a.top_k; ++i) {
        const std::size_t id = best(choice);
        found.ids.push_back(id);
        found.weights.push_back(scores[id]);
        total += scores[id];
        choice[id] = -INFINITY;
    }
    for (double& weight : found.weights) weight *= a.renormalise ? a.scale / total : a.scale;
    return found;
}

void check_route(const Kernels& kernels, Random& random) {
    for (unsigned form = 0; form < 128; ++form) {
        const bool one_by_one = form & 64, biased = form & 1;
        Route a{};
        a.rows = ROWS;
        a.experts = form & 2 ? 24 : 8;
        a.top_k = form & 4 ? 4 : 1;
        a.groups = form & 8 ? 4 : 1;
        a.top_groups = form & 8 ? 2 : 1;
        a.sigmoid = form & 16;
        a.renormalise = form & 32;
        a.pairs = a.groups > 1 && form & 32;
        a.one_by_one = one_by_one;
        a.biased_logits = form & 16;
        a.scale = 2.5f;
        a.jitter = 0.2f;
        if (one_by_one) a.groups = a.top_groups = 1;
        Array logits(DType::float32, ROWS * a.experts, random), bias(DType::float32, a.experts, random, 0.3);
        Numbers<std::int32_t> ids(ROWS * a.top_k);
        Array weights(DType::float32, ROWS * a.top_k);
        a.logits = static_cast<float*>(logits.data());
        a.bias = biased ? static_cast<float*>(bias.data()) : nullptr;
        a.ids = ids.data();
        a.weights = static_cast<float*>(weights.data());
        kernels.route(a, 2);
        expect(ids.memory.intact() && weights.intact(), "routing of form %u wrote beyond its end", form);
        for (std::size_t row = 0; row < ROWS; ++row) {
            const Chosen right = choose(a, a.logits + row * a.experts);
            for (std::size_t i = 0; i < a.top_k; ++i) {
                const std::size_t at = row * a.top_k + i;
                expect(static_cast<std::size_t>(ids.data()[at]) == right.ids[i],
                       "form %u, row %zu, place %zu: expert %d, not %zu", form, row, i, ids.data()[at], right.ids[i]);
                expect(close(weights[at], right.weights[i], 4e-6 * right.weights[i]),
                       "form %u, row %zu: weight %.9g, not %.9g", form, row, weights[at], right.weights[i]);
            }
        }
    }
}

double activated(Act act, double x, double alpha) {
    switch (act) {
        case Act::silu:
            return x * sigmoid(x);
        case Act::gelu:
            return 0.5 * x * (1 + std::erf(x / std::sqrt(2.0)));
        case Act::gelu_tanh:
            return 0.5 * x * (1 + std::tanh(std::sqrt(2 / std::acos(-1.0)) * (x + 0.044715 * x * x * x)));
        case Act::relu:
            return x > 0 ? x : 0.0;
        case Act::relu2:
            return x > 0 ? x * x : 0.0;
        case Act::clamped:
            return x * sigmoid(alpha * x);
    }
    return x;
}

void check_acts(const Kernels& kernels, Random& random) {
    for (const DType dtype : DTYPES)
        for (const Act act : {Act::silu, Act::gelu, Act::gelu_tanh, Act::relu, Act::relu2, Act::clamped})
            for (const bool gated : {false, true})
                for (const std::size_t size : {1, 15, 64, 101}) {
                    if (act == Act::clamped && !gated) continue;
                    Rows x(dtype, ROWS, gated ? 2 * size : size, random, 3.0);
                    Array out(dtype, ROWS * size);
                    kernels.gated_act(dtype, {act, gated, 1.5f, 2.0f, x.x.data(), x.stride, ROWS, size, out.data()}, 2);
                    expect(out.intact(), "act %d wrote beyond its end", static_cast<int>(act));
                    for (std::size_t i = 0; i < out.size(); ++i) {
                        double gate = x.at(i / size, i % size), up = gated ? x.at(i / size, size + i % size) : 1.0;
                        if (act == Act::clamped) {
                            gate = std::min(gate, 2.0);
                            up = std::max(-2.0, std::min(up, 2.0)) + 1;
                        }
                        const double right = activated(act, gate, 1.5) * up;
                        const double scale = (1 + std::fabs(gate)) * std::fabs(up);
                        const double error = 2e-6 * scale + precision(dtype) * std::fabs(right);
                        expect(close(out[i], right, error), "%s act %d of %.6g and %.6g: %.9g, not %.9g",
                               name_of(dtype), static_cast<int>(act), gate, up, out[i], right);
                    }
                }
}

void check_gates_and_sums(const Kernels& kernels, Random& random) {
    constexpr std::size_t PER_TOKEN = 3, TERMS = ROWS * PER_TOKEN;
    for (const DType dtype : DTYPES)
        for (const std::size_t size : {1, 63, 256, 261}) {
            Rows x(dtype, ROWS, size, random), gate(dtype, ROWS, 1, random);
            Array gated(dtype, ROWS * size), terms(dtype, TERMS * size, random), weights(DType::float32, TERMS, random);
            kernels.row_gate(dtype, {x.x.data(), x.stride, gate.x.data(), gate.stride, ROWS, size, gated.data()}, 2);
            Numbers<std::int32_t> places(TERMS);
            std::iota(places.data(), places.data() + TERMS, 0);
            for (std::size_t i = TERMS; i > 1; --i) std::swap(places.data()[i - 1], places.data()[random.below(i)]);
            places.data()[4] = places.data()[9] = -1;
            Array sums(dtype, ROWS * size);
            kernels.combine(dtype, {terms.data(), places.data(), static_cast<float*>(weights.data()), ROWS, PER_TOKEN,
                                    size, sums.data()}, 2);
            expect(gated.intact() && sums.intact(), "gates or sums of %zu wrote beyond their end", size);
            for (std::size_t i = 0; i < ROWS * size; ++i) {
                const std::size_t row = i / size;
                const double right = x.at(row, i % size) * sigmoid(gate.at(row, 0));
                expect(close(gated[i], right, (2e-6 + precision(dtype)) * std::fabs(right)),
                       "%s gate: %.9g, not %.9g", name_of(dtype), gated[i], right);
                double sum = 0, whole = 0;
                for (std::size_t j = 0; j < PER_TOKEN; ++j) {
                    if (places.data()[row * PER_TOKEN + j] < 0) continue;
                    const auto place = static_cast<std::size_t>(places.data()[row * PER_TOKEN + j]);
                    const double term = weights[row * PER_TOKEN + j] * terms[place * size + i % size];
                    sum += term;
                    whole += std::fabs(term);
                }
                expect(close(sums[i], sum, 1e-6 * whole + precision(dtype) * std::fabs(sum)),
                       "%s sum: %.9g, not %.9g", name_of(dtype), sums[i], sum);
            }
        }
}

// One projection of all experts, packed; each second has biases.
struct Matrices {
    Layout layout;
    std::vector<Memory> weights;
    std::vector<Array> scales, biases;
    std::vector<std::uintptr_t> weight_of, scale_of, bias_of, order_of;

    Matrices(const Layout& layout, std::size_t experts, Random& random) : layout(layout) {
        const DType stored = layout.format == Format::bfloat16 ? DType::bfloat16 : DType::float32;
        for (std::size_t e = 0; e < experts; ++e) {
            Array plain(stored, layout.outputs * layout.inputs, random, 0.3);
            weights.emplace_back(layout.bytes());
            scales.emplace_back(DType::float32, layout.panels() * PANEL);
            biases.emplace_back(DType::float32, layout.panels() * PANEL, random);
            pack(layout, stored, plain.data(), layout.inputs, weights.back().data(),
                 static_cast<float*>(scales.back().data()), 1);
        }
        for (std::size_t e = 0; e < experts; ++e) {
            weight_of.push_back(reinterpret_cast<std::uintptr_t>(weights[e].data()));
            scale_of.push_back(layout.format == Format::int8 ? reinterpret_cast<std::uintptr_t>(scales[e].data()) : 0);
            bias_of.push_back(e % 2 ? reinterpret_cast<std::uintptr_t>(biases[e].data()) : 0);
            order_of.push_back(0);
        }
    }
    ExpertMatrices given() const {
        return {layout, weight_of.data(), scale_of.data(), bias_of.data(), order_of.data()};
    }
    void multiply(const Kernels& kernels, DType dtype, std::size_t expert, const void* x, void* out) const {
        Memory scratch(layout.scratch_bytes(1));
        kernels.packed({layout, dtype, x, layout.inputs, 1, reinterpret_cast<const void*>(weight_of[expert]),
                        reinterpret_cast<const float*>(scale_of[expert]),
                        reinterpret_cast<const float*>(bias_of[expert]), out, scratch.data()}, 1);
    }
};

// A layer's tokens have the bits that each of them has alone, through the parts, whoever else goes to its experts.
void check_layers(const Kernels& kernels, Random& random) {
    constexpr std::size_t EXPERTS = 5, PER_TOKEN = 2, HIDDEN = 37, INNER = 41;
    for (const DType dtype : DTYPES)
        for (const Format format :
             {dtype == DType::float32 ? Format::float32 : Format::bfloat16, Format::int8, Format::int4})
            for (const std::size_t rows : {std::size_t{1}, std::size_t{2}, ROWS}) {
                const Matrices first({format, 2 * INNER, HIDDEN, 32}, EXPERTS, random);
                const Matrices last({format, HIDDEN, INNER, 32}, EXPERTS, random);
                Rows x(dtype, rows, HIDDEN, random);
                Numbers<std::int32_t> ids(rows * PER_TOKEN);
                for (std::size_t row = 0; row < rows; ++row) {  // nobody goes to the third
                    const std::size_t one = random.below(2), other = 3 + random.below(2);
                    ids.data()[row * PER_TOKEN] = static_cast<std::int32_t>(row % 2 ? one : other);
                    ids.data()[row * PER_TOKEN + 1] = static_cast<std::int32_t>(row % 2 ? other : one);
                    if (row % 4 == 2) ids.data()[row * PER_TOKEN] = EXPERTS;  // one that nobody here computes
                    if (row == 6 || rows == 1) ids.data()[row * PER_TOKEN + 1] = EXPERTS;
                }
                Array weights(DType::float32, rows * PER_TOKEN, random), out(dtype, rows * HIDDEN);
                Memory scratch(experts_scratch_bytes(first.layout, last.layout, EXPERTS, rows, PER_TOKEN, dtype));
                GatedAct act{};
                act.act = Act::silu;
                act.gated = true;
                experts(kernels, {dtype, first.given(), last.given(), act, EXPERTS, x.x.data(), x.stride, rows,
                                  PER_TOKEN, ids.data(), static_cast<float*>(weights.data()), out.data(),
                                  scratch.data()}, 2);
                expect(out.intact() && scratch.intact(), "experts of %zu rows wrote beyond their end", rows);
                Array right(dtype, rows * HIDDEN);
                for (std::size_t row = 0; row < rows; ++row) {
                    Array inner(dtype, 2 * INNER), acted(dtype, INNER), terms(dtype, PER_TOKEN * HIDDEN);
                    std::int32_t places[] = {0, 1};
                    for (std::size_t i = 0; i < PER_TOKEN; ++i) {
                        if (ids.data()[row * PER_TOKEN + i] == EXPERTS) {
                            places[i] = -1;
                            continue;
                        }
                        const auto expert = static_cast<std::size_t>(ids.data()[row * PER_TOKEN + i]);
                        first.multiply(kernels, dtype, expert, x.x.at(row * x.stride), inner.data());
                        act.x = inner.data();
                        act.x_stride = 2 * INNER;
                        act.rows = 1;
                        act.size = INNER;
                        act.out = acted.data();
                        kernels.gated_act(dtype, act, 1);
                        last.multiply(kernels, dtype, expert, acted.data(), terms.at(i * HIDDEN));
                    }
                    kernels.combine(dtype, {terms.data(), places, static_cast<float*>(weights.at(row * PER_TOKEN)), 1,
                                            PER_TOKEN, HIDDEN, right.at(row * HIDDEN)}, 1);
                }
                expect(out.same_bits(right, out.size()),
                       "%s experts of format %d, %zu rows: other bits than of each alone", name_of(dtype),
                       static_cast<int>(format), rows);
            }
}

// Replicas take turns, others are left out, and what is computed here is counted.
void check_places(Random& random) {
    constexpr std::size_t EXPERTS = 6, REPLICAS = 2, PER_TOKEN = 3, FIRST = 3, COUNT = 4;
    const std::int32_t table[EXPERTS * REPLICAS] = {0, 5, 1, 1, 2, 6, 3, 3, 7, 4, 8, 8};
    Numbers<std::int32_t> ids(ROWS * PER_TOKEN), out(ROWS * PER_TOKEN);
    Numbers<std::int64_t> load(COUNT);
    std::int64_t right[COUNT] = {};
    for (std::size_t i = 0; i < COUNT; ++i) right[i] = load.data()[i] = static_cast<std::int64_t>(i);
    for (std::size_t i = 0; i < ids.count; ++i) ids.data()[i] = static_cast<std::int32_t>(random.below(EXPERTS));
    place_experts({ids.data(), ROWS, PER_TOKEN, table, EXPERTS, REPLICAS, FIRST, COUNT, load.data(), out.data()});
    expect(out.memory.intact() && load.memory.intact(), "places of experts wrote beyond their end");
    for (std::size_t i = 0; i < ids.count; ++i) {
        const auto id = static_cast<std::size_t>(ids.data()[i]);
        const auto place = static_cast<std::size_t>(table[id * REPLICAS + i / PER_TOKEN % REPLICAS]);
        const bool here = place >= FIRST && place < FIRST + COUNT;
        if (here) ++right[place - FIRST];
        expect(static_cast<std::size_t>(out.data()[i]) == (here ? place - FIRST : COUNT), "expert %zu of row %zu is at %d",
               id, i / PER_TOKEN, out.data()[i]);
    }
    for (std::size_t i = 0; i < COUNT; ++i)
        expect(load.data()[i] == right[i], "place %zu counts %lld tokens, not %lld", i,
               static_cast<long long>(load.data()[i]), static_cast<long long>(right[i]));
}

}  // namespace

void test_experts(const Kernels& kernels) {
    Random random(11);
    check_router(kernels, random);
    check_route(kernels, random);
    check_acts(kernels, random);
    check_gates_and_sums(kernels, random);
    check_layers(kernels, random);
    check_places(random);
}

}  // namespace self_test
