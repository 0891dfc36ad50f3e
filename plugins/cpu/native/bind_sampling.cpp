// Drawing tokens.
#include <nanobind/stl/string.h>

#include <type_traits>

#include "bindings.h"
#include "kernels.h"
#include "sampling.h"
#include "tape.h"

namespace nb = nanobind;
using nb::literals::operator""_a;

namespace engine_cpu {
namespace {

// Kernels of one level, threads, and the memory that they compute in. Logits are [rows, vocab], float32 but for sample.
class Sampling {
public:
    Sampling(const std::string& level, int threads) : kernels_(kernels(level)), threads_(threads), scratch_(threads) {}

    void sample(int dtype, std::uintptr_t logits, std::size_t stride, std::size_t rows, std::size_t vocab,
                std::uintptr_t temperature, std::uintptr_t top_k, std::uintptr_t top_p, std::uintptr_t min_p,
                std::uintptr_t seed, std::uintptr_t position, std::uintptr_t out, std::uintptr_t broken) {
        run("sample", kernels_.sample,
            Sample{static_cast<DType>(dtype), at(logits), stride, rows, vocab, at<const float>(temperature),
                   at<const std::int32_t>(top_k), at<const float>(top_p), at<const float>(min_p),
                   at<const std::int64_t>(seed), at<const std::int64_t>(position), at<std::int32_t>(out),
                   at<std::uint8_t>(broken)});
    }
    void logprobs(std::uintptr_t logits, std::size_t stride, std::size_t rows, std::size_t vocab,
                  std::uintptr_t tokens, std::size_t k, std::uintptr_t chosen, std::uintptr_t rank,
                  std::uintptr_t top_ids, std::uintptr_t top_values) {
        run("logprobs", kernels_.logprobs,
            Logprobs{{at<float>(logits), stride, rows, vocab}, at<const std::int64_t>(tokens), k, at<float>(chosen),
                     at<std::int32_t>(rank), at<std::int32_t>(top_ids), at<float>(top_values)});
    }
    void penalties(std::uintptr_t logits, std::size_t stride, std::size_t rows, std::size_t vocab, std::uintptr_t row,
                   std::size_t count, std::uintptr_t tokens, std::size_t tokens_stride, std::uintptr_t num_prompt,
                   std::uintptr_t num_tokens, std::uintptr_t presence, std::uintptr_t frequency,
                   std::uintptr_t repetition) {
        run("penalties", kernels_.penalties,
            Penalties{{at<float>(logits), stride, rows, vocab}, at<const std::int64_t>(row), count,
                      at<const std::int32_t>(tokens), tokens_stride, at<const std::int32_t>(num_prompt),
                      at<const std::int32_t>(num_tokens), at<const float>(presence), at<const float>(frequency),
                      at<const float>(repetition)});
    }
    void apply_bitmask(std::uintptr_t logits, std::size_t stride, std::size_t rows, std::size_t vocab,
                       std::uintptr_t row, std::size_t count, std::uintptr_t bits, std::size_t bits_stride) {
        const Bitmask arguments{{at<float>(logits), stride, rows, vocab}, at<const std::int64_t>(row), count,
                                at<const std::int32_t>(bits), bits_stride};
        tape::run("apply_bitmask", [kernel = kernels_.apply_bitmask, arguments, threads = threads_] {
            kernel(arguments, threads);
        });
    }

private:
    template <typename Arguments>
    void run(const char* name, void (*kernel)(const Arguments&, SamplingScratch&, int), const Arguments& arguments) {
        tape::run(name, [kernel, arguments, scratch = &scratch_, threads = threads_] {
            Arguments now = arguments;
            if constexpr (std::is_same_v<Arguments, Sample>) now.rows = tape::rows(now.rows);
            kernel(now, *scratch, threads);
        });
    }

    const Kernels& kernels_;
    int threads_;
    SamplingScratch scratch_;
};

}  // namespace

void bind_sampling(nb::module_& m) {
    nb::class_<Sampling>(m, "Sampling")
        .def(nb::init<const std::string&, int>(), "level"_a, "threads"_a)
        .def("sample", &Sampling::sample, unlocked())
        .def("logprobs", &Sampling::logprobs, unlocked())
        .def("penalties", &Sampling::penalties, unlocked())
        .def("apply_bitmask", &Sampling::apply_bitmask, unlocked());
    m.def("uniform", &uniform, "seed"_a, "position"_a, "purpose"_a);
}

}  // namespace engine_cpu
