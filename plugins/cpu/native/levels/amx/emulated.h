// AMX's tile registers in plain C++, after Intel's description of the instructions (Intel 64 and IA-32 Architectures
// Software Developer's Manual, volume 2: LDTILECFG, TILELOADD, TDPBF16PS, TDPBSUD and others). For tests: what the kernels
// make of tiles is tried on processors that have none.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace engine_cpu::emulated {

// As LDTILECFG reads it.
struct TileConfig {
    std::uint8_t palette, start_row, reserved[14];
    std::uint16_t bytes[16];  // of a row of each tile
    std::uint8_t rows[16];
};
static_assert(sizeof(TileConfig) == 64);

// One thread's. Every method says whether the processor would have done it, rather than raise an exception.
class TileUnit {
public:
    static constexpr std::size_t TILES = 8, ROWS = 16, BYTES = 64;

    bool configure(const TileConfig& config) {
        release();
        if (config.palette != 1) return config.palette == 0;
        for (std::size_t t = 0; t < 16; ++t) {
            const std::size_t rows = config.rows[t], bytes = config.bytes[t];
            if (t >= TILES ? rows || bytes : rows > ROWS || bytes > BYTES || !rows != !bytes) return false;
        }
        config_ = config;
        return true;
    }
    void release() { *this = TileUnit(); }

    bool zero(std::size_t t) {
        std::memset(tiles_[t], 0, sizeof tiles_[t]);
        return there(t);
    }

    // Rows beyond the tile's, and what is right of them, become zero.
    bool load(std::size_t t, const void* from, std::ptrdiff_t stride) {
        zero(t);
        for (std::size_t row = 0; row < rows(t); ++row)
            std::memcpy(tiles_[t][row], at<const std::uint8_t>(from, row, stride), bytes(t));
        return there(t);
    }
    bool store(std::size_t t, void* to, std::ptrdiff_t stride) const {
        for (std::size_t row = 0; row < rows(t); ++row) std::memcpy(at<std::uint8_t>(to, row, stride), tiles_[t][row], bytes(t));
        return there(t);
    }

    // c += a * b of bfloat16 in pairs: the sums of the first and of the second elements of all pairs are added to c.
    bool dot_bf16(std::size_t c, std::size_t a, std::size_t b) {
        if (!fits(c, a, b)) return false;
        for (std::size_t row = 0; row < rows(c); ++row) {
            float sums[ROWS][2] = {};
            for (std::size_t k = 0; k < bytes(a) / 4; ++k)
                for (std::size_t n = 0; n < bytes(c) / 4; ++n)
                    for (std::size_t i = 0; i < 2; ++i)
                        sums[n][i] = flushed(std::fma(half(a, row, 2 * k + i), half(b, k, 2 * n + i), sums[n][i]));
            for (std::size_t n = 0; n < bytes(c) / 4; ++n) {
                float value;
                std::memcpy(&value, tiles_[c][row] + 4 * n, 4);
                value = flushed(flushed(value) + flushed(sums[n][0] + sums[n][1]));
                std::memcpy(tiles_[c][row] + 4 * n, &value, 4);
            }
            clear_beyond(c, row);
        }
        clear_below(c);
        return true;
    }

    // c += a * b of bytes in fours, those of a signed and those of b not.
    bool dot_signed_unsigned(std::size_t c, std::size_t a, std::size_t b) {
        if (!fits(c, a, b)) return false;
        for (std::size_t row = 0; row < rows(c); ++row) {
            for (std::size_t k = 0; k < bytes(a) / 4; ++k)
                for (std::size_t n = 0; n < bytes(c) / 4; ++n) {
                    std::uint32_t value;
                    std::memcpy(&value, tiles_[c][row] + 4 * n, 4);
                    for (std::size_t i = 0; i < 4; ++i)
                        value += static_cast<std::uint32_t>(static_cast<std::int8_t>(tiles_[a][row][4 * k + i]) *
                                                            static_cast<std::int32_t>(tiles_[b][k][4 * n + i]));
                    std::memcpy(tiles_[c][row] + 4 * n, &value, 4);
                }
            clear_beyond(c, row);
        }
        clear_below(c);
        return true;
    }

private:
    template <typename Byte, typename Void>
    static Byte* at(Void* base, std::size_t row, std::ptrdiff_t stride) {
        return static_cast<Byte*>(base) + static_cast<std::ptrdiff_t>(row) * stride;
    }
    std::size_t rows(std::size_t t) const { return config_.rows[t]; }
    std::size_t bytes(std::size_t t) const { return config_.bytes[t]; }
    bool there(std::size_t t) const { return t < TILES && rows(t) > 0; }

    // The conditions of the exceptions that products raise.
    bool fits(std::size_t c, std::size_t a, std::size_t b) const {
        return there(c) && there(a) && there(b) && c != a && c != b && a != b && rows(a) == rows(c) &&
               bytes(b) == bytes(c) && bytes(a) == 4 * rows(b) && bytes(c) % 4 == 0;
    }
    static float flushed(float x) { return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.0f, x) : x; }
    float half(std::size_t t, std::size_t row, std::size_t i) const {
        std::uint16_t bits;
        std::memcpy(&bits, tiles_[t][row] + 2 * i, 2);
        const std::uint32_t wide = static_cast<std::uint32_t>(bits) << 16;
        float value;
        std::memcpy(&value, &wide, 4);
        return flushed(value);
    }
    void clear_beyond(std::size_t t, std::size_t row) { std::memset(tiles_[t][row] + bytes(t), 0, BYTES - bytes(t)); }
    void clear_below(std::size_t t) {
        for (std::size_t row = rows(t); row < ROWS; ++row) std::memset(tiles_[t][row], 0, BYTES);
    }

    TileConfig config_{};
    std::uint8_t tiles_[TILES][ROWS][BYTES] = {};
};

}  // namespace engine_cpu::emulated
