// Linear layers over packed weights: all formats, and rows for every tile.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>

#include "check.h"
#include "packing.h"

namespace self_test {
namespace {

using engine_cpu::Format;
using engine_cpu::Layout;
using engine_cpu::Packed;
using engine_cpu::PANEL;

constexpr const char* FORMATS[] = {"float32", "bfloat16", "int8", "int4", "codes4", "codes8", "values4",
                                   "values8", "float16",  "q4_0", "q4_1", "q5_0",   "q5_1",   "q8_0",
                                   "q2_k",    "q3_k",     "q4_k", "q5_k", "q6_k",   "iq4_nl", "iq4_xs"};
static_assert(std::size(FORMATS) == static_cast<std::size_t>(Format::iq4_xs) + 1);
constexpr std::size_t MOST_ROWS = 70;

// A layer, its rows, and what should come out of it.
struct Layer {
    Layout layout;
    DType dtype;
    Array x, bias;
    std::size_t stride;
    Memory weight;
    Array scales;
    std::vector<double> expected, terms;  // [MOST_ROWS, outputs]: the sums, and those of the terms' sizes

    Layer(const Layout& layout, DType dtype, bool biased, Random& random)
        : layout(layout),
          dtype(dtype),
          x(dtype, MOST_ROWS * (layout.inputs + 3) - 3),  // rows apart, with NaN between them
          bias(DType::float32, biased ? layout.panels() * PANEL : 0),
          stride(layout.inputs + 3),
          weight(layout.bytes()),
          scales(DType::float32, layout.format == Format::int8 ? layout.panels() * PANEL : 0) {
        for (std::size_t row = 0; row < MOST_ROWS; ++row)
            for (std::size_t i = 0; i < layout.inputs; ++i) x.set(row * stride + i, random.normal());
        for (std::size_t i = 0; i < bias.size(); ++i) bias.set(i, random.normal());
        if (engine_cpu::in_blocks(layout.format) || layout.format == Format::float16) {
            fill(random);
            compute();
            return;
        }
        const DType stored = layout.format == Format::bfloat16 ? DType::bfloat16 : DType::float32;
        Array plain(stored, layout.outputs * layout.inputs, random);
        engine_cpu::pack(layout, stored, plain.data(), layout.inputs, weight.data(),
                         scales.size() ? static_cast<float*>(scales.data()) : nullptr, 1);
        expect(weight.intact() && scales.intact(), "packing wrote beyond its end");
        compute();
    }

    // Random bits, but float16s (all, or scales and minima of blocks) are between 0.25 and 0.5, or their negatives.
    void fill(Random& random) {
        const engine_cpu::BlockForm form = layout.block();
        const std::size_t bytes = layout.bytes(), blocks = engine_cpu::in_blocks(layout.format) ? PANEL * form.bytes : bytes;
        const std::size_t halves = blocks == bytes ? bytes / 2 : PANEL * (form.minima ? 2 : 1);
        auto* to = weight.data<std::uint8_t>();
        for (std::size_t i = 0; i < bytes; ++i) to[i] = static_cast<std::uint8_t>(random.bits());
        for (std::size_t at = 0; at < bytes; at += blocks)
            for (std::size_t i = 0; i < halves; ++i)
                to[at + 2 * i + 1] = static_cast<std::uint8_t>(0x34 | (random.bits() & 0x83));
    }

