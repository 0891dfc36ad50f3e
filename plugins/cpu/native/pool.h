// The module's own threads: one pool for the process, made when it is first needed, as large as anybody asked for.
//
// A region is handed over in one word, which the threads watch: a count of regions, and how many threads take part. They
// watch it by spinning for SPIN after each region, and then sleep in the kernel (a futex) until the next. Who hands it
// over takes part, and then waits by spinning for the others. A child of fork() has no threads but its own: it makes
// another pool. The pool is never destroyed: its threads end with the process.
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

    // Runs work(context) on `threads` threads, this one among them, and returns when all have. work must not throw, nor
    // come back here. Regions of several threads take turns. Where the system gives no more threads, on fewer.
    void run(int threads, void (*work)(void*), void* context);

    int size() const { return size_.load(std::memory_order_relaxed); }  // threads, without those that call run

private:
    void grow(int size);
    void serve(int index);

    std::mutex turn_;
    std::atomic<int> size_{0};
    void (*work_)(void*) = nullptr;
    void* context_ = nullptr;
    // Apart from each other: the threads read the first all the time, and write the others.
    alignas(64) std::atomic<std::uint32_t> word_{0};
    alignas(64) std::atomic<std::uint32_t> pending_{0};
    alignas(64) std::atomic<std::uint32_t> sleeping_{0};
};

// The process's.
Pool& pool();

}  // namespace engine_cpu
