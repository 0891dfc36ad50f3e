#include "parallel.h"

#include <dlfcn.h>

#include <algorithm>
#include <exception>
#include <mutex>

#include "pool.h"

namespace engine_cpu {
namespace {

thread_local bool own_threads = false;
thread_local bool inside = false;

// The entry point that gcc's `#pragma omp parallel` calls; LLVM's and Intel's libraries have it too. torch makes its
// library's symbols global when it is imported, which the callers of this module do first.
using Parallel = void (*)(void (*work)(void*), void* context, unsigned threads, unsigned flags);

Parallel find() { return reinterpret_cast<Parallel>(dlsym(RTLD_DEFAULT, "GOMP_parallel")); }

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

OwnThreads::OwnThreads() noexcept : before_(own_threads) { own_threads = true; }
OwnThreads::~OwnThreads() { own_threads = before_; }

void on_threads(int threads, std::size_t useful, void (*work)(void*), void* context) {
    if (threads <= 1 || useful <= 1 || inside) return work(context);
    Region region{work, context};
    static const Parallel borrowed = find();
    if (own_threads || borrowed == nullptr)
        pool().run(static_cast<int>(std::min<std::size_t>(threads, useful)), Region::run, &region);
    else  // always as many: a team that shrinks ends threads, and makes them anew when it grows
        borrowed(Region::run, &region, static_cast<unsigned>(threads), 0);
    if (region.error) std::rethrow_exception(region.error);
}

}  // namespace engine_cpu
