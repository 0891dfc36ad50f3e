// y = x @ weight.T + bias by AMX: packed weights of bfloat16 and of 8 bits. All else is the level below's.
//
// A panel is what AMX multiplies with as it lies: 16 units of it are two tiles of 16 outputs, 16 rows of 64 bytes each. Rows
// are taken 32 at a time, in two tiles: four products for each four tiles that are loaded. One row goes the same way as
// thousands, with tiles of one row: the instruction adds up in an order of its own (emulated.h), and a row's bits must
// not depend on the rows beside it.
#include <algorithm>
#include <cstring>

#include "levels/amx/tiles.h"
#include "levels/quantize_rows.h"
#include "levels/table.h"

namespace engine_cpu {

namespace ENGINE_CPU_BASE {
const Kernels& table();
}

namespace ENGINE_CPU_LEVEL {
namespace {

constexpr std::size_t BLOCK = 2 * Tiles::ROWS;           // rows of x
constexpr std::size_t PIECE = std::size_t{64} << 10;        // bytes of weights that a thread takes at once
constexpr std::size_t TILE_UNITS = Tiles::BYTES / 4;     // of a row
constexpr std::size_t STRIDE = PANEL * 4;                // bytes of a unit of a panel, and of a row of sums
constexpr std::size_t STEP = TILE_UNITS * STRIDE;        // bytes of a panel that two tiles hold

// Rows as tiles take them: `bytes` of each. Where they fill no tile, or the last unit has fewer inputs than others, what
// lies behind them is not theirs.
struct Rows {
    const std::uint8_t* data;
    std::size_t stride, bytes;

    std::size_t steps() const { return bytes / Tiles::BYTES; }  // whole ones
};

struct OfBF16 {
    template <int C, int A, int B>
    static void dot(Tiles& tiles) {
        tiles.dot_bf16<C, A, B>();
    }
};

struct OfBytes {
    template <int C, int A, int B>
    static void dot(Tiles& tiles) {
        tiles.dot_signed_unsigned<C, A, B>();
    }
};

// sums += rows of x * a step of a panel, for up to 16 rows, or more than that.
template <typename How, bool BOTH>
void add_step(Tiles& tiles, const std::uint8_t* x, std::size_t x_stride, const std::uint8_t* weight) {
    tiles.load<4>(x, x_stride);
    tiles.load<6>(weight, STRIDE);
    How::template dot<0, 4, 6>(tiles);
    tiles.load<7>(weight + Tiles::BYTES, STRIDE);
    How::template dot<1, 4, 7>(tiles);
    if constexpr (BOTH) {
        tiles.load<5>(x + Tiles::ROWS * x_stride, x_stride);
        How::template dot<2, 5, 6>(tiles);
        How::template dot<3, 5, 7>(tiles);
    }
}

// The units of a panel behind the whole steps, filled up with zeros; null where there are none.
struct Rest {
    alignas(64) std::uint8_t bytes[STEP];
    const std::uint8_t* data = nullptr;

