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
constexpr std::size_t STRETCH = 256;     // inputs that are widened together: 16 KiB for half a panel
constexpr std::size_t ROW_BLOCK = 24;    // rows that are cut into tiles together
constexpr std::size_t MOST_CHUNK = 192;  // rows that go by one after the other; a multiple of ROW_BLOCK

// Rows of the tile at `row` of `rows`. The last tile but one leaves the last one some: a row or two would be slow.
constexpr std::size_t many_tile(std::size_t row, std::size_t rows) {
    const std::size_t left = std::min(rows - row, ROW_BLOCK - row % ROW_BLOCK);
    return left > MANY_ROWS && left < MANY_ROWS + 4 ? (left + 1) / 2 : std::min(left, MANY_ROWS);
}

// sums [rows][PANEL] += x . w over `count` inputs: x [count][MR], w [count][HALF_PANEL].
template <std::size_t MR>
void multiply_tile(const float* x, const float* w, std::size_t count, float* to, bool first, Fetch& fetch) {
    constexpr std::size_t COUNT = HALF_PANEL / Floats::LANES;
    Floats sums[MR][COUNT];
    for (std::size_t m = 0; m < MR; ++m)
        for (std::size_t v = 0; v < COUNT; ++v)
            sums[m][v] = first ? Floats::zero() : Floats::load(to + m * PANEL + v * Floats::LANES);
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

template <std::size_t MR = MANY_ROWS>
void multiply_tile(std::size_t rows, const float* x, const float* w, std::size_t count, float* to, bool first,
                   Fetch& fetch) {
    if constexpr (MR > 1)
        if (rows < MR) return multiply_tile<MR - 1>(rows, x, w, count, to, first, fetch);
    multiply_tile<MR>(x, w, count, to, first, fetch);
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

// widen_units(from, units, stretch): so many units of a panel, which lie at `from`, become floats where `widened_at`
// says. T: of x and of the result; EACH: inputs of a unit.
template <typename T, std::size_t EACH, typename Widen>
void many_rows(const Packed& a, int threads, Widen&& widen_units) {
    const std::size_t units = a.layout.units(), inputs = units * EACH, panels = a.layout.panels();
    const std::size_t bytes = a.layout.panel_bytes(), unit_bytes = units ? bytes / units : 0;
    auto* words = static_cast<float*>(a.scratch);
    parallel_for(threads, (a.rows + ROW_BLOCK - 1) / ROW_BLOCK, 1, [&](std::size_t begin, std::size_t end) {
        const std::size_t last = std::min(a.rows, end * ROW_BLOCK);
        for (std::size_t row = begin * ROW_BLOCK, size; row < last; row += size) {
            size = many_tile(row, a.rows);
            interleave_floats(static_cast<const T*>(a.x) + row * a.x_stride, a.x_stride, size, a.layout.inputs, inputs,
                              words + row * inputs);
        }
    });
    // Smaller chunks where there are few panels, so that all threads find something to do.
    std::size_t chunk = MOST_CHUNK;
    const std::size_t enough = 4 * static_cast<std::size_t>(std::max(threads, 1));
    while (chunk > 2 * ROW_BLOCK && (a.rows + chunk - 1) / chunk * panels < enough) chunk /= 2;
    const std::size_t total = (a.rows + chunk - 1) / chunk * panels;
    const Output<T> out(a);
    const auto address = [&](std::size_t index) {
        return static_cast<const std::uint8_t*>(a.weight) + index % panels * bytes;
    };
    parallel_runs(threads, total, 0, [&](std::size_t begin, std::size_t end, std::size_t next) {
        alignas(64) float wide[STRETCH * PANEL];
        alignas(64) float sums[MOST_CHUNK * PANEL];
        for (std::size_t index = begin; index < end; ++index) {
            const std::size_t first_row = index / panels * chunk, rows = std::min(chunk, a.rows - first_row);
            const std::size_t times = (rows + MANY_ROWS - 1) / MANY_ROWS * 2;  // that a stretch is gone through
            const std::uint8_t* after = address(index + 1 < end ? index + 1 : std::min(next, total - 1));
            if (!units) std::fill_n(sums, rows * PANEL, 0.0f);
            for (std::size_t u = 0; u < units; u += STRETCH / EACH) {
                const std::size_t part = std::min(STRETCH / EACH, units - u), left = units - u - part;
                widen_units(address(index) + u * unit_bytes, part, wide);
                const std::uint8_t* coming = left ? address(index) + (u + part) * unit_bytes : after;
                const std::size_t coming_bytes = std::min(STRETCH / EACH, left ? left : units) * unit_bytes;
                std::size_t time = 0;
                for (std::size_t half = 0; half < PANEL / HALF_PANEL; ++half)
                    for (std::size_t row = 0, size; row < rows; row += size, ++time) {
                        size = many_tile(row, rows);
                        Fetch fetch = Fetch::part(coming, coming_bytes, time, times, part * EACH);
                        multiply_tile(size, words + (first_row + row) * inputs + u * EACH * size,
                                      wide + half * STRETCH * HALF_PANEL, part * EACH, sums + row * PANEL + half * HALF_PANEL,
                                      u == 0, fetch);
                    }
            }
            for (std::size_t row = 0; row < rows; ++row) {
                Floats of_row[VECTORS];
                for (std::size_t v = 0; v < VECTORS; ++v) of_row[v] = Floats::load(sums + row * PANEL + v * Floats::LANES);
                out.put(first_row + row, index % panels, of_row);
            }
        }
    });
}

}  // namespace engine_cpu::ENGINE_CPU_LEVEL
