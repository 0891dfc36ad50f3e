#include <nanobind/stl/string.h>

#include "bindings.h"
#include "lora.h"
#include "tape.h"

namespace nb = nanobind;
using nb::literals::operator""_a;

namespace engine_cpu {
namespace {

// The kernels of one level for adapters, with the threads to run them on.
class LoraOps {
public:
    LoraOps(const std::string& level, int threads) : kernels_(kernels(level)), threads_(threads) {}

    void add(int dtype, std::uintptr_t x, std::size_t x_stride, std::size_t inputs, std::uintptr_t y,
             std::size_t y_stride, std::uintptr_t table, std::uintptr_t outputs, std::size_t places, std::size_t parts,
             std::uintptr_t tokens, std::uintptr_t starts, std::uintptr_t inner, std::size_t most_rank) const {
        const Lora arguments{static_cast<DType>(dtype), at(x), x_stride, inputs, at(y), y_stride,
                             at<const std::uint64_t>(table), at<const std::uint64_t>(outputs), places, parts,
                             at<const std::int32_t>(tokens), at<const std::int32_t>(starts), at(inner), most_rank};
        // Whose tokens are whose is read when it runs: rows that do not count are nobody's.
        tape::run("lora", [&kernels = kernels_, arguments, threads = threads_] { lora(kernels, arguments, threads); });
    }

private:
    const Kernels& kernels_;
    int threads_;
};

}  // namespace

void bind_lora(nb::module_& m) {
    nb::class_<LoraOps>(m, "LoraOps")
        .def(nb::init<const std::string&, int>(), "level"_a, "threads"_a)
        .def("add", &LoraOps::add, unlocked());
}

}  // namespace engine_cpu
