// Every kernel of every level that is compiled in and that this processor runs, over odd sizes, against double precision.
// `self_test [LEVEL ...]`: these levels alone, and each must be there.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "check.h"
#ifdef TRAP_AMX
#include "trap.h"
#endif

using namespace self_test;

int main(int count, char** words) {
#ifdef TRAP_AMX
    trap_amx();
#endif
    std::setvbuf(stdout, nullptr, _IOLBF, 0);
    const std::vector<std::string> there = engine_cpu::levels();
    std::vector<std::string> names(words + 1, words + count);
    for (const std::string& name : names)
        if (std::find(there.begin(), there.end(), name) == there.end()) {
            std::printf("level %s is not compiled in, or this processor does not run it\n", name.c_str());
            return 2;
        }
    if (names.empty()) names = there;
    const Kernels& scalar = engine_cpu::kernels("scalar");
    for (const std::string& name : names) {
        const Kernels& kernels = engine_cpu::kernels(name);
        const std::pair<const char*, std::function<void()>> parts[] = {
            {"linear", [&] { test_linear(kernels, scalar); }},
            {"layers", [&] { test_layers(kernels, scalar); }},
            {"attention", [&] { test_attention(kernels); }},
            {"sampling", [&] { test_sampling(kernels); }},
            {"states", [&] { test_states(kernels); }},
            {"experts", [&] { test_experts(kernels); }},
        };
        for (const auto& [part, run] : parts) {
            const std::size_t before = failures();
            const auto start = std::chrono::steady_clock::now();
            begin(name + " " + part);
            run();
            const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
            std::printf("%s %s: %zu checks, %zu wrong, %.1f s\n", name.c_str(), part, checks(), failures() - before, seconds);
        }
    }
#ifdef TRAP_AMX
    std::printf("%lu instructions were done in the processor's place\n", trapped());
#endif
    std::printf("%s\n", failures() ? "FAILED" : "passed");
    return failures() ? 1 : 0;
}
