#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings.h"
#include "shm/group.h"
#include "tape.h"

namespace nb = nanobind;
using nb::literals::operator""_a;

namespace engine_cpu {

using shm::Group;
using shm::Parts;
using Sizes = std::vector<std::size_t>;

void bind_shm(nb::module_& m) {
    m.def("shm_bytes", &Group::bytes, "size"_a);
    nb::class_<Group>(m, "ShmGroup")
        .def(nb::init<int, int, int, std::vector<int>, double, const std::string&>(), "memory"_a, "rank"_a, "size"_a,
             "peers"_a, "timeout"_a, "level"_a = "auto")
        .def("barrier", [](Group& g) { tape::run("barrier", [&g] { g.barrier(); }); }, unlocked())
        .def("all_reduce",
             [](Group& g, std::uintptr_t x, std::size_t count, int dtype) {
                 tape::run("all_reduce", [=, &g] { g.all_reduce(at(x), tape::rows(count), static_cast<DType>(dtype)); });
             },
             unlocked())
        .def("all_gather",
             [](Group& g, std::uintptr_t x, std::uintptr_t out, std::size_t outer, std::size_t inner, Sizes lengths) {
                 tape::run("all_gather", [=, &g, parts = Parts{outer, inner, std::move(lengths)}] {
                     Parts now = parts;
                     now.outer = tape::rows(now.outer);
                     g.all_gather(at(x), at(out), now);
                 });
             },
             unlocked())
        .def("reduce_scatter",
             [](Group& g, std::uintptr_t x, std::uintptr_t out, std::size_t outer, std::size_t inner, Sizes lengths,
                int dtype) {
                 tape::run("reduce_scatter", [=, &g, parts = Parts{outer, inner, std::move(lengths)}] {
                     g.reduce_scatter(at(x), at(out), parts, static_cast<DType>(dtype));
                 });
             },
             unlocked())
        .def("all_to_all",
             [](Group& g, std::uintptr_t x, std::uintptr_t out, const Sizes& send, const Sizes& recv) {
                 tape::run("all_to_all", [=, &g] { g.all_to_all(at(x), at(out), send, recv); });
             },
             unlocked())
        .def("broadcast",
             [](Group& g, std::uintptr_t x, std::size_t n, int root) {
                 tape::run("broadcast", [=, &g] { g.broadcast(at(x), n, root); });
             },
             unlocked())
        .def("send",
             [](Group& g, std::uintptr_t x, std::size_t n, int to) {
                 tape::run("send", [=, &g] { g.send(at(x), n, to); });
             },
             unlocked())
        .def("recv",
             [](Group& g, std::uintptr_t x, std::size_t n, int from) {
                 tape::run("recv", [=, &g] { g.recv(at(x), n, from); });
             },
             unlocked())
        .def("close", &Group::close, unlocked());
}

}  // namespace engine_cpu
