#include "kernels.h"

#include <stdexcept>

#if defined(__aarch64__)
#include <sys/auxv.h>
#elif defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace engine_cpu {

#define DECLARE_LEVEL(name) \
    namespace name {        \
    const Kernels& table(); \
    }
DECLARE_LEVEL(scalar)
#ifdef ENGINE_CPU_HAS_AVX2
DECLARE_LEVEL(avx2)
#endif
#ifdef ENGINE_CPU_HAS_AVX512
DECLARE_LEVEL(avx512)
#endif
#ifdef ENGINE_CPU_HAS_AVX512_VNNI
DECLARE_LEVEL(avx512_vnni)
#endif
#ifdef ENGINE_CPU_HAS_AVX512_BF16
DECLARE_LEVEL(avx512_bf16)
#endif
#ifdef ENGINE_CPU_HAS_AVX512_AMX
DECLARE_LEVEL(avx512_amx)
#endif
#ifdef ENGINE_CPU_HAS_NEON
DECLARE_LEVEL(neon)
#endif
#ifdef ENGINE_CPU_HAS_NEON_BF16
DECLARE_LEVEL(neon_bf16)
#endif

namespace {

struct Level {
    const char* name;
    const Kernels& (*table)();
    bool runs;
};

#if defined(ENGINE_CPU_HAS_AVX512_AMX) && !defined(ENGINE_CPU_AMX_FOR_TESTS)
// Whether the processor has AMX's products of bytes and of bfloat16, and Linux (5.16 and later) lets this process use them:
// tiles make the state of a thread 8 KiB larger, and so have to be asked for once.
bool amx() {
    static const bool found = [] {
        constexpr unsigned BF16 = 1u << 22, TILE = 1u << 24, INT8 = 1u << 25, ALL = BF16 | TILE | INT8;
        constexpr long REQUEST = 0x1023, TILES = 18;  // ARCH_REQ_XCOMP_PERM, of the state's part with this number
        unsigned a = 0, b = 0, c = 0, d = 0;
        if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0 || (d & ALL) != ALL) return false;
        return syscall(SYS_arch_prctl, REQUEST, TILES) == 0;
    }();
    return found;
}
#endif

// __builtin_cpu_supports also asks whether the system saves the registers.
std::vector<Level> found() {
    std::vector<Level> all{{"scalar", scalar::table, true}};
#if defined(__x86_64__)
    __builtin_cpu_init();
    [[maybe_unused]] const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                                           __builtin_cpu_supports("f16c");
    [[maybe_unused]] const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") &&
                                             __builtin_cpu_supports("avx512bw") &&
                                             __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
#ifdef ENGINE_CPU_HAS_AVX2
    all.push_back({"avx2", avx2::table, has_avx2});
#endif
#ifdef ENGINE_CPU_HAS_AVX512
    all.push_back({"avx512", avx512::table, has_avx512});
#endif
    [[maybe_unused]] const bool has_vnni = has_avx512 && __builtin_cpu_supports("avx512vnni");
#ifdef ENGINE_CPU_HAS_AVX512_VNNI
    all.push_back({"avx512_vnni", avx512_vnni::table, has_vnni});
#endif
    [[maybe_unused]] const bool has_bf16 = has_vnni && __builtin_cpu_supports("avx512bf16");
#ifdef ENGINE_CPU_HAS_AVX512_BF16
    all.push_back({"avx512_bf16", avx512_bf16::table, has_bf16});
#endif
#ifdef ENGINE_CPU_HAS_AVX512_AMX
#ifdef ENGINE_CPU_AMX_FOR_TESTS
    all.push_back({"avx512_amx", avx512_amx::table, ENGINE_CPU_AMX_FOR_TESTS || has_bf16});
#else
    all.push_back({"avx512_amx", avx512_amx::table, has_bf16 && amx()});
#endif
#endif
#elif defined(__aarch64__)
    // Linux' numbers: asm/hwcap.h may be older than the processor.
    [[maybe_unused]] constexpr unsigned long ASIMD = 1ul << 1, ATOMICS = 1ul << 8, ASIMDRDM = 1ul << 12;
    [[maybe_unused]] constexpr unsigned long I8MM = 1ul << 13, BF16 = 1ul << 14;  // of AT_HWCAP2
    const auto has = [](unsigned long which, unsigned long bits) { return (getauxval(which) & bits) == bits; };
    [[maybe_unused]] const bool has_neon = has(AT_HWCAP, ASIMD);
#ifdef ENGINE_CPU_HAS_NEON
    all.push_back({"neon", neon::table, has_neon});
#endif
#ifdef ENGINE_CPU_HAS_NEON_BF16
    all.push_back({"neon_bf16", neon_bf16::table,
                   has_neon && has(AT_HWCAP, ATOMICS | ASIMDRDM) && has(AT_HWCAP2, I8MM | BF16)});
#endif
#endif
    return all;
}

}  // namespace

std::size_t size_of(DType dtype) {
    switch (dtype) {
        case DType::float64:
        case DType::int64:
            return 8;
        case DType::float32:
        case DType::int32:
            return 4;
        case DType::bfloat16:
        case DType::float16:
            return 2;
        case DType::int8:
        case DType::uint8:
        case DType::float8:
            return 1;
    }
    throw std::invalid_argument("no such dtype");
}

std::vector<std::string> levels() {
    std::vector<std::string> names;
    for (const Level& level : found())
        if (level.runs) names.emplace_back(level.name);
    return names;
}

const Kernels& kernels(const std::string& name) {
    const Level* best = nullptr;
    const std::vector<Level> all = found();
    for (const Level& level : all)
        if (level.runs && (name == "auto" || name == level.name)) best = &level;
    if (best == nullptr) throw std::invalid_argument("level '" + name + "' is not compiled in or not of this processor");
#if defined(ENGINE_CPU_HAS_AVX512_BF16) && defined(ENGINE_CPU_HAS_AVX512_VNNI)
    // Intel's processors take as long for a register of bfloat16's dot products as for four of float32's multiply-adds,
    // twice what widened weights need (an Emerald Rapids does 1.3 and 5.2 of them a nanosecond).
    if (name == "auto" && best->table == avx512_bf16::table && __builtin_cpu_is("intel")) {
        static const Kernels widening = [] {
            Kernels kernels = avx512_bf16::table();
            kernels.packed = avx512_vnni::table().packed;
            return kernels;
        }();
        return widening;
    }
#endif
    return best->table();
}

}  // namespace engine_cpu
