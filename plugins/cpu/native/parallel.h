// Threads: those that torch computes with. A second pool beside them would fight for the cores, since both spin for a
// while after each piece of work.
#pragma once

#include <atomic>
#include <cstddef>
#include <type_traits>

namespace engine_cpu {

// Runs work(context) on `threads` threads at once, this one among them. Where the process has no OpenMP, once, here.
void on_threads(int threads, void (*work)(void*), void* context);

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
        threads,
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