    // The weight of an output and an input of a block, as blocks.h says.
    double block_weight(const std::uint8_t* panel, std::size_t lane, std::size_t input) const {
        const engine_cpu::BlockForm form = layout.block();
        const std::uint8_t* block = panel + input / form.inputs * PANEL * form.bytes;
        const std::size_t group = input % form.inputs / form.group, rows = form.rows_of_numbers();
        const std::uint8_t* numbers = block + PANEL * 2 * (form.minima ? 2 : 1);
        const auto number = [&](std::size_t row) -> double {
            if (form.numbers == engine_cpu::Numbers::none) return 1.0;
            if (form.numbers == engine_cpu::Numbers::of_8) return static_cast<std::int8_t>(numbers[row * PANEL + lane]);
            int value = numbers[row % (rows / 2) * PANEL + lane] >> (row < rows / 2 ? 0 : 4) & 15;
            if (form.numbers == engine_cpu::Numbers::of_4) return value;
            const std::uint8_t* upper = numbers + rows / 2 * PANEL;
            value |= (upper[row % (rows / 4) * PANEL + lane] >> 2 * (row / (rows / 4)) & 3) << 4;
            return value - form.below;
        };
        const std::uint8_t* quad = numbers + form.number_bytes() + input % form.inputs / 16 * form.code_bytes();
        const std::size_t unit = input % 16 / 4, half = lane / 16, place = lane % 16 * 4 + input % 4;
        const std::uint8_t* two = quad + (form.one < 0 ? 0 : 64);
        const std::uint8_t* lower = two + (form.two < 0 ? 0 : 128);
        int code = 0;
        if (form.as_bytes) code = quad[(unit * PANEL + lane) * 4 + input % 4];
        if (form.nibbles) code = lower[unit * 64 + place] >> 4 * half & 15;
        if (form.two >= 0) code |= (two[unit / 2 * 64 + place] >> (4 * (unit % 2) + 2 * half) & 3) << form.two;
        if (form.one >= 0) code |= (quad[place] >> (2 * unit + half) & 1) << form.one;
        if (form.table) code = engine_cpu::IQ4[code];
        const auto scale = [&](std::size_t which) {
            std::uint16_t bits;
            std::memcpy(&bits, block + PANEL * 2 * which + 2 * lane, 2);
            return from_half(bits);
        };
        double found = scale(0) * number(group) * (code - form.half);
        if (form.minima)
            found += scale(1) * number(form.groups() + group) * (form.numbers == engine_cpu::Numbers::none ? 1 : -1);
        return found;
    }

    // The weight of an output and an input, as layout.h says where it lies.
    double weight_of(std::size_t output, std::size_t input) {
        const std::uint8_t* panel = weight.data<std::uint8_t>() + output / PANEL * layout.panel_bytes();
        const std::size_t lane = output % PANEL;
        if (engine_cpu::in_blocks(layout.format)) return block_weight(panel, lane, input);
        switch (layout.format) {
            case Format::float32: {
                float value;
                std::memcpy(&value, panel + (input * PANEL + lane) * 4, 4);
                return value;
            }
            case Format::bfloat16: {
                std::uint32_t bits = 0;
                std::memcpy(reinterpret_cast<std::uint8_t*>(&bits) + 2, panel + (input / 2 * PANEL + lane) * 4 + input % 2 * 2, 2);
                float value;
                std::memcpy(&value, &bits, 4);
                return value;
            }
            case Format::int8:
                return (panel[(input / 4 * PANEL + lane) * 4 + input % 4] - 128) * scales[output];
            case Format::float16: {
                std::uint16_t bits;
                std::memcpy(&bits, panel + (input * PANEL + lane) * 2, 2);
                return from_half(bits);
            }
            case Format::int4: {
                const std::size_t size = layout.group_size, within = input % size;
                const std::uint8_t* group = panel + input / size * (PANEL * 2 + size * 16);
                std::uint16_t scale;
                std::memcpy(&scale, group + lane * 2, 2);
                const int both = group[PANEL * 2 + within / 4 * 64 + lane % 16 * 4 + within % 4];
                return ((lane < 16 ? both & 15 : both >> 4) - 8) * from_half(scale);
            }
            default:
                std::abort();
        }
    }

    // A row as the product takes it: rounded to 127 steps on either side of zero in each group, where weights are codes.
    std::vector<double> row_of(std::size_t row) const {
        std::vector<double> values(layout.inputs);
        for (std::size_t i = 0; i < layout.inputs; ++i) values[i] = x[row * stride + i];
        if (!layout.quantized()) return values;
        const std::size_t size = engine_cpu::in_blocks(layout.format)  ? layout.block().group
                                 : layout.format == Format::int4 ? layout.group_size
                                                                 : layout.inputs;
        for (std::size_t begin = 0; begin < layout.inputs; begin += size) {
            const std::size_t end = std::min(layout.inputs, begin + size);
            float most = 0;
            for (std::size_t i = begin; i < end; ++i) most = std::max(most, static_cast<float>(std::fabs(values[i])));
            for (std::size_t i = begin; i < end; ++i)
                values[i] = std::rint(static_cast<float>(values[i]) * (127.0f / most)) * static_cast<double>(most / 127.0f);
        }
        return values;
    }

