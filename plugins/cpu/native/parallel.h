// Threads for kernels. Everything that computes on several of them goes through parallel_for.
//
// They are the module's own (pool.h): they wait by spinning, shortly, so that a region costs a microsecond, and who has no
// core just then is not waited for. Where torch computes between the kernels it does so with an OpenMP team of its own,
// which is made to sleep soon after its work (openmp.h): two teams that spin would fight for the cores.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <type_traits>

namespace engine_cpu {

// Runs work(context) on up to `threads` threads at once, this one among them, and returns when all have: fewer where only
// `useful` of them would find something to do, or others come too late; on this one within such a call. Once one of
// them returns there must be nothing left to begin. What the work throws (the first of them) is thrown here.
void on_threads(int threads, std::size_t useful, void (*work)(void*), void* context);

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

// Calls body(begin, end, next) for ranges that together are 0 .. whole + single - 1. They get shorter towards `whole`
// (guided self-scheduling: Polychronopoulos, Kuck 1987) and have one index from there on, so that a thread has much of
// what lies side by side, and all come to an end together. `next` is where this thread goes on, as far as it can be told.
template <typename Body>
void parallel_runs(int threads, std::size_t whole, std::size_t single, Body&& body) {
    const std::size_t total = whole + single;
    if (threads <= 1 || total <= 1) {
        if (total) body(std::size_t{0}, total, total);
        return;
    }
    struct Context {
        std::atomic<std::size_t> next;
        std::size_t whole, total, shares;
        std::remove_reference_t<Body>* body;
    } context{{0}, whole, total, static_cast<std::size_t>(threads) * 2, &body};
    on_threads(
        threads, total,
        [](void* address) {
            auto& c = *static_cast<Context*>(address);
            std::size_t begin = c.next.load(std::memory_order_relaxed), end;
            for (;;) {
                do {
                    if (begin >= c.total) return;
                    const std::size_t share = begin < c.whole ? (c.whole - begin) / c.shares : 0;
                    end = begin + (share ? share : 1);
                } while (!c.next.compare_exchange_weak(begin, end, std::memory_order_relaxed));
                (*c.body)(begin, end, end);
                begin = c.next.load(std::memory_order_relaxed);
            }
        },
        &context);
}

// Calls work(each) on every thread that takes part, which calls each(body) once; that calls body(index, next) for indices
// that together are 0 .. total - 1. Each thread takes an index ahead: `next` comes after `index`; total: none does.
template <typename Work>
void parallel_ahead(int threads, std::size_t total, Work&& work) {
    struct Context {
        std::atomic<std::size_t> next;
        std::size_t total;
        std::remove_reference_t<Work>* work;
    } context{{0}, total, &work};
    if (!total) return;
    on_threads(
        threads, total,
        [](void* address) {
            auto& c = *static_cast<Context*>(address);
            std::size_t index = c.next.fetch_add(1, std::memory_order_relaxed);
            if (index >= c.total) return;
            (*c.work)([&](auto&& body) {
                for (std::size_t next; index < c.total; index = next) {
                    next = std::min(c.next.fetch_add(1, std::memory_order_relaxed), c.total);
                    body(index, next);
                }
            });
        },
        &context);
}

}  // namespace engine_cpu
