#include <nanobind/stl/string.h>

#include <iterator>
#include <stdexcept>

#include "bindings.h"
#include "kernels.h"
#include "packing.h"
#include "tape.h"

namespace nb = nanobind;
using nb::literals::operator""_a;

namespace engine_cpu {
namespace {

ScaleType scale_of(const std::string& name) {
    if (name == "float16") return ScaleType::float16;
    if (name == "bfloat16") return ScaleType::bfloat16;
    if (name == "float32") return ScaleType::float32;
    throw std::invalid_argument("no dtype of scales '" + name + "'");
}

Layout layout_of(const std::string& format, std::size_t outputs, std::size_t inputs, std::size_t group_size,
                 const std::string& scale) {
    static constexpr const char* NAMES[] = {"float32", "bfloat16", "int8",    "int4", "codes4", "codes8", "values4",
                                            "values8", "float16",  "q4_0",    "q4_1", "q5_0",   "q5_1",   "q8_0",
                                            "q2_k",    "q3_k",     "q4_k",    "q5_k", "q6_k",   "iq4_nl", "iq4_xs"};
    for (std::size_t i = 0; i < std::size(NAMES); ++i)
        if (format == NAMES[i]) return {static_cast<Format>(i), outputs, inputs, group_size, scale_of(scale)};
    throw std::invalid_argument("no format '" + format + "'");
}

// The kernels of one level over packed weights, with the threads to run them on.
class PackedOps {
public:
    PackedOps(const std::string& level, int threads) : kernel_(kernels(level).packed), threads_(threads) {}

    void linear(const Layout& layout, int dtype, std::uintptr_t x, std::size_t x_stride, std::size_t rows,
                std::uintptr_t weight, std::uintptr_t scales, std::uintptr_t bias, std::uintptr_t out,
                std::size_t out_stride, std::uintptr_t scratch, std::uintptr_t order) const {
        const Packed arguments{layout,     static_cast<DType>(dtype), at(x),                 x_stride, rows,
                               at(weight), at<const float>(scales),   at<const float>(bias), at(out),  at(scratch),
                               at<const std::int32_t>(order), out_stride};
        tape::run(layout.quantized() ? "linear_quantized" : "linear_packed",
                  [kernel = kernel_, arguments, threads = threads_] {
                      Packed now = arguments;
                      now.rows = tape::rows(now.rows);
                      kernel(now, threads);
                  });
    }

private:
    void (*kernel_)(const Packed&, int);
    int threads_;
};

void bound_look_up(const Layout& layout, int dtype, std::uintptr_t weight, std::uintptr_t index, bool wide,
                   std::size_t count, std::int64_t first, bool part, std::uintptr_t out, int threads) {
    const LookUp a{layout, static_cast<DType>(dtype), at(weight), at(index), wide, count, first, part, at(out)};
    tape::run("look_up", [a, threads] {
        LookUp now = a;
        now.count = tape::rows(now.count);
        look_up(now, threads);
    });
}

}  // namespace

void bind_packed(nb::module_& m) {
    nb::class_<Layout>(m, "Layout")
        .def("__init__",
             [](Layout* self, const std::string& format, std::size_t outputs, std::size_t inputs,
                std::size_t group_size, const std::string& scale) {
                 new (self) Layout(layout_of(format, outputs, inputs, group_size, scale));
             },
             "format"_a, "outputs"_a, "inputs"_a, "group_size"_a = 0, "scale"_a = "float32")
        .def_prop_ro("panels", &Layout::panels)
        .def_prop_ro("bytes", &Layout::bytes)
        .def("scratch_bytes", &Layout::scratch_bytes, "rows"_a)
        .def("pack",
             [](const Layout& self, int dtype, std::uintptr_t weight, std::size_t stride, std::uintptr_t packed,
                std::uintptr_t scales, int threads) {
                 pack(self, static_cast<DType>(dtype), at(weight), stride, at(packed), at<float>(scales), threads);
             },
             "dtype"_a, "weight"_a, "stride"_a, "packed"_a, "scales"_a, "threads"_a, unlocked())
        .def("pack_blocks",
             [](const Layout& self, std::uintptr_t weight, std::size_t stride, std::uintptr_t packed, int threads) {
                 pack_blocks(self, at(weight), stride, at(packed), threads);
             },
             "weight"_a, "stride"_a, "packed"_a, "threads"_a, unlocked())
        .def("pack_codes",
             [](const Layout& self, std::uintptr_t codes, std::uintptr_t scales, std::uintptr_t zeros,
                std::uintptr_t packed, int threads) {
                 pack_codes(self, at<const std::uint8_t>(codes), at(scales), at<const std::uint8_t>(zeros),
                            at<std::uint8_t>(packed), threads);
             },
             "codes"_a, "scales"_a, "zeros"_a, "packed"_a, "threads"_a, unlocked());
    m.def("look_up", &bound_look_up, "layout"_a, "dtype"_a, "weight"_a, "index"_a, "wide"_a, "count"_a, "first"_a,
          "part"_a, "out"_a, "threads"_a, unlocked());
    nb::class_<PackedOps>(m, "PackedOps")
        .def(nb::init<const std::string&, int>(), "level"_a, "threads"_a)
        .def("linear", &PackedOps::linear, "layout"_a, "dtype"_a, "x"_a, "x_stride"_a, "rows"_a, "weight"_a,
             "scales"_a, "bias"_a, "out"_a, "out_stride"_a, "scratch"_a, "order"_a = 0, unlocked());
}

}  // namespace engine_cpu
