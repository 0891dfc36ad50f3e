// What lies between the matrices: norms, rotary positions, activations, sums over ranks.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "check.h"

namespace self_test {
namespace {

using engine_cpu::Element;

constexpr DType DTYPES[] = {DType::float32, DType::bfloat16};
constexpr std::size_t SIZES[] = {1, 7, 31, 64, 96, 203};

// `steps` roundings of the result, beside an error that is relative to `scale`.
void check(const char* what, const Array& found, std::size_t i, double expected, double steps, double scale) {
    const double error = precision(found.dtype()) * steps * std::fabs(expected) + 3e-6 * scale;
    expect(close(found[i], expected, error), "%s %s: element %zu is %.9g, not %.9g", what, name_of(found.dtype()), i, found[i],
           expected);
}

// Rounded twice, with a factor that is a float's.
void check_norm(const char* what, const Array& found, std::size_t i, double expected) {
    check(what, found, i, expected, 1, std::fabs(expected) / 4);
}

double inverse_rms(const Array& x, std::size_t begin, std::size_t size, double eps) {
    double sum = 0;
    for (std::size_t i = begin; i < begin + size; ++i) sum += x[i] * x[i];
    return 1 / std::sqrt(sum / static_cast<double>(size) + eps);
}

void test_norms(const Kernels& kernels, DType dtype, std::size_t size, Random& random) {
    constexpr std::size_t ROWS = 5, HEADS = 3;
    const std::size_t head = size + 2, row = HEADS * head + 5;
    Array x(dtype, ROWS * row, random, 3), weight(dtype, size, random), out(dtype, ROWS * HEADS * size);
    kernels.norm(dtype, {x.data(), row, head, ROWS, HEADS, size, weight.data(), out.data(), 1e-5f}, 2);
    for (std::size_t i = 0; i < ROWS * HEADS; ++i) {
        const std::size_t at = i / HEADS * row + i % HEADS * head;
        const double factor = inverse_rms(x, at, size, 1e-5f);
        for (std::size_t j = 0; j < size; ++j) check_norm("norm", out, i * size + j, x[at + j] * factor * weight[j]);
    }
    expect(out.intact(), "norm wrote beyond its end");

    Array dense(dtype, ROWS * size, random), residual(dtype, ROWS * size, random), total(dtype, ROWS * size);
    for (std::size_t i = 0; i < total.size(); ++i)
        total.set(i, dtype == DType::float32 ? static_cast<float>(dense[i]) + static_cast<float>(residual[i])
                                             : dense[i] + residual[i]);
    kernels.add_norm(dtype, {dense.data(), residual.data(), ROWS, size, weight.data(), 1e-6f}, 1);
    for (std::size_t i = 0; i < total.size(); ++i) {
        expect(residual[i] == total[i], "add_norm: residual %g, not %g", residual[i], total[i]);
        check_norm("add_norm", dense, i, total[i] * inverse_rms(total, i / size * size, size, 1e-6f) * weight[i % size]);
    }
    expect(dense.intact() && residual.intact(), "add_norm wrote beyond its end");

    Array bias(dtype, size, random), mean_out(dtype, ROWS * size);
    kernels.layer_norm(dtype, {total.data(), ROWS, size, weight.data(), bias.data(), mean_out.data(), 1e-5f}, 1);
    for (std::size_t r = 0; r < ROWS; ++r) {
        double mean = 0, variance = 0, largest = 0;
        for (std::size_t j = 0; j < size; ++j) mean += total[r * size + j] / static_cast<double>(size);
        for (std::size_t j = 0; j < size; ++j) {
            const double away = total[r * size + j] - mean;
            variance += away * away / static_cast<double>(size);
            largest = std::max(largest, std::fabs(total[r * size + j]));
        }
        const double factor = 1 / std::sqrt(variance + static_cast<double>(1e-5f));
        for (std::size_t j = 0; j < size; ++j)
            check("layer_norm", mean_out, r * size + j, (total[r * size + j] - mean) * factor * weight[j] + bias[j], 0.5,
                  1 + largest * factor * std::fabs(weight[j]));
    }
    expect(mean_out.intact(), "layer_norm wrote beyond its end");
}

void test_rope(const Kernels& kernels, DType dtype, std::size_t rotary, Random& random) {
    constexpr std::size_t ROWS = 5, HEADS = 3, POSITIONS = 40;
    const std::size_t head = rotary + 3, row = HEADS * head + 1;
    Array table(DType::float32, POSITIONS * rotary), x(dtype, ROWS * row, random);
    for (std::size_t p = 0; p < POSITIONS; ++p)
        for (std::size_t i = 0; i < rotary / 2; ++i) {
            const double angle = 6 * random.uniform();
            table.set(p * rotary + i, std::cos(angle));
            table.set(p * rotary + rotary / 2 + i, std::sin(angle));
        }
    const std::int64_t positions[ROWS] = {0, 39, 7, 7, 30};
    const Array before = x;
    kernels.rope(dtype, {x.data(), row, head, ROWS, HEADS, rotary, positions, static_cast<float*>(table.data())}, 1);
    for (std::size_t i = 0; i < x.size(); ++i) {
        const std::size_t within = i % row % head, start = i - within;
        if (i % row / head >= HEADS || within >= rotary) {
            expect(x[i] == before[i], "rope changed element %zu, which is none of its own", i);
            continue;
        }
        const std::size_t half = rotary / 2, pair = within % half;
        const std::size_t angle = static_cast<std::size_t>(positions[i / row]) * rotary + pair;
        const double p = before[start + pair], q = before[start + half + pair], c = table[angle], s = table[angle + half];
        check("rope", x, i, within < half ? p * c - q * s : q * c + p * s, 0.5, 0.1 * (std::fabs(p) + std::fabs(q)));
    }
    expect(x.intact(), "rope wrote beyond its end");
}

void test_elements(const Kernels& kernels, DType dtype, std::size_t size, Random& random) {
    constexpr std::size_t ROWS = 3;
    const std::size_t stride = 2 * size + 3;
    Array gate_up(dtype, ROWS * stride, random, 4), out(dtype, ROWS * size);
    kernels.silu_mul(dtype, {gate_up.data(), stride, ROWS, size, out.data()}, 1);
    for (std::size_t i = 0; i < out.size(); ++i) {
        const double gate = gate_up[i / size * stride + i % size], up = gate_up[i / size * stride + size + i % size];
        check("silu_mul", out, i, gate / (1 + std::exp(-gate)) * up, 0.5, 0.3 * std::fabs(gate * up));
    }
    expect(out.intact(), "silu_mul wrote beyond its end");

    Array x(dtype, size, random, 3), y(dtype, size, random), found(dtype, size);
    const auto run = [&](Element what, float factor) {
        kernels.elementwise(dtype, {what, x.data(), y.data(), factor, size, found.data()}, 1);
        expect(found.intact(), "an elementwise kernel wrote beyond its end");
    };
    run(Element::add, 0);
    for (std::size_t i = 0; i < size; ++i) check("add", found, i, x[i] + y[i], 0.5, 1e-3);
    run(Element::scale, 0.3f);
    for (std::size_t i = 0; i < size; ++i) check("scale", found, i, x[i] * static_cast<double>(0.3f), 0.5, 0);
    run(Element::soft_cap, 2.5f);
    for (std::size_t i = 0; i < size; ++i) check("soft_cap", found, i, std::tanh(x[i] / 2.5) * 2.5, 0.5, 0.3);
    run(Element::relu, 0);
    for (std::size_t i = 0; i < size; ++i) check("relu", found, i, std::max(x[i], 0.0), 0.5, 0);
    run(Element::relu_squared, 0);
    for (std::size_t i = 0; i < size; ++i) check("relu squared", found, i, std::pow(std::max(x[i], 0.0), 2), 0.5, 0);
    run(Element::gelu, 0);
    for (std::size_t i = 0; i < size; ++i)
        check("gelu", found, i, x[i] * 0.5 * (1 + std::erf(x[i] * std::sqrt(0.5))), 0.5, std::fabs(x[i]));
    run(Element::gelu_tanh, 0);
    for (std::size_t i = 0; i < size; ++i)
        check("gelu_tanh", found, i,
              x[i] * 0.5 * (1 + std::tanh(std::sqrt(2 / M_PI) * (x[i] + 0.044715 * x[i] * x[i] * x[i]))), 0.5,
              std::fabs(x[i]));
}

void test_logits(const Kernels& kernels, DType dtype, Random& random) {
    constexpr std::size_t ROWS = 4, SIZE = 203, STRIDE = 210;
    Array x(dtype, ROWS * STRIDE, random), out(DType::float32, ROWS * SIZE);
    x.set(2 * STRIDE + 202, NAN);
    x.set(1 * STRIDE + 5, -INFINITY);
    std::uint8_t broken[ROWS] = {9, 9, 9, 9};
    kernels.check_logits(dtype, {x.data(), STRIDE, ROWS, SIZE, static_cast<float*>(out.data()), broken}, 2);
    for (std::size_t i = 0; i < out.size(); ++i) {
        const double expected = x[i / SIZE * STRIDE + i % SIZE];
        expect(out[i] == expected || (std::isnan(out[i]) && std::isnan(expected)), "check_logits changed element %zu", i);
    }
    for (std::size_t row = 0; row < ROWS; ++row) expect(broken[row] == (row == 2), "check_logits: row %zu", row);
}

// In order of ranks, and so the same bits everywhere.
void test_sum(const Kernels& kernels, const Kernels& scalar, Random& random) {
    constexpr std::size_t COUNT = 1100, RANKS = 3;
    for (const DType dtype : {DType::float64, DType::float32, DType::bfloat16, DType::float16, DType::int64, DType::int32,
                              DType::int8, DType::uint8}) {
        const std::size_t bytes = COUNT * engine_cpu::size_of(dtype);
        std::vector<Memory> parts(RANKS, Memory(bytes));
        const void* sources[RANKS];
        for (std::size_t rank = 0; rank < RANKS; ++rank) {
            auto* to = parts[rank].data<std::uint8_t>();
            for (std::size_t i = 0; i < bytes; ++i) to[i] = static_cast<std::uint8_t>(random.bits());
            // infinities and NaN, which need not have one pattern, are left out
            if (dtype == DType::float16)
                for (std::size_t i = 1; i < bytes; i += 2) to[i] &= 0xbf;
            if (dtype == DType::bfloat16)
                for (std::size_t i = 1; i < bytes; i += 2) to[i] &= 0xbf;
            if (dtype == DType::float32)
                for (std::size_t i = 3; i < bytes; i += 4) to[i] &= 0xbf;
            if (dtype == DType::float64)
                for (std::size_t i = 7; i < bytes; i += 8) to[i] &= 0xbf;
            sources[rank] = to;
        }
        Memory found(bytes), expected(bytes);
        kernels.sum(dtype, found.data(), sources, RANKS, COUNT);
        scalar.sum(dtype, expected.data(), sources, RANKS, COUNT);
        expect(found.intact() && std::memcmp(found.data(), expected.data(), bytes) == 0, "sum of dtype %d: not scalar's bits",
               static_cast<int>(dtype));
    }
    for (const DType dtype : {DType::float64, DType::float32, DType::bfloat16}) {
        Array a(dtype, COUNT, random), b(dtype, COUNT, random), found(dtype, COUNT);
        const void* sources[] = {a.data(), b.data()};
        kernels.sum(dtype, found.data(), sources, 2, COUNT);
        for (std::size_t i = 0; i < COUNT; ++i) {
            const double expected = rounded(dtype, a[i] + b[i]);
            expect(found[i] == expected, "sum of %s: %.9g, not %.9g", name_of(dtype), found[i], expected);
        }
    }
}

}  // namespace

void test_layers(const Kernels& kernels, const Kernels& scalar) {
    Random random(2);
    for (const DType dtype : DTYPES) {
        for (const std::size_t size : SIZES) {
            test_norms(kernels, dtype, size, random);
            test_elements(kernels, dtype, size, random);
        }
        for (const std::size_t rotary : {2, 6, 48, 64}) test_rope(kernels, dtype, rotary, random);
        test_logits(kernels, dtype, random);
    }
    test_sum(kernels, scalar, random);
}

}  // namespace self_test
