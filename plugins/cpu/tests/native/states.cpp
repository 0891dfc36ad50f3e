// Layers that keep states, token by token: rows that begin anew and that go on, states in place and after several tokens.
#include "states.h"

#include <algorithm>
#include <cmath>

#include "check.h"

namespace self_test {
namespace {

using engine_cpu::StatePlaces;

constexpr std::size_t ROWS = 3, TOKENS = 7, PAGES = 6, MARKS = 4;
constexpr std::int32_t STARTS[ROWS + 1] = {0, 1, 5, 7};
constexpr std::int64_t READ[ROWS] = {2, 4, -1}, KEPT_AT[MARKS] = {0, 2, 4, 6}, KEPT_TO[MARKS] = {2, 4, 0, 5};
constexpr std::int64_t DECODE_TO[ROWS] = {2, 1, 5};

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }
double silu(double x) { return x * sigmoid(x); }
double softplus(double x) { return std::max(x, 0.0) + std::log1p(std::exp(-std::fabs(x))); }

// A state in pages that lie apart, and the same numbers in double precision, for a step of several tokens a row or of one.
struct Pages {
    Pages(DType dtype, std::size_t size, bool decodes, Random& random)
        : size(size), stride(size + 3), decodes(decodes), pool(dtype, PAGES * (size + 3), random), before(pool) {}
    StatePlaces places() {
        if (decodes) return {pool.data(), stride, READ, ROWS, nullptr, pool.data(), stride, nullptr, DECODE_TO, ROWS};
        return {pool.data(), stride, READ, ROWS, STARTS, pool.data(), stride, KEPT_AT, KEPT_TO, MARKS};
    }
    // Calls step(token, state) for each token, and looks for each state where it is to be.
    template <typename Step>
    void check(const char* what, Step&& step) {
        std::vector<double> state(size);
        std::vector<bool> written(PAGES);
        for (std::size_t row = 0; row < ROWS; ++row) {
            for (std::size_t i = 0; i < size; ++i)
                state[i] = READ[row] < 0 ? 0 : before[static_cast<std::size_t>(READ[row]) * stride + i];
            const auto begin = decodes ? row : static_cast<std::size_t>(STARTS[row]);
            const auto end = decodes ? row + 1 : static_cast<std::size_t>(STARTS[row + 1]);
            for (std::size_t token = begin; token < end; ++token) {
                step(token, state);
                for (std::size_t mark = 0; mark < (decodes ? ROWS : MARKS); ++mark) {
                    if (decodes ? mark != row : KEPT_AT[mark] != static_cast<std::int64_t>(token)) continue;
                    const auto page = static_cast<std::size_t>(decodes ? DECODE_TO[mark] : KEPT_TO[mark]);
                    written[page] = true;
                    for (std::size_t i = 0; i < size; ++i)
                        expect(close(pool[page * stride + i], state[i], 2e-5 * (1 + std::fabs(state[i]))),
                               "%s: state %zu after token %zu is %.9g, not %.9g", what, i, token, pool[page * stride + i],
                               state[i]);
                }
            }
        }
        for (std::size_t i = 0; i < pool.size(); ++i)
            expect((written[i / stride] && i % stride < size) || pool[i] == before[i], "%s changed element %zu", what, i);
        expect(pool.intact(), "%s wrote in front of the pool", what);
    }
    std::size_t size, stride;
    bool decodes;
    Array pool, before;
};

void check_results(const char* what, Array& out, const std::vector<double>& expected) {
    for (std::size_t i = 0; i < expected.size(); ++i)
        expect(close(out[i], expected[i], precision(out.dtype()) / 2 * std::fabs(expected[i]) + 3e-5 * (1 + std::fabs(expected[i]))),
               "%s %s: element %zu is %.9g, not %.9g", what, name_of(out.dtype()), i, out[i], expected[i]);
    expect(out.intact(), "%s wrote in front of its results", what);
}

void test_conv(const Kernels& kernels, DType dtype, std::size_t channels, bool decodes, Random& random) {
    constexpr std::size_t KERNEL = 4;
    const std::size_t tokens = decodes ? ROWS : TOKENS, stride = channels + 5;
    Array x(dtype, tokens * stride, random), weight(dtype, KERNEL * stride, random), bias(dtype, channels, random);
    Array out(dtype, tokens * channels);
    Pages pages(dtype, (KERNEL - 1) * channels, decodes, random);
    kernels.causal_conv(dtype, {x.data(), stride, channels, KERNEL, weight.data(), stride, bias.data(), out.data(), pages.places()}, 2);
    std::vector<double> expected(tokens * channels);
    pages.check("causal_conv", [&](std::size_t t, std::vector<double>& past) {
        for (std::size_t c = 0; c < channels; ++c) {
            double sum = bias[c] + weight[(KERNEL - 1) * stride + c] * x[t * stride + c];
            for (std::size_t k = 0; k + 1 < KERNEL; ++k) sum += weight[k * stride + c] * past[k * channels + c];
            expected[t * channels + c] = silu(sum);
            for (std::size_t k = 0; k + 2 < KERNEL; ++k) past[k * channels + c] = past[(k + 1) * channels + c];
            past[(KERNEL - 2) * channels + c] = x[t * stride + c];
        }
    });
    check_results("causal_conv", out, expected);
}

void test_ssd(const Kernels& kernels, DType dtype, std::size_t size, bool decodes, Random& random) {
    constexpr std::size_t HEADS = 4, GROUPS = 2, STATE = 5;
    constexpr double LOW = 0.125, HIGH = 2;
    const std::size_t tokens = decodes ? ROWS : TOKENS;
    Array x(dtype, tokens * HEADS * size, random), dt(dtype, tokens * HEADS, random);
    Array b(dtype, tokens * GROUPS * STATE, random), c(dtype, tokens * GROUPS * STATE, random), out(dtype, x.size());
    Array a(DType::float32, HEADS), d(DType::float32, HEADS, random), bias(DType::float32, HEADS, random);
    for (std::size_t i = 0; i < HEADS; ++i) a.set(i, -random.uniform());
    Pages pages(DType::float32, HEADS * STATE * size, decodes, random);
    const auto number = [](Array& x) { return static_cast<const float*>(x.data()); };
    kernels.ssd(dtype,
                {x.data(), HEADS * size, HEADS, size, dt.data(), HEADS, b.data(), GROUPS * STATE, c.data(), GROUPS * STATE,
                 GROUPS, STATE, number(a), number(d), number(bias), static_cast<float>(LOW), static_cast<float>(HIGH),
                 out.data(), pages.places()},
                2);
    std::vector<double> expected(x.size());
    pages.check("ssd", [&](std::size_t t, std::vector<double>& state) {
        for (std::size_t head = 0; head < HEADS; ++head) {
            const double step = std::min(std::max(softplus(dt[t * HEADS + head] + bias[head]), LOW), HIGH);
            for (std::size_t p = 0; p < size; ++p) {
                const std::size_t at = (t * HEADS + head) * size + p;
                expected[at] = d[head] * x[at];
                for (std::size_t n = 0; n < STATE; ++n) {
                    const std::size_t of = (t * GROUPS + head / (HEADS / GROUPS)) * STATE + n;
                    double& s = state[(head * STATE + n) * size + p];
                    s = s * std::exp(step * a[head]) + step * x[at] * b[of];
                    expected[at] += s * c[of];
                }
            }
        }
    });
    check_results("ssd", out, expected);
}

void test_scan(const Kernels& kernels, DType dtype, std::size_t channels, bool decodes, Random& random) {
    constexpr std::size_t STATE = 5;
    const std::size_t tokens = decodes ? ROWS : TOKENS;
    Array x(dtype, tokens * channels, random), dt(dtype, x.size(), random, 4), gate(dtype, x.size(), random, 40);
    Array b(dtype, tokens * STATE, random), c(dtype, tokens * STATE, random), out(dtype, x.size());
    Array a(DType::float32, STATE * channels), d(DType::float32, channels, random);
    for (std::size_t i = 0; i < a.size(); ++i) a.set(i, -2 * random.uniform());
    Pages pages(DType::float32, STATE * channels, decodes, random);
    kernels.selective_scan(dtype,
                           {x.data(), channels, channels, dt.data(), channels, gate.data(), channels, b.data(), STATE,
                            c.data(), STATE, STATE, static_cast<const float*>(a.data()),
                            static_cast<const float*>(d.data()), out.data(), pages.places()},
                           2);
    std::vector<double> expected(x.size());
    pages.check("selective_scan", [&](std::size_t t, std::vector<double>& state) {
        for (std::size_t i = 0; i < channels; ++i) {
            const double step = softplus(dt[t * channels + i]);
            double y = d[i] * x[t * channels + i];
            for (std::size_t n = 0; n < STATE; ++n) {
                double& s = state[n * channels + i];
                s = s * std::exp(step * a[n * channels + i]) + step * x[t * channels + i] * b[t * STATE + n];
                y += s * c[t * STATE + n];
            }
            expected[t * channels + i] = y * silu(gate[t * channels + i]);
        }
    });
    for (std::size_t i = 0; i < expected.size(); ++i)
        expect(close(out[i], expected[i],
                     precision(dtype) / 2 * std::fabs(expected[i]) + 1e-4 * (1 + std::fabs(gate[i])) * (1 + std::fabs(x[i]))),
               "selective_scan %s: element %zu is %.9g, not %.9g", name_of(dtype), i, out[i], expected[i]);
    expect(out.intact(), "selective_scan wrote in front of its results");
}

void test_delta(const Kernels& kernels, DType dtype, std::size_t size, bool decodes, Random& random) {
    constexpr std::size_t KEY_HEADS = 2, HEADS = 4, KEY = 5;
    const std::size_t tokens = decodes ? ROWS : TOKENS, width = KEY_HEADS * KEY;
    Array q(dtype, tokens * width, random), k(dtype, tokens * width, random), v(dtype, tokens * HEADS * size, random);
    Array dt(dtype, tokens * HEADS, random), beta(dtype, tokens * HEADS, random), out(dtype, v.size());
    Array a(DType::float32, HEADS), bias(DType::float32, HEADS, random);
    for (std::size_t i = 0; i < HEADS; ++i) a.set(i, -random.uniform());
    Pages pages(DType::float32, HEADS * KEY * size, decodes, random);
    kernels.gated_delta(dtype,
                        {q.data(), width, k.data(), width, KEY_HEADS, KEY, v.data(), HEADS * size, HEADS, size, dt.data(),
                         HEADS, beta.data(), HEADS, static_cast<const float*>(a.data()),
                         static_cast<const float*>(bias.data()), out.data(), pages.places()},
                        2);
    std::vector<double> expected(v.size());
    pages.check("gated_delta", [&](std::size_t t, std::vector<double>& state) {
        for (std::size_t head = 0; head < HEADS; ++head) {
            const std::size_t of = t * width + head / (HEADS / KEY_HEADS) * KEY;
            double q_square = 1e-6, k_square = 1e-6;
            for (std::size_t i = 0; i < KEY; ++i) {
                q_square += q[of + i] * q[of + i];
                k_square += k[of + i] * k[of + i];
            }
            const double fade = std::exp(softplus(dt[t * HEADS + head] + bias[head]) * a[head]);
            for (std::size_t p = 0; p < size; ++p) {
                const std::size_t at = (t * HEADS + head) * size + p;
                double wrong = v[at], y = 0;
                for (std::size_t i = 0; i < KEY; ++i)
                    wrong -= k[of + i] / std::sqrt(k_square) * fade * state[(head * KEY + i) * size + p];
                for (std::size_t i = 0; i < KEY; ++i) {
                    double& s = state[(head * KEY + i) * size + p];
                    s = fade * s + k[of + i] / std::sqrt(k_square) * sigmoid(beta[t * HEADS + head]) * wrong;
                    y += q[of + i] / std::sqrt(q_square * KEY) * s;
                }
                expected[at] = y;
            }
        }
    });
    check_results("gated_delta", out, expected);
}

void test_gates(const Kernels& kernels, DType dtype, std::size_t size, Random& random) {
    constexpr std::size_t ROWS = 3;
    const std::size_t stride = 2 * size + 3;
    Array x(dtype, ROWS * stride, random), gate(dtype, ROWS * stride, random, 3), weight(dtype, 2 * size, random);
    Array out(dtype, ROWS * size), normed(dtype, ROWS * 2 * size), squares(DType::float32, ROWS);
    for (const auto what : {engine_cpu::Gate::sigmoid, engine_cpu::Gate::silu}) {
        kernels.gate_by(dtype, {what, x.data(), stride, gate.data(), stride, ROWS, size, out.data()}, 1);
        std::vector<double> expected(ROWS * size);
        for (std::size_t i = 0; i < expected.size(); ++i) {
            const double g = gate[i / size * stride + i % size];
            expected[i] = x[i / size * stride + i % size] * (what == engine_cpu::Gate::silu ? silu(g) : sigmoid(g));
        }
        check_results("gate_by", out, expected);
    }
    for (const bool last : {false, true})
        for (const bool divided : {false, true}) {
            const std::size_t of = divided ? 2 * size : size;
            auto* sums = divided ? static_cast<float*>(squares.data()) : nullptr;
            for (const bool given : {false, true})
                if (divided || !given)
                    kernels.gated_norm(dtype,
                                       {x.data(), stride, gate.data(), stride, ROWS, 2 * size, of, weight.data(), 1e-3f,
                                        last, given, sums, normed.data()},
                                       1);
            for (std::size_t i = 0; i < normed.size(); ++i) {
                const std::size_t row = i / (2 * size) * stride, within = i % (2 * size), first = within / of * of;
                const auto value = [&](std::size_t j) { return x[row + j] * (last ? 1 : silu(gate[row + j])); };
                double square = 0;
                for (std::size_t j = first; j < first + of; ++j) square += value(j) * value(j);
                const double found = value(within) / std::sqrt(square / static_cast<double>(of) + 1e-3) * weight[within];
                const double expected = last ? found * silu(gate[row + within]) : found;
                expect(close(normed[i], expected, 1.5 * precision(dtype) * std::fabs(expected) + 1e-5),
                       "gated_norm %s: element %zu is %.9g, not %.9g", name_of(dtype), i, normed[i], expected);
            }
            expect(normed.intact() && squares.intact(), "gated_norm wrote in front of its results");
        }
}

}  // namespace

void test_states(const Kernels& kernels) {
    Random random(5);
    for (const DType dtype : {DType::float32, DType::bfloat16})
        for (const std::size_t size : {1, 7, 31, 64, 93}) {
            for (const bool decodes : {false, true}) {
                test_ssd(kernels, dtype, size, decodes, random);
                test_scan(kernels, dtype, size, decodes, random);
                test_delta(kernels, dtype, size, decodes, random);
                test_conv(kernels, dtype, 3 * size, decodes, random);
            }
            test_gates(kernels, dtype, size, random);
        }
}

}  // namespace self_test
