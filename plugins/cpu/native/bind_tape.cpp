#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings.h"
#include "tape.h"

namespace nb = nanobind;
using nb::literals::operator""_a;

namespace engine_cpu {

void bind_tape(nb::module_& m) {
    nb::class_<Tape>(m, "Tape")
        .def(nb::init<std::size_t>(), "rows"_a = 0)
        .def("__enter__",
             [](Tape& tape) -> Tape& {
                 tape.begin();
                 return tape;
             },
             nb::rv_policy::reference)
        .def("__exit__", [](Tape& tape, const nb::args&) { tape.end(); })
        .def("replay", &Tape::replay, "rows"_a = 0, unlocked())
        .def("__len__", &Tape::size)
        .def_prop_ro("names", &Tape::names);
}

}  // namespace engine_cpu
