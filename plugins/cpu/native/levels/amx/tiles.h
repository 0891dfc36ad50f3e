// AMX's tile registers: eight of up to 16 rows of 64 bytes. A thread that uses them configures them first.
//
// The instructions stand here as assembly: the compilers' intrinsics do not say that a load reads memory (gcc 12), so that
// what was written there just before could come too late. With ENGINE_CPU_AMX_EMULATED there are none: see emulated.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>

#include "levels/amx/emulated.h"

namespace engine_cpu::ENGINE_CPU_LEVEL {

class Tiles {
public:
    static constexpr std::size_t ROWS = 16, BYTES = 64;

    Tiles() = default;
    Tiles(const Tiles&) = delete;
    Tiles& operator=(const Tiles&) = delete;

    // Tiles 0 to 3 for sums, 4 and 5 for rows of inputs, 6 and 7 for weights. `first` rows in 0, 1 and 4, `second` in 2, 3
    // and 5, which are not there where it is 0. All become zero.
    void configure(std::size_t first, std::size_t second) {
        if (first == first_ && second == second_) return;
        first_ = first;
        second_ = second;
        alignas(64) emulated::TileConfig config{};
        config.palette = 1;
        for (const std::size_t t : {0, 1, 4}) config.rows[t] = static_cast<std::uint8_t>(first);
        for (const std::size_t t : {2, 3, 5}) config.rows[t] = static_cast<std::uint8_t>(second);
        config.rows[6] = config.rows[7] = ROWS;
        for (std::size_t t = 0; t < 8; ++t) config.bytes[t] = config.rows[t] ? BYTES : 0;
        load_config(config);
    }

#if defined(ENGINE_CPU_AMX_EMULATED)

    template <int TILE>
    void zero() {
        must(unit_.zero(TILE));
    }
    template <int TILE>
    void load(const void* from, std::size_t stride) {
        must(unit_.load(TILE, from, static_cast<std::ptrdiff_t>(stride)));
    }
    template <int TILE>
    void store(void* to, std::size_t stride) const {
        must(unit_.store(TILE, to, static_cast<std::ptrdiff_t>(stride)));
    }
    template <int C, int A, int B>
    void dot_bf16() {
        must(unit_.dot_bf16(C, A, B));
    }
    template <int C, int A, int B>
    void dot_signed_unsigned() {
        must(unit_.dot_signed_unsigned(C, A, B));
    }

private:
    static void must(bool done) {
        if (!done) std::abort();
    }
    void load_config(const emulated::TileConfig& config) { must(unit_.configure(config)); }

    emulated::TileUnit unit_;

#else

    // So that a thread that does something else has no tiles to save.
    ~Tiles() {
        if (first_) asm volatile("tilerelease" ::: "memory");
    }

    template <int TILE>
    void zero() {
        asm volatile("tilezero %%tmm%c0" ::"i"(TILE));
    }
    template <int TILE>
    void load(const void* from, std::size_t stride) {
        asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(TILE) : "memory");
    }
    template <int TILE>
    void store(void* to, std::size_t stride) const {
        asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(TILE) : "memory");
    }
    // C += A * B: bfloat16 in pairs, in the order that emulated.h shows
    template <int C, int A, int B>
    void dot_bf16() {
        asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
    }
    // C += A * B: signed bytes of A, unsigned ones of B
    template <int C, int A, int B>
    void dot_signed_unsigned() {
        asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
    }

private:
    void load_config(const emulated::TileConfig& config) { asm volatile("ldtilecfg %0" ::"m"(config)); }

#endif

    std::size_t first_ = 0, second_ = 0;
};

}  // namespace engine_cpu::ENGINE_CPU_LEVEL
