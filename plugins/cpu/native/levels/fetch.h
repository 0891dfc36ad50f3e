// Weights that a tile's kernel asks for before it needs them, so that memory is read while there is something to compute.
#pragma once

#include <cstddef>
#include <cstdint>

namespace engine_cpu::ENGINE_CPU_LEVEL {

constexpr std::size_t AHEAD = 4096;                         // bytes from what is read to what is asked for
constexpr std::size_t MOST_AHEAD = std::size_t{192} << 10;  // bytes of a next panel that the second-level cache has room for

// Where in memory the next line to be asked for lies; a kernel calls `unit` for each unit of 32 outputs.
class Fetch {
public:
    // A panel's only tile, which waits for memory: asks for the panel some way ahead, and at its end for the next one.
    static Fetch along(const std::uint8_t* panel, const std::uint8_t* next, std::size_t bytes) {
        return AHEAD < bytes ? Fetch{panel + AHEAD, panel + bytes, next, 0}
                             : Fetch{next, next + bytes, next, 0};
    }
    // One of several tiles: the panel is in the cache, and each tile asks for its part of the next one.
    static Fetch part(const std::uint8_t* next, std::size_t bytes, std::size_t tile, std::size_t tiles,
                      std::size_t units) {
        const std::size_t each = (bytes < MOST_AHEAD ? bytes : MOST_AHEAD) / tiles;
        return {next + tile * each, next + (tile + 1) * each, next, units ? each / units + 1 : 0};
    }

    // BYTES: of a unit.
    template <std::size_t BYTES>
    void unit() {
        __builtin_prefetch(at_, 0, LEVEL_2);
        if constexpr (BYTES > 64) __builtin_prefetch(at_ + 64, 0, LEVEL_2);
        at_ += step_ ? step_ : BYTES;
        if (at_ >= end_) at_ = then_;
    }

    // The same, and of a panel so many bytes behind.
    template <std::size_t BYTES>
    void unit_of_two(std::size_t behind) {
        for (std::size_t i = 0; i < BYTES; i += 64) __builtin_prefetch(at_ + behind + i, 0, LEVEL_2);
        unit<BYTES>();
    }

private:
    static constexpr int LEVEL_2 = 2;

    Fetch(const std::uint8_t* at, const std::uint8_t* end, const std::uint8_t* then, std::size_t step)
        : at_(at), end_(end), then_(then), step_(step) {}

    const std::uint8_t *at_, *end_, *then_;
    std::size_t step_;
};

}  // namespace engine_cpu::ENGINE_CPU_LEVEL
