// Attention over a paged cache.
#include <nanobind/stl/string.h>

#include "attention.h"
#include "bindings.h"
#include "tape.h"

namespace nb = nanobind;
using nb::literals::operator""_a;

namespace engine_cpu {
namespace {

// The attention of layers of one form: kernels of one level, threads, and what they compute in.
class Attention {
public:
    Attention(const std::string& level, int threads, std::size_t size, std::size_t group, bool divides)
        : kernels_(kernels(level)), threads_(threads), group_(group), scratch_(threads, size, group, divides) {}

    void write(int dtype, std::uintptr_t k, std::size_t k_stride, std::size_t k_head_stride, std::uintptr_t v,
               std::size_t v_stride, std::size_t v_head_stride, std::uintptr_t slots, std::size_t tokens,
               const PagedCache& cache) {
        const AttentionWrite arguments{static_cast<DType>(dtype), at(k), k_stride, k_head_stride, at(v), v_stride,
                                       v_head_stride, at<const std::int64_t>(slots), tokens, cache};
        tape::run("attention_write", [kernel = kernels_.attention_write, arguments, threads = threads_] {
            AttentionWrite now = arguments;
            now.tokens = tape::rows(now.tokens);
            kernel(now, threads);
        });
    }

    void forward(int dtype, std::uintptr_t q, std::size_t q_stride, std::size_t q_head_stride, std::uintptr_t out,
                 std::uintptr_t lse, std::uintptr_t query_start_loc, std::uintptr_t block_table,
                 std::size_t table_stride, std::uintptr_t kv_index, std::size_t rows, std::size_t tokens,
                 const PagedCache& cache, float scale, float soft_cap, std::int64_t window, std::uintptr_t sinks,
                 std::uintptr_t slopes, std::uintptr_t hidden, std::uintptr_t biases, std::int64_t span) {
        const AttentionForward arguments{
            static_cast<DType>(dtype), at(q), q_stride, q_head_stride, at(out), at<float>(lse),
            at<const std::int32_t>(query_start_loc), at<const std::int32_t>(block_table), table_stride,
            at<const std::int64_t>(kv_index), rows, tokens, group_, cache, scale, soft_cap, window,
            at<const float>(sinks), at<const float>(slopes), at<const std::uint64_t>(hidden), at<const float>(biases),
            span};
        tape::run("attention", [kernel = kernels_.attention, arguments, scratch = &scratch_, threads = threads_] {
            AttentionForward now = arguments;
            now.rows = tape::rows(now.rows);
            now.tokens = tape::rows(now.tokens);
            kernel(now, *scratch, threads);
        });
    }

    static void move(const PagedCache& cache, std::uintptr_t source, std::uintptr_t destination, std::size_t count) {
        attention_move(cache, at<const std::int64_t>(source), at<const std::int64_t>(destination), count);
    }

private:
    const Kernels& kernels_;
    int threads_;
    std::size_t group_;
    AttentionScratch scratch_;
};

}  // namespace

void bind_attention(nb::module_& m) {
    nb::class_<PagedCache>(m, "PagedCache")
        .def(
            "__init__",
            [](PagedCache* self, int dtype, std::uintptr_t base, std::size_t page_stride, std::size_t heads,
               std::size_t size, std::size_t block) {
                new (self) PagedCache{static_cast<DType>(dtype), at(base), page_stride, heads, size, block};
            },
            "dtype"_a, "base"_a, "page_stride"_a, "heads"_a, "size"_a, "block"_a);
    nb::class_<Attention>(m, "Attention")
        .def(nb::init<const std::string&, int, std::size_t, std::size_t, bool>(), "level"_a, "threads"_a, "size"_a,
             "group"_a, "divides"_a = true)
        .def("write", &Attention::write, unlocked())
        .def("forward", &Attention::forward, "dtype"_a, "q"_a, "q_stride"_a, "q_head_stride"_a, "out"_a, "lse"_a,
             "query_start_loc"_a, "block_table"_a, "table_stride"_a, "kv_index"_a, "rows"_a, "tokens"_a, "cache"_a,
             "scale"_a, "soft_cap"_a, "window"_a, "sinks"_a, "slopes"_a, "hidden"_a = 0,
             "biases"_a = 0, "span"_a = 0, unlocked())
        .def_static("move", &Attention::move, unlocked());
}

}  // namespace engine_cpu
