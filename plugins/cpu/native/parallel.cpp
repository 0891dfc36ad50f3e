#include "parallel.h"

#include <dlfcn.h>

namespace engine_cpu {
namespace {

// The entry point that gcc's `#pragma omp parallel` calls; LLVM's and Intel's libraries have it too. torch makes its
// library's symbols global when it is imported, which the callers of this module do first.
using Parallel = void (*)(void (*work)(void*), void* context, unsigned threads, unsigned flags);

Parallel find() { return reinterpret_cast<Parallel>(dlsym(RTLD_DEFAULT, "GOMP_parallel")); }

}  // namespace

void on_threads(int threads, void (*work)(void*), void* context) {
    static const Parallel parallel = find();
    if (parallel == nullptr)
        work(context);
    else
        parallel(work, context, static_cast<unsigned>(threads), 0);
}

}  // namespace engine_cpu
