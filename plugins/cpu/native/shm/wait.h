// Waiting for a number in shared memory to be reached: spin for a little, then yield, then sleep on it (futex).
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

namespace engine_cpu::shm {

// A number that one rank raises and others wait for. It goes round: only differences count.
struct alignas(64) Counter {
    std::atomic<std::uint32_t> value;
    std::atomic<std::uint32_t> sleepers;

    bool reached(std::uint32_t target) const {
        return static_cast<std::int32_t>(value.load(std::memory_order_acquire) - target) >= 0;
    }
    void set(std::uint32_t next);  // publishes what was written before, and wakes
};
static_assert(sizeof(Counter) == 64 && std::atomic<std::uint32_t>::is_always_lock_free);

// How to wait, and how to notice that the one waited for has gone.
struct Waiter {
    std::vector<int> peers;  // by rank: our end of a socket pair, which hangs up when the other process ends; -1 ours
    double timeout;          // seconds
    bool spin;               // false where there are fewer cores than ranks: who spins keeps the other from working

    // Returns when the counter has reached the target. Throws std::runtime_error where a rank has gone or time is up.
    void wait(Counter& counter, std::uint32_t target, int peer) const;

    // The first rank that has gone, or -1.
    int gone() const;
};

}  // namespace engine_cpu::shm
