#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings.h"
#include "kernels.h"
#include "memory.h"
#include "tape.h"

namespace nb = nanobind;
using nb::literals::operator""_a;

namespace engine_cpu {
namespace {

// The kernels of one level, with the threads to run them on.
class Ops {
public:
    Ops(const std::string& level, int threads) : kernels_(kernels(level)), threads_(threads) {}

    void norm(int dtype, std::uintptr_t x, std::size_t row_stride, std::size_t head_stride, std::size_t rows,
              std::size_t heads, std::size_t size, std::uintptr_t weight, std::uintptr_t out, float eps) const {
        run("norm", kernels_.norm, dtype,
            Norm{at(x), row_stride, head_stride, rows, heads, size, at(weight), at(out), eps});
    }
    void add_norm(int dtype, std::uintptr_t x, std::uintptr_t residual, std::size_t rows, std::size_t size,
                  std::uintptr_t weight, float eps) const {
        run("add_norm", kernels_.add_norm, dtype, AddNorm{at(x), at(residual), rows, size, at(weight), eps});
    }
    void rope(int dtype, std::uintptr_t x, std::size_t row_stride, std::size_t head_stride, std::size_t rows,
              std::size_t heads, std::size_t rotary_dim, std::uintptr_t positions, std::uintptr_t cos_sin) const {
        run("rope", kernels_.rope, dtype,
            Rope{at(x), row_stride, head_stride, rows, heads, rotary_dim, at<const std::int64_t>(positions),
                 at<const float>(cos_sin)});
    }
    void silu_mul(int dtype, std::uintptr_t gate_up, std::size_t row_stride, std::size_t rows, std::size_t size,
                  std::uintptr_t out) const {
        run("silu_mul", kernels_.silu_mul, dtype, SiluMul{at(gate_up), row_stride, rows, size, at(out)});
    }
    void elementwise(int dtype, int what, std::uintptr_t x, std::uintptr_t y, float factor, std::size_t count,
                     std::uintptr_t out) const {
        constexpr const char* NAMES[] = {"add", "scale", "soft_cap", "gelu", "gelu", "relu", "relu"};
        run(NAMES[what], kernels_.elementwise, dtype,
            Elementwise{static_cast<Element>(what), at(x), at(y), factor, count, at(out)});
    }
    void layer_norm(int dtype, std::uintptr_t x, std::size_t rows, std::size_t size, std::uintptr_t weight,
                    std::uintptr_t bias, std::uintptr_t out, float eps) const {
        run("layer_norm", kernels_.layer_norm, dtype,
            LayerNorm{at(x), rows, size, at(weight), at(bias), at(out), eps});
    }
    void check_logits(int dtype, std::uintptr_t x, std::size_t row_stride, std::size_t rows, std::size_t size,
                      std::uintptr_t out, std::uintptr_t broken) const {
        run("check_logits", kernels_.check_logits, dtype,
            CheckLogits{at(x), row_stride, rows, size, at<float>(out), at<std::uint8_t>(broken)});
    }

private:
    template <typename Arguments>
    void run(const char* name, void (*kernel)(DType, const Arguments&, int), int dtype,
             const Arguments& arguments) const {
        tape::run(name, [kernel, dtype = static_cast<DType>(dtype), arguments, threads = threads_] {
            Arguments now = arguments;
            if constexpr (!std::is_same_v<Arguments, Elementwise>) now.rows = tape::rows(now.rows);
            kernel(dtype, now, threads);
        });
    }

    const Kernels& kernels_;
    int threads_;
};

void sum(const std::string& level, int dtype, std::uintptr_t out, const std::vector<std::uintptr_t>& in,
         std::size_t count) {
    std::vector<const void*> sources;
    for (std::uintptr_t address : in) sources.push_back(at<const void>(address));
    const Kernels& table = kernels(level);
    tape::run("sum", [=, &table] {
        table.sum(static_cast<DType>(dtype), at(out), sources.data(), static_cast<int>(sources.size()), count);
    });
}

}  // namespace

void bind_ops(nb::module_& m) {
    m.def("levels", &levels);
    m.def("sum", &sum, "level"_a, "dtype"_a, "out"_a, "sources"_a, "count"_a);
    m.def("keep_freed_memory", &keep_freed_memory);
    nb::class_<Ops>(m, "Ops")
        .def(nb::init<const std::string&, int>(), "level"_a, "threads"_a)
        .def("norm", &Ops::norm, unlocked())
        .def("add_norm", &Ops::add_norm, unlocked())
        .def("rope", &Ops::rope, unlocked())
        .def("silu_mul", &Ops::silu_mul, unlocked())
        .def("elementwise", &Ops::elementwise, unlocked())
        .def("layer_norm", &Ops::layer_norm, unlocked())
        .def("check_logits", &Ops::check_logits, unlocked());
}

}  // namespace engine_cpu
