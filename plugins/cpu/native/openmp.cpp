#include "openmp.h"

#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <mutex>

namespace engine_cpu {
namespace {

// What gcc's `#pragma omp parallel` calls. torch makes its library's symbols global when it is imported, which the
// callers of this module do first.
using Parallel = void (*)(void (*work)(void*), void* context, unsigned threads, unsigned flags);
using Processors = int (*)();

template <typename Function>
Function find(const char* name) {
    return reinterpret_cast<Function>(dlsym(RTLD_DEFAULT, name));
}

// A team belongs to the thread that began it, and ends with that: this one never does.
void* keep_a_team(void*) {
    pthread_setname_np(pthread_self(), "engine-omp");
    const auto parallel = find<Parallel>("GOMP_parallel");
    const auto processors = find<Processors>("omp_get_num_procs");
    parallel([](void*) {}, nullptr, static_cast<unsigned>(processors()) + 1, 0);
    for (;;) pause();
}

void begin() {
    // LLVM's and Intel's libraries answer to GNU's names, too, and do not count like this.
    if (find<void*>("__kmpc_fork_call") != nullptr) return;
    if (find<Parallel>("GOMP_parallel") == nullptr || find<Processors>("omp_get_num_procs") == nullptr) return;
    sigset_t all, before;  // signals are for the threads that were there before
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_t thread;
    if (pthread_create(&thread, nullptr, keep_a_team, nullptr) == 0) pthread_detach(thread);
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

}  // namespace

void let_openmp_sleep() {
    static std::once_flag once;
    std::call_once(once, begin);
}

}  // namespace engine_cpu
