// The way over packed weights (packing.h) that all formats share.
//
// Rows are cut into tiles of at most MOST; of a tile, unit u of row m lies at word u * (rows of the tile) + m of the
// scratch memory, or of each plane of it, so that a kernel goes through it and through a panel in one sweep each. A
// format's tile kernel holds sums of 32 outputs of each of its rows in registers and adds up unit after unit: the same
// order for every tile, so a row's result has the same bits whatever rows stand beside it.
//
// Many rows are taken in chunks that stay in the second-level cache while panel after panel goes by.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "kernels.h"
#include "levels/fetch.h"
#include "levels/words.h"
#include "parallel.h"

namespace engine_cpu::ENGINE_CPU_LEVEL {

constexpr std::size_t VECTORS = PANEL / Words::LANES;  // registers that hold a unit of a panel
constexpr std::size_t NIBBLES = VECTORS / 2 ? VECTORS / 2 : 1;  // registers that hold a unit of nibbles
constexpr std::size_t CHUNK = std::size_t{384} << 10;  // bytes of rows that stay in a core's second-level cache

// Rows of the first tile of `left`; the same decomposition everywhere. Up to 8 rows, a decode and its drafts, are one
// tile: a panel is read once for all of them.
template <std::size_t MOST>
constexpr std::size_t tile_rows(std::size_t left) {
    if (MOST >= 12 && left >= 12) return 12;
    return std::min({left, MOST, std::size_t{8}});
}

// Calls body(row, rows of the tile) for the tiles of rows [begin, end).
template <std::size_t MOST, typename Body>
void over_tiles(std::size_t begin, std::size_t end, Body&& body) {
    for (std::size_t row = begin; row < end;) {
        const std::size_t size = tile_rows<MOST>(end - row);
        body(row, size);
        row += size;
    }
}

// Calls kernel.template tile<MR>(panel, row, fetch) with the tile's size as a constant.
template <std::size_t MOST, std::size_t MR = MOST, typename Kernel>
void tile(const Kernel& kernel, std::size_t panel, std::size_t row, std::size_t size, Fetch fetch) {
    if constexpr (MR > 1) {
        constexpr std::size_t SMALLER = MR > 8 ? 8 : MR - 1;
        if (size < MR) return tile<MOST, SMALLER>(kernel, panel, row, size, fetch);
    }
    kernel.template tile<MR>(panel, row, fetch);
}

// prepare(row, size) for every tile of rows, then every tile of every panel of `weight`.
template <std::size_t MOST, typename Kernel, typename Prepare>
void over_panels(const Layout& layout, const void* weight, std::size_t rows, const Kernel& kernel, int threads,
                 Prepare&& prepare) {
    if (!rows) return;
    constexpr std::size_t WHOLE = tile_rows<MOST>(MOST);
    parallel_for(threads, (rows + WHOLE - 1) / WHOLE, 1, [&](std::size_t begin, std::size_t end) {
        over_tiles<MOST>(begin * WHOLE, std::min(rows, end * WHOLE), prepare);
    });
    const auto* first_panel = static_cast<const std::uint8_t*>(weight);
    const std::size_t panels = layout.panels(), bytes = layout.panel_bytes(), units = layout.units();
    const std::size_t row_bytes = std::max<std::size_t>(1, units * 4 * Kernel::PLANES);
    const std::size_t chunk = std::max<std::size_t>(1, CHUNK / row_bytes / WHOLE) * WHOLE;
    const std::size_t chunks = (rows + chunk - 1) / chunk, last_chunk = (chunks - 1) * chunk;
    const auto address = [&](std::size_t index) { return first_panel + index % panels * bytes; };
    const auto compute = [&](std::size_t panel, std::size_t begin, std::size_t end, const std::uint8_t* next) {
        const std::size_t tiles = (end - begin + WHOLE - 1) / WHOLE;
        over_tiles<MOST>(begin, end, [&](std::size_t row, std::size_t size) {
            const std::size_t place = (row - begin) / WHOLE;
            tile<MOST>(kernel, panel, row, size,
                       end - begin == size ? Fetch::along(address(panel), next, bytes)
                                           : Fetch::part(next, bytes, place, tiles, units));
        });
    };
    // The last panels go tile by tile where there are several, so that the threads come to an end together.
    const std::size_t blocks = (rows - last_chunk + WHOLE - 1) / WHOLE;
    const std::size_t divided = blocks > 1 ? std::min(panels, static_cast<std::size_t>(std::max(threads, 1))) : 0;
    const std::size_t whole = panels * chunks - divided;
    parallel_runs(threads, whole, divided * blocks, [&](std::size_t begin, std::size_t end, std::size_t next) {
        for (std::size_t index = begin; index < end; ++index) {
            const std::uint8_t* after = address(index + 1 < end ? index + 1 : std::min(next, panels * chunks - 1));
            if (index < whole) {
                const std::size_t first = index / panels * chunk;
                compute(index % panels, first, std::min(rows, first + chunk), after);
            } else {
                const std::size_t block = (index - whole) % blocks, first = last_chunk + block * WHOLE;
                const std::size_t panel = panels - divided + (index - whole) / blocks;
                compute(panel, first, std::min(rows, first + WHOLE), address(panel));
            }
        }
    });
}

// The same of one row that is prepared, two panels at a time.
template <typename Kernel>
void over_pairs(const Layout& layout, const void* weight, const Kernel& kernel, int threads) {
    const std::size_t panels = layout.panels(), bytes = layout.panel_bytes(), pairs = (panels + 1) / 2;
    const auto address = [&](std::size_t panel) { return static_cast<const std::uint8_t*>(weight) + panel * bytes; };
    parallel_runs(threads, pairs, 0, [&](std::size_t begin, std::size_t end, std::size_t next) {
        for (std::size_t index = begin; index < end; ++index) {
            const std::size_t panel = index * 2, then = 2 * (index + 1 < end ? index + 1 : std::min(next, pairs - 1));
            const Fetch fetch = Fetch::along(address(panel), address(then), bytes);
            panel + 1 < panels ? kernel.two_panels(panel, fetch) : kernel.template tile<1>(panel, 0, fetch);
        }
    });
}

// The same of several products of one layout, with few rows each: prepare(item, row, size), then every panel of every
// weight in one go, so that threads wait for each other once and not once a product. kernels[item] computes.
template <std::size_t MOST, typename Kernel, typename Prepare>
void over_all_panels(const Packed* all, std::size_t count, const Kernel* kernels, int threads, Prepare&& prepare) {
    const Layout& layout = all[0].layout;
    const std::size_t panels = layout.panels(), bytes = layout.panel_bytes(), units = layout.units();
    parallel_for(threads, count, 4, [&](std::size_t begin, std::size_t end) {
        for (std::size_t item = begin; item < end; ++item)
            over_tiles<MOST>(0, all[item].rows, [&](std::size_t row, std::size_t size) { prepare(item, row, size); });
    });
    const auto address = [&](std::size_t index) {
        return static_cast<const std::uint8_t*>(all[index / panels].weight) + index % panels * bytes;
    };
    const std::size_t total = count * panels;
    parallel_runs(threads, total, 0, [&](std::size_t begin, std::size_t end, std::size_t next) {
        for (std::size_t index = begin; index < end; ++index) {
            const std::size_t item = index / panels, rows = all[item].rows;
            const std::uint8_t* after = address(index + 1 < end ? index + 1 : std::min(next, total - 1));
            constexpr std::size_t WHOLE = tile_rows<MOST>(MOST);
            const std::size_t tiles = (rows + WHOLE - 1) / WHOLE;
            over_tiles<MOST>(0, rows, [&](std::size_t row, std::size_t size) {
                tile<MOST>(kernels[item], index % panels, row, size,
                           rows == size ? Fetch::along(address(index), after, bytes)
                                        : Fetch::part(after, bytes, row / WHOLE, tiles, units));
            });
        }
    });
}

// Register v of a unit of nibbles: of the lower ones in the first half, of the upper ones in the second.
inline Words nibbles(const std::uint8_t* unit, std::size_t v) {
    const Words both = Words::load(unit + v % NIBBLES * Words::LANES * 4);
    return v < NIBBLES ? both.low_nibbles() : both.high_nibbles();
}

// A unit: sums[m][v] = step(sums[m][v], right(v), left(m)), with weights right(v) and what of x row m has, left(m). Of one or
// two rows these stay in registers while weights go by; of more it is the other way round.
template <std::size_t MR, typename Sum, typename Right, typename Left, typename Step>
inline void add_unit(Sum (&sums)[MR][VECTORS], Right&& right, Left&& left, Step&& step) {
    if constexpr (MR <= 2) {
        decltype(left(0)) of_rows[MR];
        for (std::size_t m = 0; m < MR; ++m) of_rows[m] = left(m);
#pragma GCC unroll 8
        for (std::size_t v = 0; v < VECTORS; ++v) {
            const auto weights = right(v);
            for (std::size_t m = 0; m < MR; ++m) sums[m][v] = step(sums[m][v], weights, of_rows[m]);
        }
    } else {
        decltype(right(0)) weights[VECTORS];
        for (std::size_t v = 0; v < VECTORS; ++v) weights[v] = right(v);
#pragma GCC unroll 12
        for (std::size_t m = 0; m < MR; ++m) {
            const auto of_row = left(m);
#pragma GCC unroll 8
            for (std::size_t v = 0; v < VECTORS; ++v) sums[m][v] = step(sums[m][v], weights[v], of_row);
        }
    }
}

// Where a tile's results go: 32 outputs of a row at a time, without the padding of the last panel.
template <typename T>
struct Output {
    T* data;
    std::size_t outputs, stride;
    const float* bias;  // [panels * 32] or null

    explicit Output(const Packed& a)
        : data(static_cast<T*>(a.out)), outputs(a.layout.outputs), stride(a.out_stride ? a.out_stride : outputs), bias(a.bias) {}

    void put(std::size_t row, std::size_t panel, const Floats (&sums)[VECTORS]) const {
        const std::size_t first = panel * PANEL, count = std::min(PANEL, outputs - first);
        float wide[PANEL];
        for (std::size_t v = 0; v < VECTORS; ++v) sums[v].store(wide + v * Floats::LANES);
        if (bias)
            for (std::size_t i = 0; i < PANEL; ++i) wide[i] += bias[first + i];
        T* out = data + row * stride + first;
        if (count == PANEL)
            for (std::size_t i = 0; i < PANEL; ++i) out[i] = narrow<T>(wide[i]);
        else
            for (std::size_t i = 0; i < count; ++i) out[i] = narrow<T>(wide[i]);
    }
};

}  // namespace engine_cpu::ENGINE_CPU_LEVEL
