#include "packing.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#define ENGINE_CPU_LEVEL packing  // conversions at the level that all processors have
#include "levels/convert.h"
#include "parallel.h"

namespace engine_cpu {
namespace {

using packing::bf16;
using packing::fp16;
using packing::narrow;
using packing::widen;

// A weight that lies outside of the matrix is zero.
template <typename T>
struct Matrix {
    const T* data;
    std::size_t stride, outputs, inputs;
    T at(std::size_t o, std::size_t i) const { return o < outputs && i < inputs ? data[o * stride + i] : T{}; }
};

template <typename T>
void pack_plain(const Layout& layout, const Matrix<T>& weight, std::size_t panel, T* to) {
    constexpr std::size_t EACH = 4 / sizeof(T);
    for (std::size_t lane = 0; lane < PANEL; ++lane)
        for (std::size_t u = 0; u < layout.units(); ++u)
            for (std::size_t i = 0; i < EACH; ++i)
                to[(u * PANEL + lane) * EACH + i] = weight.at(panel * PANEL + lane, u * EACH + i);
}

void pack_half(const Layout& layout, const Matrix<fp16>& weight, std::size_t panel, fp16* to) {
    for (std::size_t lane = 0; lane < PANEL; ++lane)
        for (std::size_t u = 0; u < layout.units(); ++u) to[u * PANEL + lane] = weight.at(panel * PANEL + lane, u);
}

// The scale of a group before it is narrowed: the weight farthest from zero divided by -half.
template <typename T>
float scale_of(const Matrix<T>& weight, std::size_t output, std::size_t begin, std::size_t end, float half) {
    float high = -INFINITY, low = INFINITY;
    for (std::size_t i = begin; i < end; ++i) {
        const float w = widen(weight.at(output, i));
        high = std::max(high, w);
        low = std::min(low, w);
    }
    return (high >= -low ? high : low) / -half;
}

std::uint8_t code_of(float weight, float scale, float half) {
    const float steps = scale == 0 ? 0.0f : std::nearbyint(weight / scale);
    return static_cast<std::uint8_t>(std::min(std::max(-half, steps), half - 1) + half);
}

template <typename T>
void pack_int8(const Layout& layout, const Matrix<T>& weight, std::size_t panel, std::uint8_t* to, float* scales) {
    for (std::size_t lane = 0; lane < PANEL; ++lane) {
        const std::size_t output = panel * PANEL + lane;
        const float scale = output < layout.outputs ? scale_of(weight, output, 0, layout.inputs, 128.0f) : 0.0f;
        scales[output] = scale;
        for (std::size_t i = 0; i < layout.units() * 4; ++i)
            to[(i / 4 * PANEL + lane) * 4 + i % 4] = code_of(widen(weight.at(output, i)), scale, 128.0f);
    }
}

template <typename T>
void pack_int4(const Layout& layout, const Matrix<T>& weight, std::size_t panel, std::uint8_t* to) {
    const std::size_t size = layout.group_size;
    for (std::size_t g = 0; g < layout.groups(); ++g) {
        std::uint8_t* group = to + g * (PANEL * 2 + size * 16);
        std::uint8_t* units = group + PANEL * 2;
        std::memset(units, 0, size * 16);
        for (std::size_t lane = 0; lane < PANEL; ++lane) {
            const std::size_t output = panel * PANEL + lane;
            // a group that is filled up with zeros counts them: they may be the highest, and change nothing
            const fp16 scale = narrow<fp16>(scale_of(weight, output, g * size, (g + 1) * size, 8.0f));
            std::memcpy(group + lane * 2, &scale, 2);
            for (std::size_t i = 0; i < size; ++i) {
                const std::uint8_t code = code_of(widen(weight.at(output, g * size + i)), widen(scale), 8.0f);
                units[i / 4 * 64 + lane % 16 * 4 + i % 4] |= static_cast<std::uint8_t>(code << (lane < 16 ? 0 : 4));
            }
        }
    }
}

template <typename T>
void pack_of(const Layout& layout, const Matrix<T>& weight, void* packed, float* scales, int threads) {
    parallel_for(threads, layout.panels(), 1, [&](std::size_t begin, std::size_t end) {
        for (std::size_t panel = begin; panel < end; ++panel) {
            auto* to = static_cast<std::uint8_t*>(packed) + panel * layout.panel_bytes();
            if (layout.format == Format::int8)
                pack_int8(layout, weight, panel, to, scales);
            else if (layout.format == Format::int4)
                pack_int4(layout, weight, panel, to);
            else
                pack_plain(layout, weight, panel, reinterpret_cast<T*>(to));
        }
    });
}

// A panel of stored codes: in front of each group its scales and zeros.
void pack_codes_panel(const Layout& layout, const std::uint8_t* codes, const std::uint8_t* scales,
                      const std::uint8_t* zeros, std::size_t panel, std::uint8_t* to) {
    const std::size_t groups = layout.groups(), width = layout.scale == ScaleType::float32 ? 4 : 2;
    const std::size_t first = panel * PANEL, count = std::min(PANEL, layout.outputs - first);
    const std::size_t size = layout.grouped() ? layout.group_size : layout.units() * 4;
    const std::size_t ahead = layout.grouped() ? layout.scale_bytes() : 0;
    for (std::size_t g = 0; g < groups; ++g) {
        std::uint8_t* units = to + ahead;
        std::memset(to, 0, ahead + size * PANEL / (layout.nibbles() ? 2 : 1));
        for (std::size_t lane = 0; lane < count; ++lane) {
            const std::size_t output = first + lane;
            if (ahead) std::memcpy(to + lane * width, scales + (output * groups + g) * width, width);
            if (layout.whole_numbers()) to[PANEL * width + lane] = zeros[output * groups + g];
            const std::uint8_t* row = codes + output * layout.inputs;
            const std::size_t begin = g * size, end = std::min(layout.inputs, begin + size);
            for (std::size_t i = begin; i < end; ++i) {
                const std::size_t u = (i - begin) / 4, k = i % 4;
                if (layout.nibbles())
                    units[u * 64 + lane % 16 * 4 + k] |= static_cast<std::uint8_t>(row[i] << (lane < 16 ? 0 : 4));
                else
                    units[(u * PANEL + lane) * 4 + k] = row[i];
            }
        }
        to = units + size * PANEL / (layout.nibbles() ? 2 : 1);
    }
}

}  // namespace

void pack_codes(const Layout& layout, const std::uint8_t* codes, const void* scales, const std::uint8_t* zeros,
                std::uint8_t* packed, int threads) {
    parallel_for(threads, layout.panels(), 1, [&](std::size_t begin, std::size_t end) {
        for (std::size_t panel = begin; panel < end; ++panel)
            pack_codes_panel(layout, codes, static_cast<const std::uint8_t*>(scales), zeros, panel,
                             packed + panel * layout.panel_bytes());
    });
}

void pack(const Layout& layout, DType dtype, const void* weight, std::size_t stride, void* packed, float* scales,
          int threads) {
    const std::size_t outputs = layout.outputs, inputs = layout.inputs;
    if (layout.format == Format::float16) {
        const Matrix<fp16> halves{static_cast<const fp16*>(weight), stride, outputs, inputs};
        return parallel_for(threads, layout.panels(), 1, [&](std::size_t begin, std::size_t end) {
            for (std::size_t panel = begin; panel < end; ++panel)
                pack_half(layout, halves, panel, static_cast<fp16*>(packed) + panel * layout.panel_bytes() / 2);
        });
    }
    if (dtype == DType::bfloat16)
        pack_of<bf16>(layout, {static_cast<const bf16*>(weight), stride, outputs, inputs}, packed, scales, threads);
    else
        pack_of<float>(layout, {static_cast<const float*>(weight), stride, outputs, inputs}, packed, scales, threads);
}

}  // namespace engine_cpu
