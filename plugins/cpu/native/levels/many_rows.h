// Products of many rows at a level with few registers (AVX2 has 16), where widening weights for each tile of rows would
// take as long as multiplying them: a stretch of a panel is widened to float32 once for all rows of a chunk, into memory
// that stays in the first-level cache while tile after tile of rows goes by (Goto, van de Geijn: Anatomy of
// High-Performance Matrix Multiplication, 2008; BLIS).
//
// Sums lie in memory between one stretch and the next. A sum is added up input after input in one register, as the
// kernels of few rows do it, so that a row's bits do not depend on which of the two computes it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <type_traits>

#include "levels/panels.h"
#include "parallel.h"

namespace engine_cpu::ENGINE_CPU_LEVEL {

#if defined(__AVX2__) && !defined(__AVX512F__)
constexpr bool WIDENS_ONCE = true;
#else
constexpr bool WIDENS_ONCE = false;
#endif

constexpr std::size_t MANY_FROM = 10;    // rows from which on this is faster
constexpr std::size_t MANY_ROWS = 6;     // of a tile: with 16 outputs 12 sums, two registers of weights, and one of x
constexpr std::size_t HALF_PANEL = 16;   // outputs of a tile
constexpr std::size_t STRETCH = 256;     // inputs that are widened together: 16 KiB of floats for half a panel
constexpr std::size_t ROW_BLOCK = 24;    // rows that are cut into tiles together
constexpr std::size_t MOST_CHUNK = 192;  // rows that go by one after the other; a multiple of ROW_BLOCK

// Rows of the tile at `row` of `rows`. Seven to nine rows that are left are halved: a tile of one or two would be slow.
constexpr std::size_t many_tile(std::size_t row, std::size_t rows) {
    const std::size_t left = std::min(rows - row, ROW_BLOCK - row % ROW_BLOCK);
    return left > MANY_ROWS && left < MANY_ROWS + 4 ? (left + 1) / 2 : std::min(left, MANY_ROWS);
}

// to [MR][PANEL] += x . w over `count` inputs: x [count][MR], w [count][HALF_PANEL].
template <std::size_t MR>
void multiply_tile(const float* x, const float* w, std::size_t count, float* to, Fetch& fetch) {
    constexpr std::size_t COUNT = HALF_PANEL / Floats::LANES;
    Floats sums[MR][COUNT];
    for (std::size_t m = 0; m < MR; ++m)
        for (std::size_t v = 0; v < COUNT; ++v) sums[m][v] = Floats::load(to + m * PANEL + v * Floats::LANES);
    for (std::size_t i = 0; i < count; ++i, x += MR, w += HALF_PANEL) {
        fetch.unit<64>();
        Floats right[COUNT];
        for (std::size_t v = 0; v < COUNT; ++v) right[v] = Floats::load(w + v * Floats::LANES);
#pragma GCC unroll 6
        for (std::size_t m = 0; m < MR; ++m) {
            const Floats left = Floats::all(x[m]);
            for (std::size_t v = 0; v < COUNT; ++v) sums[m][v] = Floats::fma(right[v], left, sums[m][v]);
        }
    }
    for (std::size_t m = 0; m < MR; ++m)
        for (std::size_t v = 0; v < COUNT; ++v) sums[m][v].store(to + m * PANEL + v * Floats::LANES);
}

// Calls body(the tile's size as a constant).
template <std::size_t MR = MANY_ROWS, typename Body>
void of_size(std::size_t size, Body&& body) {
    if constexpr (MR > 1)
        if (size < MR) return of_size<MR - 1>(size, body);
    body(std::integral_constant<std::size_t, MR>{});
}

// Rows [row, row + size) of x [.., count], `stride` apart, to [padded][size] floats, with zeros behind.
template <typename T>
void interleave_floats(const T* x, std::size_t stride, std::size_t size, std::size_t count, std::size_t padded,
                       float* to) {
    for (std::size_t i = 0; i < count; ++i)
        for (std::size_t m = 0; m < size; ++m) to[i * size + m] = widen(x[m * stride + i]);
    std::fill(to + count * size, to + padded * size, 0.0f);
}

// Where the float of an input (of a stretch) and an output (of a panel, the first of a register) stands.
inline float* widened_at(float* stretch, std::size_t input, std::size_t output) {
    return stretch + output / HALF_PANEL * STRETCH * HALF_PANEL + input * HALF_PANEL + output % HALF_PANEL;
}

// The way of all formats. T: of x and of the result. prepare(row, size): rows of a tile into scratch memory. `how` has
//
//   Room                     what a thread widens a stretch into, and whatever it needs besides
//   START                    of every sum
//   part(unit, left)         units of the stretch at `unit`, where so many are left
//   widen(panel, unit, part, room)
//   tile(size, row, chunk_row, unit, part, half, room, sums, fetch)
//                            adds the stretch's products to sums [size][PANEL], 16 of each; calls fetch once a step of
//   steps(part)              so many
template <typename T, typename How, typename Prepare>
void over_stretches(const Packed& a, int threads, const How& how, Prepare&& prepare) {
    const std::size_t units = a.layout.units(), panels = a.layout.panels(), bytes = a.layout.panel_bytes();
    parallel_for(threads, (a.rows + ROW_BLOCK - 1) / ROW_BLOCK, 1, [&](std::size_t begin, std::size_t end) {
        const std::size_t last = std::min(a.rows, end * ROW_BLOCK);
        for (std::size_t row = begin * ROW_BLOCK, size; row < last; row += size) {
            size = many_tile(row, a.rows);
            prepare(row, size);
        }
    });
    // Smaller chunks where there are few panels, so that all threads find something to do.
    std::size_t chunk = MOST_CHUNK;
    const std::size_t enough = 4 * static_cast<std::size_t>(std::max(threads, 1));
    while (chunk > 2 * ROW_BLOCK && (a.rows + chunk - 1) / chunk * panels < enough) chunk /= 2;
    const std::size_t total = (a.rows + chunk - 1) / chunk * panels;
    const Output<T> out(a);
    // Of a panel what stands about `unit`: what a cache is asked for need not be exact.
    const auto address = [&](std::size_t index, std::size_t unit) {
        return static_cast<const std::uint8_t*>(a.weight) + index % panels * bytes + (units ? unit * bytes / units : 0);
    };
    parallel_runs(threads, total, 0, [&](std::size_t begin, std::size_t end, std::size_t next) {
        typename How::Room room;
        alignas(64) float sums[MOST_CHUNK * PANEL];
        for (std::size_t index = begin; index < end; ++index) {
            const std::size_t panel = index % panels, first_row = index / panels * chunk;
            const std::size_t rows = std::min(chunk, a.rows - first_row);
            const std::size_t times = (rows + MANY_ROWS - 1) / MANY_ROWS * 2;  // that a stretch is gone through
            const std::size_t after = index + 1 < end ? index + 1 : std::min(next, total - 1);
            std::fill_n(sums, rows * PANEL, How::START);
            for (std::size_t u = 0, part; u < units; u += part) {
                part = how.part(u, units - u);
                how.widen(panel, u, part, room);
                const std::size_t coming = u + part < units ? how.part(u + part, units - u - part) : how.part(0, units);
                const std::uint8_t* ahead = u + part < units ? address(index, u + part) : address(after, 0);
                std::size_t time = 0;
                for (std::size_t half = 0; half < PANEL / HALF_PANEL; ++half)
                    for (std::size_t row = 0, size; row < rows; row += size, ++time) {
                        size = many_tile(row, rows);
                        Fetch fetch = Fetch::part(ahead, coming * bytes / units, time, times, how.steps(part));
                        how.tile(size, first_row + row, row, u, part, half, room, sums + row * PANEL + half * HALF_PANEL,
                                 fetch);
                    }
            }
            for (std::size_t row = 0; row < rows; ++row) {
                Floats of_row[VECTORS];
                for (std::size_t v = 0; v < VECTORS; ++v) of_row[v] = Floats::load(sums + row * PANEL + v * Floats::LANES);
                out.put(first_row + row, panel, of_row);
            }
        }
    });
}

// Of floats. EACH: inputs of a unit. widen_units(from, units, stretch): so many units of a panel, which lie at `from`, become
// floats where `widened_at` says.
template <std::size_t EACH, typename Widen>
struct ManyFloats {
    static constexpr float START = 0.0f;
    struct Room {
        alignas(64) float stretch[STRETCH * PANEL];
    };
    const Packed& a;
    const Widen& widen_units;
    std::size_t inputs = a.layout.units() * EACH;  // of a row in scratch memory