    void take(const std::uint8_t* panel, std::size_t units, std::size_t steps) {
        const std::size_t left = units - steps * TILE_UNITS;
        if (!left) return;
        std::memcpy(bytes, panel + steps * STEP, left * STRIDE);
        std::memset(bytes + left * STRIDE, 0, STEP - left * STRIDE);
        data = bytes;
    }
};

// sums [count, 32] of rows of x, from `row` on, with a panel: float32 or int32.
template <typename How, bool BOTH>
void multiply_rows(Tiles& tiles, const Rows& x, std::size_t row, std::size_t count, const std::uint8_t* panel,
                   const Rest& rest, std::uint8_t* sums) {
    const std::uint8_t* from = x.data + row * x.stride;
    tiles.configure(BOTH ? Tiles::ROWS : count, BOTH ? count - Tiles::ROWS : 0);
    tiles.zero<0>();
    tiles.zero<1>();
    if constexpr (BOTH) {
        tiles.zero<2>();
        tiles.zero<3>();
    }
    const std::size_t steps = x.steps();
    for (std::size_t step = 0; step < steps; ++step)
        add_step<How, BOTH>(tiles, from + step * Tiles::BYTES, x.stride, panel + step * STEP);
    if (rest.data != nullptr) {
        alignas(64) std::uint8_t ends[BLOCK * Tiles::BYTES] = {};
        const std::size_t begin = steps * Tiles::BYTES;
        for (std::size_t m = 0; m < count; ++m)
            std::memcpy(ends + m * Tiles::BYTES, from + m * x.stride + begin, x.bytes - begin);
        add_step<How, BOTH>(tiles, ends, Tiles::BYTES, rest.data);
    }
    tiles.store<0>(sums, STRIDE);
    tiles.store<1>(sums + Tiles::BYTES, STRIDE);
    if constexpr (BOTH) {
        tiles.store<2>(sums + Tiles::ROWS * STRIDE, STRIDE);
        tiles.store<3>(sums + Tiles::ROWS * STRIDE + Tiles::BYTES, STRIDE);
    }
}

// Calls give(row, panel, sums of 32 outputs) for every row and panel.
template <typename How, typename Give>
void multiply(const Packed& a, const Rows& x, int threads, Give&& give) {
    const std::size_t panels = a.layout.panels();
    const std::size_t chunk = std::max<std::size_t>(1, CHUNK / std::max<std::size_t>(1, x.bytes) / BLOCK) * BLOCK;
    const std::size_t chunks = (a.rows + chunk - 1) / chunk;
    const std::size_t fair = panels * chunks / (static_cast<std::size_t>(threads) * 2);
    const std::size_t piece =
        chunks > 1 ? 1 : std::max<std::size_t>(1, std::min(fair, PIECE / std::max<std::size_t>(1, a.layout.panel_bytes())));
    parallel_for(threads, panels * chunks, piece, [&](std::size_t begin, std::size_t end) {
        Tiles tiles;
        alignas(64) std::uint8_t sums[BLOCK * STRIDE];
        for (std::size_t index = begin; index < end; ++index) {
            const std::size_t first = index / panels * chunk, panel = index % panels;
            const std::size_t last = std::min(a.rows, first + chunk);
            const auto* weight = static_cast<const std::uint8_t*>(a.weight) + panel * a.layout.panel_bytes();
            Rest rest;
            rest.take(weight, a.layout.units(), x.steps());
            for (std::size_t row = first; row < last; row += BLOCK) {
                const std::size_t count = std::min(BLOCK, last - row);
                if (count > Tiles::ROWS)
                    multiply_rows<How, true>(tiles, x, row, count, weight, rest, sums);
                else
                    multiply_rows<How, false>(tiles, x, row, count, weight, rest, sums);
                for (std::size_t m = 0; m < count; ++m) give(row + m, panel, sums + m * STRIDE);
            }
        }
    });
}

void bfloat16(const Packed& a, int threads) {
    const Rows x{static_cast<const std::uint8_t*>(a.x), a.x_stride * 2, a.layout.inputs * 2};
    const Output<bf16> out(a);
    multiply<OfBF16>(a, x, threads, [&](std::size_t row, std::size_t panel, const std::uint8_t* sums) {
        Floats found[VECTORS];
        for (std::size_t v = 0; v < VECTORS; ++v) found[v] = Words::load(sums + v * Words::LANES * 4).as_floats();
        out.put(row, panel, found);
    });
}

// As levels/quantized.cpp does it, with the same bits: the sums of products are exact, and the floats around them are the
// same.
template <typename T>
void int8_rows(const Packed& a, int threads) {
    const RoundedRows rows(a);
    const std::size_t row_bytes = rows.units * 4;
    const auto* x = static_cast<const T*>(a.x);
    parallel_for(threads, a.rows, 1, [&](std::size_t begin, std::size_t end) {
        for (std::size_t row = begin; row < end; ++row)
            rows.round(x + row * a.x_stride, a.layout.inputs, row_bytes, row, 0, 1, 128);
    });
    const Output<T> out(a);
    multiply<OfBytes>(a, {rows.words, row_bytes, row_bytes}, threads,
                      [&](std::size_t row, std::size_t panel, const std::uint8_t* sums) {
                          const float* scales = a.scales + panel * PANEL;
                          const Words offset = Words::all(static_cast<std::uint32_t>(rows.offsets[row]));
                          const Floats scale = Floats::all(rows.scales[row]);
                          Floats found[VECTORS];
                          for (std::size_t v = 0; v < VECTORS; ++v)
                              found[v] = (Words::load(sums + v * Words::LANES * 4) - offset).to_floats() *
                                         (Floats::load(scales + v * Floats::LANES) * scale);
                          out.put(row, panel, found);
                      });
}

}  // namespace

void packed(const Packed& a, int threads) {
    if (a.layout.format == Format::bfloat16)
        bfloat16(a, threads);
    else if (a.layout.format == Format::int8)
        a.dtype == DType::bfloat16 ? int8_rows<bf16>(a, threads) : int8_rows<float>(a, threads);
    else
        ENGINE_CPU_BASE::table().packed(a, threads);
}

// One by one: what the level below would compute of bfloat16 has other bits.
bool packed_all(const Packed*, std::size_t, int) { return false; }

}  // namespace ENGINE_CPU_LEVEL
}  // namespace engine_cpu
