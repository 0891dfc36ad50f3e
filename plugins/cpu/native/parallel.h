// Threads for kernels. Everything that computes on several of them goes through parallel_for.
//
// A step that a tape replays is native from end to end: it has threads of the module's own (pool.h), which wait by
// spinning, so that a region costs less than a microsecond. Outside of a replay torch computes between the kernels, with
// an OpenMP team whose threads spin after each piece of work as well: two teams would fight for the cores, so the
// kernels then borrow that one.
#pragma once

#include <atomic>
#include <cstddef>
#include <type_traits>

namespace engine_cpu {

// Runs work(context) on up to `threads` threads at once, this one among them, and returns when all have: fewer where only
// `useful` of them would find something to do, or others come too late; on this one within such a call. Once one of
// them returns there must be nothing left to begin. What the work throws (the first of them) is thrown here.
void on_threads(int threads, std::size_t useful, void (*work)(void*), void* context);

// While one of these lives, this thread's regions run on the module's own threads.
class OwnThreads {
public:
    OwnThreads() noexcept;
    ~OwnThreads();
    OwnThreads(const OwnThreads&) = delete;
    OwnThreads& operator=(const OwnThreads&) = delete;

private:
    bool before_;
};

// Calls body(begin, end) for ranges that together are 0 .. total - 1. Each thread takes the next piece when it is done
// with one, so that a core that is slower, or has other work to do, holds nobody up.
template <typename Body>
void parallel_for(int threads, std::size_t total, std::size_t piece, Body&& body) {
    if (threads <= 1 || total <= piece) {
        if (total) body(std::size_t{0}, total);
        return;
    }
    struct Context {
        std::atomic<std::size_t> next;
        std::size_t total, piece;
        std::remove_reference_t<Body>* body;
    } context{{0}, total, piece, &body};
    on_threads(
        threads, (total + piece - 1) / piece,
        [](void* address) {
            auto& c = *static_cast<Context*>(address);
            for (;;) {
                const std::size_t begin = c.next.fetch_add(c.piece, std::memory_order_relaxed);
                if (begin >= c.total) return;
                (*c.body)(begin, begin + c.piece < c.total ? begin + c.piece : c.total);
            }
        },
        &context);
}

}  // namespace engine_cpu
