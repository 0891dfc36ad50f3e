#include "parallel.h"

#include <algorithm>
#include <exception>
#include <mutex>

#include "openmp.h"
#include "pool.h"

namespace engine_cpu {
namespace {

thread_local bool inside = false;

// The work of one region, which may throw on any thread.
struct Region {
    void (*work)(void*);
    void* context;
    std::once_flag failed{};
    std::exception_ptr error{};

    static void run(void* address) {
        auto& region = *static_cast<Region*>(address);
        const bool before = inside;
        inside = true;
        try {
            region.work(region.context);
        } catch (...) {
            std::call_once(region.failed, [&] { region.error = std::current_exception(); });
        }
        inside = before;
    }
};

}  // namespace

void on_threads(int threads, std::size_t useful, void (*work)(void*), void* context) {
    if (threads <= 1 || useful <= 1 || inside) return work(context);
    let_openmp_sleep();
    Region region{work, context};
    pool().run(static_cast<int>(std::min<std::size_t>(threads, useful)), Region::run, &region);
    if (region.error) std::rethrow_exception(region.error);
}

}  // namespace engine_cpu
