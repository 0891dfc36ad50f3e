#include "pool.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <climits>
#include <cstdio>

namespace engine_cpu {
namespace {

using Clock = std::chrono::steady_clock;

// Long enough for what a step computes on one thread between two regions, and for a part of what Python does between
// two steps; a core that is spun on longer is one that somebody else could use.
constexpr auto SPIN = std::chrono::microseconds(100);
// Who waits for the others' share of a region spins for so long, and then lets others have the core now and then:
// perhaps there are more threads than cores.
constexpr auto PATIENCE = std::chrono::microseconds(50);
constexpr int LOOKS = 64;  // at the word, for each at the clock

constexpr std::uint32_t THREADS = Pool::MOST;  // the word's bits for those that take part; the rest counts

inline void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

long futex(std::atomic<std::uint32_t>& word, int operation, std::uint32_t value) {
    static_assert(sizeof(word) == sizeof(std::uint32_t));
    return syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&word), operation | FUTEX_PRIVATE_FLAG, value, nullptr,
                   nullptr, 0);
}

struct Birth {
    void (Pool::*serve)(int);
    Pool* pool;
    int index;
};

std::atomic<Pool*> the_pool{nullptr};

}  // namespace

Pool& pool() {
    Pool* found = the_pool.load(std::memory_order_acquire);
    if (found != nullptr) return *found;
    static const int registered = pthread_atfork(nullptr, nullptr, [] { the_pool.store(nullptr); });
    static_cast<void>(registered);
    auto* made = new Pool;
    if (the_pool.compare_exchange_strong(found, made)) return *made;
    delete made;
    return *found;
}

void Pool::run(int threads, void (*work)(void*), void* context) {
    const std::lock_guard<std::mutex> turn(turn_);
    int others = std::min(threads, MOST) - 1;
    if (others > size()) grow(others);
    others = std::min(others, size());
    if (others <= 0) return work(context);
    work_ = work;
    context_ = context;
    door_.store(0, std::memory_order_release);
    const std::uint32_t before = word_.load(std::memory_order_relaxed);
    word_.store(((before | THREADS) + 1) | static_cast<std::uint32_t>(others));  // in one order with sleeping_
    if (sleeping_.load() != 0) futex(word_, FUTEX_WAKE, INT_MAX);
    work(context);
    if (door_.fetch_or(CLOSED, std::memory_order_acq_rel) == 0) return;
    const auto patience = Clock::now() + PATIENCE;
    for (int looks = 1; door_.load(std::memory_order_acquire) != CLOSED; ++looks) {
        pause();
        if (looks % LOOKS == 0 && Clock::now() > patience) sched_yield();
    }
}

void Pool::serve(int index) {
    std::uint32_t seen = 0;
    for (;;) {
        std::uint32_t word = word_.load(std::memory_order_acquire);
        if (word == seen) {
            const auto end = Clock::now() + SPIN;
            for (int looks = 1; (word = word_.load(std::memory_order_acquire)) == seen; ++looks) {
                pause();
                if (looks % LOOKS != 0 || Clock::now() < end) continue;
                sleeping_.fetch_add(1);
                while (word_.load() == seen) futex(word_, FUTEX_WAIT, seen);
                sleeping_.fetch_sub(1);
            }
        }
        seen = word;
        if (static_cast<std::uint32_t>(index) >= (word & THREADS)) continue;
        // Perhaps this is the next region's door by now: it is then that one's work that is done.
        std::uint32_t in = door_.load(std::memory_order_relaxed);
        while ((in & CLOSED) == 0 && !door_.compare_exchange_weak(in, in + 1, std::memory_order_acquire)) pause();
        if ((in & CLOSED) != 0) continue;
        work_(context_);
        door_.fetch_sub(1, std::memory_order_release);
    }
}

void Pool::grow(int size) {
    // Signals are for the threads that were there before: Python's main thread, above all. But for those of a thread's own
    // faults, which end the process unheard where they are blocked: faulthandler could not say where.
    sigset_t all, before;
    sigfillset(&all);
    for (const int fault : {SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGTRAP}) sigdelset(&all, fault);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (int index = this->size(); index < size; ++index) {
        auto* birth = new Birth{&Pool::serve, this, index};
        pthread_t thread;
        const auto start = [](void* address) -> void* {
            const Birth birth = *static_cast<Birth*>(address);
            delete static_cast<Birth*>(address);
            char name[16];
            std::snprintf(name, sizeof name, "engine-cpu-%d", birth.index);
            pthread_setname_np(pthread_self(), name);
            (birth.pool->*birth.serve)(birth.index);
            return nullptr;
        };
        if (pthread_create(&thread, nullptr, start, birth) != 0) {
            delete birth;
            break;
        }
        pthread_detach(thread);
        size_.store(index + 1, std::memory_order_relaxed);
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

}  // namespace engine_cpu
