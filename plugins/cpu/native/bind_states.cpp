#include <nanobind/stl/string.h>

#include "bindings.h"
#include "kernels.h"
#include "rows.h"
#include "states.h"
#include "tape.h"

namespace nb = nanobind;
using nb::literals::operator""_a;

namespace engine_cpu {
namespace {

using Address = std::uintptr_t;
using Size = std::size_t;

StatePlaces places(Address pool, Size pool_stride, Address read, Size rows, Address query_start_loc, Address kept,
                   Size kept_stride, Address kept_at, Address kept_to, Size count) {
    return {at(pool),  pool_stride, at<const std::int64_t>(read),    rows, at<const std::int32_t>(query_start_loc),
            at(kept),  kept_stride, at<const std::int64_t>(kept_at), at<const std::int64_t>(kept_to), count};
}

// The kernels of one level, with the threads to run them on.
class StateKernels {
public:
    StateKernels(const std::string& level, int threads) : kernels_(kernels(level)), threads_(threads) {}

    void causal_conv(int dtype, Address x, Size x_stride, Size channels, Size kernel, Address weight, Size weight_stride,
                     Address bias, Address out, const StatePlaces& where) const {
        run("causal_conv", kernels_.causal_conv, dtype,
            CausalConv{at(x), x_stride, channels, kernel, at(weight), weight_stride, at(bias), at(out), where});
    }
    void ssd(int dtype, Address x, Size x_stride, Size heads, Size size, Address dt, Size dt_stride, Address b,
             Size b_stride, Address c, Size c_stride, Size groups, Size state, Address a, Address d, Address dt_bias,
             float dt_low, float dt_high, Address out, const StatePlaces& where) const {
        run("ssd", kernels_.ssd, dtype,
            Ssd{at(x), x_stride, heads, size, at(dt), dt_stride, at(b), b_stride, at(c), c_stride, groups, state,
                at<const float>(a), at<const float>(d), at<const float>(dt_bias), dt_low, dt_high, at(out), where});
    }
    void selective_scan(int dtype, Address x, Size x_stride, Size channels, Address dt, Size dt_stride, Address gate,
                        Size gate_stride, Address b, Size b_stride, Address c, Size c_stride, Size state, Address a,
                        Address d, Address out, const StatePlaces& where) const {
        run("selective_scan", kernels_.selective_scan, dtype,
            SelectiveScan{at(x), x_stride, channels, at(dt), dt_stride, at(gate), gate_stride, at(b), b_stride, at(c),
                          c_stride, state, at<const float>(a), at<const float>(d), at(out), where});
    }
    void gated_delta(int dtype, Address q, Size q_stride, Address k, Size k_stride, Size key_heads, Size key_size,
                     Address v, Size v_stride, Size heads, Size value_size, Address dt, Size dt_stride, Address beta,
                     Size beta_stride, Address a, Address dt_bias, Address out, const StatePlaces& where) const {
        run("gated_delta", kernels_.gated_delta, dtype,
            GatedDelta{at(q), q_stride, at(k), k_stride, key_heads, key_size, at(v), v_stride, heads, value_size,
                       at(dt), dt_stride, at(beta), beta_stride, at<const float>(a), at<const float>(dt_bias), at(out),
                       where});
    }
    void gated_norm(int dtype, Address x, Size x_stride, Address gate, Size gate_stride, Size rows, Size channels,
                    Size size, Address weight, float eps, bool gate_last, bool given, Address squares,
                    Address out) const {
        run("gated_norm", kernels_.gated_norm, dtype,
            GatedNorm{at(x), x_stride, at(gate), gate_stride, rows, channels, size, at(weight), eps, gate_last, given,
                      at<float>(squares), at(out)});
    }
    void gate_by(int dtype, int what, Address x, Size x_stride, Address gate, Size gate_stride, Size rows, Size size,
                 Address out) const {
        constexpr const char* NAMES[] = {"gate_by", "gate_by", "gelu_mul", "gelu_mul"};
        run(NAMES[what], kernels_.gate_by, dtype,
            GateBy{static_cast<Gate>(what), at(x), x_stride, at(gate), gate_stride, rows, size, at(out)});
    }
    void copy(Address x, Size row_stride, Size stride, Size rows, Size parts, Size part_bytes, Address out,
              Size out_stride) const {
        const CopyRows a{at(x), row_stride, stride, rows, parts, part_bytes, at(out), out_stride};
        tape::run("copy", [a, threads = threads_] {
            CopyRows now = a;
            now.rows = tape::rows(now.rows);
            copy_rows(now, threads);
        });
    }

private:
    template <typename Arguments>
    void run(const char* name, void (*kernel)(DType, const Arguments&, int), int dtype,
             const Arguments& arguments) const {
        tape::run(name, [kernel, dtype = static_cast<DType>(dtype), arguments, threads = threads_] {
            Arguments now = arguments;
            Size* rows;
            if constexpr (std::is_same_v<Arguments, GatedNorm> || std::is_same_v<Arguments, GateBy>)
                rows = &now.rows;
            else
                rows = &now.places.rows;
            *rows = tape::rows(*rows);
            kernel(dtype, now, threads);
        });
    }

    const Kernels& kernels_;
    int threads_;
};

}  // namespace

void bind_states(nb::module_& m) {
    nb::class_<StatePlaces>(m, "StatePlaces");
    m.def("state_places", &places, "pool"_a, "pool_stride"_a, "read"_a, "rows"_a, "query_start_loc"_a, "kept"_a,
          "kept_stride"_a, "kept_at"_a, "kept_to"_a, "count"_a);
    nb::class_<StateKernels>(m, "StateKernels")
        .def(nb::init<const std::string&, int>(), "level"_a, "threads"_a)
        .def("causal_conv", &StateKernels::causal_conv, unlocked())
        .def("ssd", &StateKernels::ssd, unlocked())
        .def("selective_scan", &StateKernels::selective_scan, unlocked())
        .def("gated_delta", &StateKernels::gated_delta, unlocked())
        .def("gated_norm", &StateKernels::gated_norm, unlocked())
        .def("gate_by", &StateKernels::gate_by, unlocked())
        .def("copy", &StateKernels::copy, unlocked());
}

}  // namespace engine_cpu
