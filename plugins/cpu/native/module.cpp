// What Python sees. Tensors come as addresses and sizes: the callers in engine_cpu check what they point at.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "huge_pages.h"
#include "kernels.h"
#include "shm/group.h"

namespace nb = nanobind;
using namespace engine_cpu;
using nb::literals::operator""_a;

namespace {

template <typename T = void>
T* at(std::uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

void bind_shm(nb::module_& m) {
    using shm::Group;
    using shm::Parts;
    using Sizes = std::vector<std::size_t>;
    using unlocked = nb::call_guard<nb::gil_scoped_release>;
    m.def("shm_bytes", &Group::bytes, "size"_a);
    nb::class_<Group>(m, "ShmGroup")
        .def(nb::init<int, int, int, std::vector<int>, double, const std::string&>(), "memory"_a, "rank"_a, "size"_a,
             "peers"_a, "timeout"_a, "level"_a = "auto")
        .def("barrier", &Group::barrier, unlocked())
        .def("all_reduce",
             [](Group& g, std::uintptr_t x, std::size_t count, int dtype) {
                 g.all_reduce(at(x), count, static_cast<DType>(dtype));
             },
             unlocked())
        .def("all_gather",
             [](Group& g, std::uintptr_t x, std::uintptr_t out, std::size_t outer, std::size_t inner, Sizes lengths) {
                 g.all_gather(at(x), at(out), Parts{outer, inner, std::move(lengths)});
             },
             unlocked())
        .def("reduce_scatter",
             [](Group& g, std::uintptr_t x, std::uintptr_t out, std::size_t outer, std::size_t inner, Sizes lengths,
                int dtype) {
                 g.reduce_scatter(at(x), at(out), Parts{outer, inner, std::move(lengths)}, static_cast<DType>(dtype));
             },
             unlocked())
        .def("all_to_all",
             [](Group& g, std::uintptr_t x, std::uintptr_t out, const Sizes& send, const Sizes& recv) {
                 g.all_to_all(at(x), at(out), send, recv);
             },
             unlocked())
        .def("broadcast", [](Group& g, std::uintptr_t x, std::size_t n, int root) { g.broadcast(at(x), n, root); },
             unlocked())
        .def("send", [](Group& g, std::uintptr_t x, std::size_t n, int to) { g.send(at(x), n, to); }, unlocked())
        .def("recv", [](Group& g, std::uintptr_t x, std::size_t n, int from) { g.recv(at(x), n, from); }, unlocked())
        .def("close", &Group::close, unlocked());
}

// The kernels of one level, with the threads to run them on.
class Ops {
public:
    Ops(const std::string& level, int threads) : kernels_(kernels(level)), threads_(threads) {}

    void linear(int dtype, std::uintptr_t x, std::size_t x_stride, std::size_t rows, std::size_t inputs,
                std::size_t outputs, std::uintptr_t weight, std::uintptr_t bias, std::uintptr_t out) const {
        kernels_.linear(static_cast<DType>(dtype),
                        Linear{at(x), x_stride, rows, inputs, outputs, at(weight), at(bias), at(out)}, threads_);
    }
    void norm(int dtype, std::uintptr_t x, std::size_t row_stride, std::size_t head_stride, std::size_t rows,
              std::size_t heads, std::size_t size, std::uintptr_t weight, std::uintptr_t out, float eps) const {
        kernels_.norm(static_cast<DType>(dtype),
                      Norm{at(x), row_stride, head_stride, rows, heads, size, at(weight), at(out), eps}, threads_);
    }
    void add_norm(int dtype, std::uintptr_t x, std::uintptr_t residual, std::size_t rows, std::size_t size,
                  std::uintptr_t weight, float eps) const {
        kernels_.add_norm(static_cast<DType>(dtype), AddNorm{at(x), at(residual), rows, size, at(weight), eps},
                          threads_);
    }
    void rope(int dtype, std::uintptr_t x, std::size_t row_stride, std::size_t head_stride, std::size_t rows,
              std::size_t heads, std::size_t rotary_dim, std::uintptr_t positions, std::uintptr_t cos_sin) const {
        kernels_.rope(static_cast<DType>(dtype),
                      Rope{at(x), row_stride, head_stride, rows, heads, rotary_dim, at<const std::int64_t>(positions),
                           at<const float>(cos_sin)},
                      threads_);
    }
    void silu_mul(int dtype, std::uintptr_t gate_up, std::size_t row_stride, std::size_t rows, std::size_t size,
                  std::uintptr_t out) const {
        kernels_.silu_mul(static_cast<DType>(dtype), SiluMul{at(gate_up), row_stride, rows, size, at(out)}, threads_);
    }

private:
    const Kernels& kernels_;
    int threads_;
};

void bind_ops(nb::module_& m) {
    using unlocked = nb::call_guard<nb::gil_scoped_release>;
    nb::class_<Ops>(m, "Ops")
        .def(nb::init<const std::string&, int>(), "level"_a, "threads"_a)
        .def("linear", &Ops::linear, unlocked())
        .def("norm", &Ops::norm, unlocked())
        .def("add_norm", &Ops::add_norm, unlocked())
        .def("rope", &Ops::rope, unlocked())
        .def("silu_mul", &Ops::silu_mul, unlocked());
    m.def("use_huge_pages", &use_huge_pages, "address"_a, "bytes"_a, unlocked());
}

}  // namespace

NB_MODULE(_native, m) {
    m.def("levels", &levels);
    m.def("sum",
          [](const std::string& level, int dtype, std::uintptr_t out, const std::vector<std::uintptr_t>& in,
             std::size_t count) {
              std::vector<const void*> sources;
              for (std::uintptr_t address : in) sources.push_back(at<const void>(address));
              kernels(level).sum(static_cast<DType>(dtype), at(out), sources.data(), static_cast<int>(sources.size()),
                                 count);
          },
          "level"_a, "dtype"_a, "out"_a, "sources"_a, "count"_a);
    bind_shm(m);
    bind_ops(m);
}