    void compute() {
        std::vector<double> weights(layout.outputs * layout.inputs);
        for (std::size_t o = 0; o < layout.outputs; ++o)
            for (std::size_t i = 0; i < layout.inputs; ++i) weights[o * layout.inputs + i] = weight_of(o, i);
        expected.resize(MOST_ROWS * layout.outputs);
        terms.resize(expected.size());
        for (std::size_t row = 0; row < MOST_ROWS; ++row) {
            const std::vector<double> values = row_of(row);
            for (std::size_t o = 0; o < layout.outputs; ++o) {
                double sum = bias.size() ? bias[o] : 0.0, size = std::fabs(sum);
                for (std::size_t i = 0; i < layout.inputs; ++i) {
                    const double term = values[i] * weights[o * layout.inputs + i];
                    sum += term;
                    size += std::fabs(term);
                }
                expected[row * layout.outputs + o] = sum;
                terms[row * layout.outputs + o] = size;
            }
        }
    }

    Array run(const Kernels& kernels, std::size_t first, std::size_t rows, int threads) {
        Array out(dtype, rows * layout.outputs);
        Memory scratch(layout.scratch_bytes(rows));
        kernels.packed({layout, dtype, x.at(first * stride), stride, rows, weight.data(),
                        scales.size() ? static_cast<float*>(scales.data()) : nullptr,
                        bias.size() ? static_cast<float*>(bias.data()) : nullptr, out.data(), scratch.data()},
                       threads);
        expect(out.intact() && scratch.intact(), "%s %zu x %zu wrote beyond its end for %zu rows",
               FORMATS[static_cast<int>(layout.format)], layout.outputs, layout.inputs, rows);
        return out;
    }
};

void check(Layer& layer, const Kernels& kernels, const Kernels& scalar) {
    const Layout& layout = layer.layout;
    const char* form = FORMATS[static_cast<int>(layout.format)];
    const Array whole = layer.run(kernels, 0, MOST_ROWS, 1);
    for (std::size_t i = 0; i < whole.size(); ++i) {
        const double error = 4e-6 * layer.terms[i] +
                             (layer.dtype == DType::bfloat16 ? precision(layer.dtype) / 2 * std::fabs(layer.expected[i]) : 0);
        expect(close(whole[i], layer.expected[i], error), "%s %s %zu x %zu: row %zu, output %zu: %.9g, not %.9g", form,
               name_of(layer.dtype), layout.outputs, layout.inputs, i / layout.outputs, i % layout.outputs, whole[i],
               layer.expected[i]);
    }
    if (layout.quantized())
        expect(whole.same_bits(layer.run(scalar, 0, MOST_ROWS, 1), whole.size()), "%s %s %zu x %zu: not scalar's bits", form,
               name_of(layer.dtype), layout.outputs, layout.inputs);
    for (const std::size_t rows : {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 31, 32, 33, 49}) {
        const std::size_t first = rows % 2 ? MOST_ROWS - rows : 0;
        Array some = layer.run(kernels, first, rows, rows % 3 ? 1 : 3);
        Array same(layer.dtype, some.size());
        std::memcpy(same.data(), const_cast<Array&>(whole).at(first * layout.outputs),
                    some.size() * engine_cpu::size_of(layer.dtype));
        expect(some.same_bits(same, some.size()), "%s %s %zu x %zu: %zu rows have other bits than among %zu", form,
               name_of(layer.dtype), layout.outputs, layout.inputs, rows, MOST_ROWS);
    }
}

// Codes and rows at their ends, over many inputs: no sum of products saturates. Of a group the first weight, the farthest
// from zero, has the lowest code, and the others the highest.
void check_extremes(const Kernels& kernels) {
    constexpr std::size_t INPUTS = 1024, OUTPUTS = 33, ROWS = 11;
    for (const Format format : {Format::int8, Format::int4}) {
        const Layout layout{format, OUTPUTS, INPUTS, 64};
        Array plain(DType::float32, OUTPUTS * INPUTS), x(DType::float32, ROWS * INPUTS), scales(DType::float32, 64);
        const double most = format == Format::int8 ? 127 / 128.0 : 7 / 8.0;
        const std::size_t groups = layout.groups(), each = INPUTS / groups;
        for (std::size_t i = 0; i < plain.size(); ++i)
            plain.set(i, (i / INPUTS % 2 ? 3.0 : -3.0) * (i % each ? -most : 1.0));
        const double sum = 3 * (static_cast<double>(groups) - most * static_cast<double>(INPUTS - groups));
        for (std::size_t i = 0; i < x.size(); ++i) x.set(i, i / INPUTS % 2 ? -1.0 : 1.0);
        Memory weight(layout.bytes()), scratch(layout.scratch_bytes(ROWS));
        engine_cpu::pack(layout, DType::float32, plain.data(), INPUTS, weight.data(), static_cast<float*>(scales.data()), 1);
        Array out(DType::float32, ROWS * OUTPUTS);
        kernels.packed({layout, DType::float32, x.data(), INPUTS, ROWS, weight.data(), static_cast<float*>(scales.data()),
                        nullptr, out.data(), scratch.data()}, 1);
        for (std::size_t i = 0; i < out.size(); ++i) {
            const double sign = (i / OUTPUTS % 2 ? -1.0 : 1.0) * (i % OUTPUTS % 2 ? 1.0 : -1.0);
            expect(close(out[i], sign * sum, 1e-5 * 3 * INPUTS), "%s at its ends: %.9g", FORMATS[static_cast<int>(format)],
                   out[i]);
        }
    }
}

// Codes as a checkpoint stores them, in whatever order of inputs: beside double precision, and with scalar's bits.
void check_codes(const Kernels& kernels, const Kernels& scalar, Layout layout, DType dtype, bool ordered, bool table,
                 Random& random) {
    constexpr std::size_t ROWS = 19;
    const std::size_t outputs = layout.outputs, inputs = layout.inputs, groups = layout.groups(), size = layout.group_size;
    const bool whole = layout.whole_numbers(), four = layout.nibbles();
    Memory codes(outputs * inputs), zeros(outputs * groups), order(inputs * 4), weight(layout.bytes());
    const DType kept = layout.scale == engine_cpu::ScaleType::bfloat16 ? DType::bfloat16 : DType::float32;
    Array scales(kept, outputs * groups, random), numbers(DType::float32, 16), x(dtype, ROWS * inputs, random);
    Array bias(DType::float32, layout.panels() * PANEL, random);
    for (std::size_t i = 0; i < outputs * inputs; ++i) {
        std::uint8_t code = static_cast<std::uint8_t>(random.below(four ? 16 : 256));
        if (layout.format == Format::values8 && (code & 127) == 127) code = 1;  // no number
        codes.data<std::uint8_t>()[i] = code;
    }
    for (std::size_t i = 0; i < outputs * groups; ++i)
        zeros.data<std::uint8_t>()[i] = static_cast<std::uint8_t>(random.below(four ? 16 : 256));
    for (std::size_t i = 0; i < 16; ++i) numbers.set(i, whole ? std::floor(random.uniform() * 256) : random.normal());
    for (std::size_t i = 0; i < inputs; ++i) order.data<std::int32_t>()[i] = static_cast<std::int32_t>(inputs - 1 - i);
    engine_cpu::pack_codes(layout, codes.data<std::uint8_t>(), scales.data(), zeros.data<std::uint8_t>(),
                           weight.data<std::uint8_t>(), 1);
    expect(weight.intact(), "packing codes wrote beyond its end");
    const bool by_table = table || layout.format == Format::values4;
    const auto run = [&](const Kernels& with, std::size_t rows) {
        Array out(dtype, rows * outputs);
        Memory scratch(layout.scratch_bytes(rows));
        Packed given{layout, dtype, x.data(), inputs, rows, weight.data(),
                     by_table ? static_cast<float*>(numbers.data()) : nullptr, static_cast<float*>(bias.data()), out.data(),
                     scratch.data()};
        if (ordered) given.order = order.data<std::int32_t>();
        with.packed(given, 1);
        expect(out.intact() && scratch.intact(), "codes wrote beyond their end for %zu rows", rows);
        return out;
    };
    const auto number_of = [&](std::size_t o, std::size_t i) {
        const std::uint8_t code = codes.data<std::uint8_t>()[o * inputs + i];
        double number = by_table ? numbers[code] : code;
        if (layout.format == Format::values8) {
            const int exponent = code >> 3 & 15, fraction = code & 7;
            number = exponent ? std::ldexp(8 + fraction, exponent - 10) : std::ldexp(fraction, -9);
            if (code & 128) number = -number;
        }
        return (number - (whole ? zeros.data<std::uint8_t>()[o * groups + i / size] : 0)) * scales[o * groups + i / size];
    };
    const char* form = FORMATS[static_cast<int>(layout.format)];
    const Array found = run(kernels, ROWS);
    expect(found.same_bits(run(scalar, ROWS), found.size()), "%s: not scalar's bits", form);
    for (std::size_t row = 0; row < ROWS; ++row) {
        std::vector<double> values(inputs);
        for (std::size_t i = 0; i < inputs; ++i) values[i] = x[row * inputs + (ordered ? inputs - 1 - i : i)];
        for (std::size_t begin = 0; whole && begin < inputs; begin += size) {
            const std::size_t end = std::min(inputs, begin + size);
            float most = 0;
            for (std::size_t i = begin; i < end; ++i) most = std::max(most, static_cast<float>(std::fabs(values[i])));
            for (std::size_t i = begin; i < end; ++i)
                values[i] = std::rint(static_cast<float>(values[i]) * (127.0f / most)) * static_cast<double>(most / 127.0f);
        }
        for (std::size_t o = 0; o < outputs; ++o) {
            double sum = bias[o], terms = std::fabs(sum);
            for (std::size_t i = 0; i < inputs; ++i) {
                const double term = values[i] * number_of(o, i);
                sum += term;
                terms += std::fabs(term);
            }
            const double error = 4e-6 * terms + (dtype == DType::bfloat16 ? precision(dtype) / 2 * std::fabs(sum) : 0);
            expect(close(found[row * outputs + o], sum, error), "%s: row %zu, output %zu: %.9g, not %.9g", form, row, o,
                   found[row * outputs + o], sum);
        }
    }
    const Array one = run(kernels, 1);
    for (std::size_t o = 0; o < outputs; ++o)
        expect(one[o] == found[o], "%s: a row alone gives other bits", form);
}

// A row with a NaN gives NaN, and the others what they give without it.
void check_nan(const Kernels& kernels, Format format, DType dtype) {
    Random random(7);
    Layer layer({format, 35, 203, 32}, dtype, false, random);
    const Array before = layer.run(kernels, 0, 40, 1);
    layer.x.set(21 * layer.stride + 100, NAN);
    const Array after = layer.run(kernels, 0, 40, 1);
    for (std::size_t i = 0; i < after.size(); ++i)
        expect(i / 35 == 21 ? std::isnan(after[i]) : after[i] == before[i], "%s: a NaN in row 21 makes row %zu %g, from %g",
               FORMATS[static_cast<int>(format)], i / 35, after[i], before[i]);
}

}  // namespace

void test_linear(const Kernels& kernels, const Kernels& scalar) {
    constexpr std::size_t SIZES[][2] = {{1, 1}, {3, 31}, {37, 96}, {33, 130}, {64, 64}, {70, 257}};
    Random random(1);
    bool biased = false;
    for (const auto& [outputs, inputs] : SIZES) {
        for (const DType dtype : {DType::float32, DType::bfloat16}) {
            biased = !biased;
            const Format own = dtype == DType::float32 ? Format::float32 : Format::bfloat16;
            std::vector<Layout> layouts{{own, outputs, inputs, 0}, {Format::int8, outputs, inputs, 0}};
            for (const std::size_t group : {32, 64, 128}) layouts.push_back({Format::int4, outputs, inputs, group});
            for (const Layout& layout : layouts) {
                Layer layer(layout, dtype, biased, random);
                check(layer, kernels, scalar);
            }
        }
    }
    for (const Format format : {Format::codes4, Format::codes8, Format::values4, Format::values8})
        for (const auto& [outputs, inputs] : SIZES)
            for (const DType dtype : {DType::float32, DType::bfloat16}) {
                biased = !biased;
                const auto scale = biased ? engine_cpu::ScaleType::bfloat16 : engine_cpu::ScaleType::float32;
                check_codes(kernels, scalar, {format, outputs, inputs, 32, scale}, dtype, biased, false, random);
                if (inputs == 257)  // groups that are longer than what a kernel takes apart at once
                    check_codes(kernels, scalar, {format, outputs, inputs, 268, scale}, dtype, biased, false, random);
                if (format == Format::codes4)
                    check_codes(kernels, scalar, {format, outputs, inputs, 8, scale}, dtype, !biased, true, random);
            }
    for (int format = static_cast<int>(Format::float16); format <= static_cast<int>(Format::iq4_xs); ++format) {
        biased = !biased;
        Layer layer({static_cast<Format>(format), 37, 512, 0}, biased ? DType::float32 : DType::bfloat16, biased, random);
        check(layer, kernels, scalar);
    }
    check_extremes(kernels);
    check_nan(kernels, Format::float32, DType::float32);
    check_nan(kernels, Format::bfloat16, DType::bfloat16);
    check_nan(kernels, Format::int8, DType::bfloat16);
    check_nan(kernels, Format::int4, DType::float32);
}

}  // namespace self_test