    float* words(std::size_t row) const { return static_cast<float*>(a.scratch) + row * inputs; }
    std::size_t part(std::size_t, std::size_t left) const { return std::min(STRETCH / EACH, left); }
    std::size_t steps(std::size_t part) const { return part * EACH; }

    void widen(std::size_t panel, std::size_t unit, std::size_t part, Room& room) const {
        const std::size_t bytes = a.layout.panel_bytes();
        widen_units(static_cast<const std::uint8_t*>(a.weight) + panel * bytes + unit * (bytes / a.layout.units()), part,
                    room.stretch);
    }

    void tile(std::size_t size, std::size_t row, std::size_t, std::size_t unit, std::size_t part, std::size_t half,
              const Room& room, float* sums, Fetch& fetch) const {
        const float *x = words(row) + unit * EACH * size, *w = room.stretch + half * STRETCH * HALF_PANEL;
        of_size(size, [&](auto rows) { multiply_tile<decltype(rows)::value>(x, w, part * EACH, sums, fetch); });
    }
};

template <typename T, std::size_t EACH, typename Widen>
void many_rows(const Packed& a, int threads, const Widen& widen_units) {
    const ManyFloats<EACH, Widen> how{a, widen_units};
    over_stretches<T>(a, threads, how, [&](std::size_t row, std::size_t size) {
        interleave_floats(static_cast<const T*>(a.x) + row * a.x_stride, a.x_stride, size, a.layout.inputs, how.inputs,
                          how.words(row));
    });
}

}  // namespace engine_cpu::ENGINE_CPU_LEVEL
