// Drawing tokens: against the same numbers in double precision, up to rounding where a number falls between two tokens.
#include "sampling.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "check.h"

namespace self_test {
namespace {

using engine_cpu::Logits;
using engine_cpu::SamplingScratch;

struct Filter {
    float temperature;
    std::int32_t top_k;
    float top_p, min_p;
};
constexpr Filter FILTERS[] = {{0, 0, 1, 0},       {1, 0, 1, 0},      {0.3f, 0, 1, 0},    {1, 1, 1, 0},    {1, 40, 1, 0},
                              {2.5f, 10, 1, 0},   {1, 0, 0.9f, 0},   {0.7f, 0, 0.3f, 0}, {1, 0, 1, 0.1f}, {1, 50, 0.8f, 0},
                              {1, 30, 0.9f, 0.05f}, {30, 0, 0.95f, 0}};

// Whether `token` is the one that u draws from `weights`, which are filtered, up to `slack` of their sum.
bool drawn(const std::vector<double>& weights, std::size_t token, double u, double slack) {
    const double total = std::accumulate(weights.begin(), weights.end(), 0.0);
    const double before = std::accumulate(weights.begin(), weights.begin() + static_cast<std::ptrdiff_t>(token), 0.0);
    return weights[token] > 0 && u * total >= before - slack * total && u * total <= before + weights[token] + slack * total;
}

// What the filter leaves of softmax(x / temperature), with `more` added to top_p.
std::vector<double> filtered(const float* x, std::size_t n, const Filter& filter, double more) {
    const double top = *std::max_element(x, x + n);
    std::vector<double> weights(n);
    for (std::size_t i = 0; i < n; ++i) weights[i] = std::exp((static_cast<double>(x[i]) - top) / static_cast<double>(filter.temperature));
    std::vector<std::size_t> order(n);
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::stable_sort(order.begin(), order.end(), [x](std::size_t a, std::size_t b) { return x[a] > x[b]; });
    if (filter.top_k > 0 && static_cast<std::size_t>(filter.top_k) < n) {
        const float least = x[order[static_cast<std::size_t>(filter.top_k) - 1]];
        for (std::size_t i = 0; i < n; ++i) weights[i] = x[i] >= least ? weights[i] : 0;
    }
    for (double& weight : weights) weight = weight >= static_cast<double>(filter.min_p) ? weight : 0;
    if (filter.top_p < 1) {
        const double goal = std::accumulate(weights.begin(), weights.end(), 0.0) * (static_cast<double>(filter.top_p) + more);
        double running = 0;
        for (const std::size_t i : order) {
            const bool reached = running >= goal;
            running += weights[i];
            if (reached) weights[i] = 0;
        }
    }
    return weights;
}

void test_sample(const Kernels& kernels, DType dtype, std::size_t vocab, Random& random) {
    constexpr std::size_t ROWS = 12;
    const std::size_t stride = vocab + 3;
    Array logits(dtype, ROWS * stride);
    for (const Filter& filter : FILTERS) {
        for (std::size_t row = 0; row < ROWS; ++row)
            for (std::size_t i = 0; i < vocab; ++i) logits.set(row * stride + i, 3 * random.normal());
        const std::vector<float> temperature(ROWS, filter.temperature), top_p(ROWS, filter.top_p), min_p(ROWS, filter.min_p);
        const std::vector<std::int32_t> top_k(ROWS, filter.top_k);
        std::int64_t seed[ROWS], position[ROWS];
        for (std::size_t row = 0; row < ROWS; ++row) {
            seed[row] = static_cast<std::int64_t>(random.bits() >> 1);
            position[row] = static_cast<std::int64_t>(random.below(5000));
        }
        std::int32_t tokens[ROWS], again[ROWS];
        std::uint8_t broken[ROWS];
        SamplingScratch scratch(2);
        const auto draw = [&](std::size_t rows, std::int32_t* out, int threads) {
            kernels.sample({dtype, logits.data(), stride, rows, vocab, temperature.data(), top_k.data(), top_p.data(),
                            min_p.data(), seed, position, out, broken}, scratch, threads);
        };
        draw(ROWS, tokens, 2);
        expect(std::count(broken, broken + ROWS, 0) == ROWS, "sample: numbers taken for NaN");
        draw(5, again, 1);
        expect(std::equal(again, again + 5, tokens), "sample: rows depend on the others");
        const double last = logits[3 * stride + vocab - 1];
        logits.set(3 * stride + vocab - 1, NAN);
        draw(5, again, 1);
        expect(broken[3] == 1 && again[3] >= 0 && static_cast<std::size_t>(again[3]) < vocab, "sample: NaN not seen");
        logits.set(3 * stride + vocab - 1, last);
        for (std::size_t row = 0; row < ROWS; ++row) {
            std::vector<float> numbers(vocab);
            for (std::size_t i = 0; i < vocab; ++i) numbers[i] = static_cast<float>(logits[row * stride + i]);
            const float* x = numbers.data();
            const auto token = static_cast<std::size_t>(tokens[row]);
            expect(token < vocab, "sample: token %zu of %zu", token, vocab);
            if (token >= vocab) continue;
            if (filter.temperature == 0) {
                expect(x + token == std::max_element(x, x + vocab), "sample: not the largest logit");
                continue;
            }
            const double u = engine_cpu::uniform(seed[row], position[row], 0);
            bool right = false;
            for (const double more : {0.0, 1e-5, -1e-5})
                right = right || drawn(filtered(x, vocab, filter, more), token, u, 1e-5);
            expect(right, "sample: token %zu of %zu, temperature %g, top_k %d, top_p %g, min_p %g", token, vocab,
                   static_cast<double>(filter.temperature), filter.top_k, static_cast<double>(filter.top_p),
                   static_cast<double>(filter.min_p));
        }
    }
    expect(logits.intact(), "sample wrote into the logits' ends");
}

void test_logprobs(const Kernels& kernels, std::size_t vocab, Random& random) {
    constexpr std::size_t ROWS = 5;
    const std::size_t stride = vocab + 1, k = std::min<std::size_t>(vocab, 6);
    Array logits(DType::float32, ROWS * stride, random, 3), chosen(DType::float32, ROWS), values(DType::float32, ROWS * k);
    for (std::size_t i = 0; i + 1 < vocab; i += 9) logits.set(i + 1, logits[i]);  // equals: the lower id comes first
    std::int64_t tokens[ROWS];
    for (std::int64_t& token : tokens) token = static_cast<std::int64_t>(random.below(vocab));
    std::int32_t rank[ROWS];
    std::vector<std::int32_t> ids(ROWS * k);
    SamplingScratch scratch(1);
    kernels.logprobs({{static_cast<float*>(logits.data()), stride, ROWS, vocab}, tokens, k, static_cast<float*>(chosen.data()),
                      rank, ids.data(), static_cast<float*>(values.data())}, scratch, 1);
    for (std::size_t row = 0; row < ROWS; ++row) {
        const auto at = [&](std::size_t i) { return logits[row * stride + i]; };
        double total = 0;
        for (std::size_t i = 0; i < vocab; ++i) total += std::exp(at(i));
        total = std::log(total);
        const double mine = at(static_cast<std::size_t>(tokens[row]));
        expect(close(chosen[row], mine - total, 1e-5), "logprobs: %g, not %g", chosen[row], mine - total);
        std::int32_t larger = 1;
        for (std::size_t i = 0; i < vocab; ++i) larger += at(i) > mine;
        expect(rank[row] == larger, "logprobs: rank %d, not %d", rank[row], larger);
        std::vector<std::int32_t> order(vocab);
        std::iota(order.begin(), order.end(), 0);
        std::stable_sort(order.begin(), order.end(), [&](std::int32_t a, std::int32_t b) {
            return at(static_cast<std::size_t>(a)) > at(static_cast<std::size_t>(b));
        });
        for (std::size_t i = 0; i < k; ++i) {
            expect(ids[row * k + i] == order[i], "logprobs: %zu-th token %d, not %d", i, ids[row * k + i], order[i]);
            expect(close(values[row * k + i], at(static_cast<std::size_t>(order[i])) - total, 1e-5), "logprobs: value");
        }
    }
    expect(chosen.intact() && values.intact(), "logprobs wrote beyond its end");
}

void test_edits(const Kernels& kernels, std::size_t vocab, Random& random) {
    constexpr std::size_t ROWS = 3, COUNT = 2, KNOWN = 20;
    const std::size_t words = (vocab + 31) / 32;
    Array logits(DType::float32, ROWS * vocab, random);
    const Array before = logits;
    const std::int64_t rows[COUNT] = {2, 0};
    std::int32_t tokens[COUNT * KNOWN];
    for (std::int32_t& token : tokens) token = static_cast<std::int32_t>(random.below(vocab));
    const std::int32_t prompt[COUNT] = {7, 20}, known[COUNT] = {20, 20};
    const float presence[COUNT] = {0.5f, -1}, frequency[COUNT] = {0.25f, 0}, repetition[COUNT] = {1.5f, 0.5f};
    SamplingScratch scratch(1);
    const Logits all{static_cast<float*>(logits.data()), vocab, ROWS, vocab};
    kernels.penalties({all, rows, COUNT, tokens, KNOWN, prompt, known, presence, frequency, repetition}, scratch, 1);
    for (std::size_t i = 0; i < logits.size(); ++i) {
        const std::size_t row = i / vocab;
        double expected = before[i];
        for (std::size_t n = 0; n < COUNT; ++n) {
            if (rows[n] != static_cast<std::int64_t>(row)) continue;
            const std::int32_t *first = tokens + n * KNOWN, *last = first + KNOWN;
            const auto out = std::count(first + prompt[n], last, static_cast<std::int32_t>(i % vocab));
            if (std::find(first, last, static_cast<std::int32_t>(i % vocab)) == last) continue;
            expected = expected > 0 ? expected / static_cast<double>(repetition[n]) : expected * static_cast<double>(repetition[n]);
            if (out) expected -= static_cast<double>(frequency[n]) * static_cast<double>(out) + static_cast<double>(presence[n]);
        }
        expect(close(logits[i], expected, 1e-6), "penalties: %g, not %g", logits[i], expected);
    }
    std::vector<std::int32_t> bits(COUNT * (words + 1), -1);
    for (std::size_t i = 0; i < words; ++i) bits[i] = static_cast<std::int32_t>(random.bits());
    for (std::size_t i = 0; i < words; ++i) bits[words + 1 + i] = 0;  // nothing is allowed: what is not, stays possible
    const Array then = logits;
    kernels.apply_bitmask({all, rows, COUNT, bits.data(), words + 1}, 1);
    for (std::size_t i = 0; i < vocab; ++i) {
        const bool allowed = static_cast<std::uint32_t>(bits[i / 32]) >> i % 32 & 1;
        expect(logits[2 * vocab + i] == (allowed ? then[2 * vocab + i] : -INFINITY), "apply_bitmask: token %zu", i);
        expect(logits[i] == 0 && logits[vocab + i] == then[vocab + i], "apply_bitmask: another row, token %zu", i);
    }
    expect(logits.intact(), "an edit of logits wrote beyond its end");
}

}  // namespace

void test_sampling(const Kernels& kernels) {
    Random random(4);
    for (const std::size_t vocab : {65, 1037, 5003}) {
        for (const DType dtype : {DType::float32, DType::bfloat16}) test_sample(kernels, dtype, vocab, random);
        test_logprobs(kernels, vocab, random);
        test_edits(kernels, vocab, random);
    }
}

}  // namespace self_test
