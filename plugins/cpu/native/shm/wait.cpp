#include "shm/wait.h"

#include <linux/futex.h>
#include <poll.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <climits>
#include <stdexcept>
#include <string>

namespace engine_cpu::shm {
namespace {

using Clock = std::chrono::steady_clock;

constexpr auto SPIN = std::chrono::microseconds(40);     // about what putting a thread to sleep and waking it costs
constexpr auto YIELD = std::chrono::microseconds(200);   // from then on others may have the core
constexpr long FIRST_SLEEP = 1'000'000;                  // nanoseconds until the sockets are looked at
constexpr long LONGEST_SLEEP = 50'000'000;

long futex(const std::atomic<std::uint32_t>* word, int operation, std::uint32_t value, const timespec* timeout) {
    return syscall(SYS_futex, reinterpret_cast<const std::uint32_t*>(word), operation, value, timeout, nullptr, 0);
}

void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

}  // namespace

void Counter::set(std::uint32_t next) {
    // In one order with the sleeper's count and its last look (both sequentially consistent): one sees the other.
    value.store(next, std::memory_order_seq_cst);
    if (sleepers.load(std::memory_order_seq_cst) != 0) futex(&value, FUTEX_WAKE, INT_MAX, nullptr);
}

int Waiter::gone() const {
    std::vector<pollfd> polls;
    for (int fd : peers) polls.push_back({fd, 0, 0});  // a negative one is passed over; hang-ups come unasked
    if (poll(polls.data(), polls.size(), 0) <= 0) return -1;
    const auto found = std::find_if(polls.begin(), polls.end(), [](const pollfd& p) { return p.revents != 0; });
    return found == polls.end() ? -1 : static_cast<int>(found - polls.begin());
}

void Waiter::wait(Counter& counter, std::uint32_t target, int peer) const {
    if (counter.reached(target)) return;
    const auto start = Clock::now();
    if (spin) {
        do {
            for (int i = 0; i < 32; ++i) {
                if (counter.reached(target)) return;
                relax();
            }
        } while (Clock::now() - start < SPIN);
    }
    do {
        sched_yield();
        if (counter.reached(target)) return;
    } while (Clock::now() - start < YIELD);
    for (long sleep = FIRST_SLEEP;; sleep = std::min(2 * sleep, LONGEST_SLEEP)) {
        counter.sleepers.fetch_add(1, std::memory_order_seq_cst);
        const std::uint32_t seen = counter.value.load(std::memory_order_seq_cst);
        if (static_cast<std::int32_t>(seen - target) < 0) {
            const timespec timeout{0, sleep};
            futex(&counter.value, FUTEX_WAIT, seen, &timeout);
        }
        counter.sleepers.fetch_sub(1, std::memory_order_relaxed);
        if (counter.reached(target)) return;
        const int lost = gone();
        if (counter.reached(target)) return;  // what a rank did before it went counts
        if (lost >= 0) throw std::runtime_error("rank " + std::to_string(lost) + " has gone");
        if (std::chrono::duration<double>(Clock::now() - start).count() > timeout)
            throw std::runtime_error("rank " + std::to_string(peer) + " did not come for " +
                                     std::to_string(static_cast<long>(timeout)) + " s");
    }
}

}  // namespace engine_cpu::shm
