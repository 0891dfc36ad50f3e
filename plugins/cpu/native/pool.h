// The module's own threads: one pool for the process, made when it is first needed, as large as anybody asked for.
//
// A region is announced in one word, which the threads watch: a count of regions, and how many threads may take part.
// They watch it by spinning for SPIN after each region, and then sleep in the kernel (a futex) until the next. Who
// announces it takes part, closes the door when nothing is left to do, and waits by spinning for those that came in. A
// thread that has no core just then, because the machine has other work, comes too late, and holds nobody up. A child of
// fork() has no threads but its own: it makes another pool. The pool is never destroyed: its threads end with the
// process.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>

namespace engine_cpu {

class Pool {
public:
    static constexpr int MOST = 255;  // threads of a region

    Pool() = default;
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    // Runs work(context) on this thread and, at the same time, on as many of `threads` - 1 others as are there in time,
    // and returns when all have. Once one of them returns there must be nothing left to begin. work must not throw, nor
    // come back here. Regions of several callers take turns.
    void run(int threads, void (*work)(void*), void* context);

    int size() const { return size_.load(std::memory_order_relaxed); }  // threads, without those that call run

private:
    static constexpr std::uint32_t CLOSED = 1u << 31;

    void grow(int size);
    void serve(int index);

    std::mutex turn_;
    std::atomic<int> size_{0};
    void (*work_)(void*) = nullptr;
    void* context_ = nullptr;
    // Apart from each other: the threads read the first all the time, and write the others.
    alignas(64) std::atomic<std::uint32_t> word_{0};
    alignas(64) std::atomic<std::uint32_t> door_{CLOSED};  // how many are in, and whether nobody may come any more
    alignas(64) std::atomic<std::uint32_t> sleeping_{0};
};

// The process's.
Pool& pool();

}  // namespace engine_cpu
