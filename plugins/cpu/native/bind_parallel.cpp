#include <nanobind/stl/pair.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <stdexcept>

#include "bindings.h"
#include "parallel.h"
#include "pool.h"

namespace nb = nanobind;
using nb::literals::operator""_a;

namespace engine_cpu {
namespace {

// Runs so many regions over 0 .. total - 1, and counts who came by each index. Throws where `fails_at` is come by.
std::pair<double, bool> regions(int threads, std::size_t count, std::size_t total, std::size_t piece,
                                std::int64_t fails_at) {
    const auto visits = std::make_unique<std::atomic<std::size_t>[]>(total);
    for (std::size_t i = 0; i < total; ++i) visits[i] = 0;
    const auto began = std::chrono::steady_clock::now();
    for (std::size_t n = 0; n < count; ++n) {
        const auto body = [&](std::size_t begin, std::size_t end) {
            for (std::size_t i = begin; i < end; ++i) {
                if (static_cast<std::int64_t>(i) == fails_at) throw std::runtime_error("this index fails");
                visits[i].fetch_add(1, std::memory_order_relaxed);
            }
        };
        parallel_for(threads, total, piece, body);
    }
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - began;
    bool each_once = true;
    for (std::size_t i = 0; i < total; ++i) each_once &= visits[i] == count;
    return {seconds.count() / static_cast<double>(count), each_once};
}

}  // namespace

void bind_parallel(nb::module_& m) {
    m.def("regions", &regions, "threads"_a, "count"_a, "total"_a, "piece"_a, "fails_at"_a = -1, unlocked());
    m.def("pool_size", [] { return pool().size(); });
}

}  // namespace engine_cpu
