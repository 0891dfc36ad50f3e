#include <nanobind/stl/string.h>

#include "bindings.h"
#include "experts.h"
#include "kernels.h"
#include "tape.h"

namespace nb = nanobind;
using nb::literals::operator""_a;

namespace engine_cpu {
namespace {

// The kernels of one level for mixtures of experts, with the threads to run them on.
class ExpertOps {
public:
    ExpertOps(const std::string& level, int threads) : kernels_(kernels(level)), threads_(threads) {}

    void router_logits(int dtype, std::uintptr_t x, std::size_t x_stride, std::size_t rows, std::size_t size,
                       std::size_t experts, std::uintptr_t weight, std::uintptr_t out) const {
        run("router_logits", kernels_.router_logits, dtype,
            RouterLogits{at(x), x_stride, rows, size, experts, at<const float>(weight), at<float>(out)});
    }
    void route(std::uintptr_t logits, std::size_t rows, std::size_t experts, std::uintptr_t bias, std::size_t top_k,
               std::size_t groups, std::size_t top_groups, bool sigmoid, bool renormalise, bool pairs, bool one_by_one,
               bool biased_logits, float scale, float jitter, std::uintptr_t ids, std::uintptr_t weights) const {
        const Route arguments{at<const float>(logits), rows,          experts,     at<const float>(bias),
                              top_k,                   groups,        top_groups,  sigmoid,
                              renormalise,             pairs,         one_by_one,  biased_logits,
                              scale,                   jitter,        at<std::int32_t>(ids), at<float>(weights)};
        tape::run("route", [kernel = kernels_.route, arguments, threads = threads_] {
            Route now = arguments;
            now.rows = tape::rows(now.rows);
            kernel(now, threads);
        });
    }
    void gated_act(int dtype, int act, bool gated, float alpha, float limit, std::uintptr_t x, std::size_t x_stride,
                   std::size_t rows, std::size_t size, std::uintptr_t out) const {
        run("gated_act", kernels_.gated_act, dtype,
            GatedAct{static_cast<Act>(act), gated, alpha, limit, at(x), x_stride, rows, size, at(out)});
    }
    void row_gate(int dtype, std::uintptr_t x, std::size_t x_stride, std::uintptr_t gate, std::size_t gate_stride,
                  std::size_t rows, std::size_t size, std::uintptr_t out) const {
        run("moe_gate", kernels_.row_gate, dtype,
            RowGate{at(x), x_stride, at(gate), gate_stride, rows, size, at(out)});
    }
    void experts(int dtype, const Layout& first, const Layout& last, std::uintptr_t table, std::size_t experts, int act, bool gated, float alpha, float limit, std::uintptr_t x,
                 std::size_t x_stride, std::size_t rows, std::size_t per_token, std::uintptr_t ids,
                 std::uintptr_t weights, std::uintptr_t out, std::uintptr_t scratch) const {
        const auto* each = at<const std::uintptr_t>(table);
        const engine_cpu::Experts arguments{static_cast<DType>(dtype),
                                {first, each, each + experts, each + 2 * experts, each + 3 * experts},
                                {last, each + 4 * experts, each + 5 * experts, each + 6 * experts, each + 7 * experts},
                                {static_cast<Act>(act), gated, alpha, limit, nullptr, 0, 0, 0, nullptr},
                                experts,
                                at(x),
                                x_stride,
                                rows,
                                per_token,
                                at<const std::int32_t>(ids),
                                at<const float>(weights),
                                at(out),
                                at(scratch)};
        tape::run("experts", [&kernels = kernels_, arguments, threads = threads_] {
            engine_cpu::Experts now = arguments;
            now.rows = tape::rows(now.rows);
            engine_cpu::experts(kernels, now, threads);
        });
    }

    void place_experts(std::uintptr_t ids, std::size_t rows, std::size_t per_token, std::uintptr_t table,
                       std::size_t experts, std::size_t replicas, std::int32_t first, std::size_t count,
                       std::uintptr_t load, std::uintptr_t out) const {
        const PlaceExperts arguments{at<const std::int32_t>(ids), rows,     per_token, at<const std::int32_t>(table),
                                     experts,                     replicas, first,     count,
                                     at<std::int64_t>(load),      at<std::int32_t>(out)};
        tape::run("place_experts", [arguments] {
            PlaceExperts now = arguments;
            now.rows = tape::rows(now.rows);
            engine_cpu::place_experts(now);
        });
    }

private:
    template <typename Arguments>
    void run(const char* name, void (*kernel)(DType, const Arguments&, int), int dtype,
             const Arguments& arguments) const {
        tape::run(name, [kernel, dtype = static_cast<DType>(dtype), arguments, threads = threads_] {
            Arguments now = arguments;
            now.rows = tape::rows(now.rows);
            kernel(dtype, now, threads);
        });
    }

    const Kernels& kernels_;
    int threads_;
};

}  // namespace

void bind_experts(nb::module_& m) {
    m.def("experts_scratch_bytes",
          [](const Layout& first, const Layout& last, std::size_t experts, std::size_t rows, std::size_t per_token,
             int dtype) {
              return experts_scratch_bytes(first, last, experts, rows, per_token, static_cast<DType>(dtype));
          },
          "first"_a, "last"_a, "experts"_a, "rows"_a, "per_token"_a, "dtype"_a);
    nb::class_<ExpertOps>(m, "ExpertOps")
        .def(nb::init<const std::string&, int>(), "level"_a, "threads"_a)
        .def("router_logits", &ExpertOps::router_logits, unlocked())
        .def("route", &ExpertOps::route, unlocked())
        .def("gated_act", &ExpertOps::gated_act, unlocked())
        .def("row_gate", &ExpertOps::row_gate, unlocked())
        .def("experts", &ExpertOps::experts, unlocked())
        .def("place_experts", &ExpertOps::place_experts, unlocked());
}

}  // namespace engine_cpu
