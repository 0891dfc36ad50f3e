// Keys and values into their places in the pages.
#include <algorithm>
#include <limits>

#include "attention.h"
#include "levels/attention_tile.h"
#include "levels/table.h"
#include "parallel.h"

namespace engine_cpu::ENGINE_CPU_LEVEL {
namespace {

constexpr std::size_t PIECE = 16384;  // elements that are worth a thread
constexpr float NOT_A_NUMBER = std::numeric_limits<float>::quiet_NaN();

// The bits of |x|: they grow with it, and those of NaN are the largest.
inline std::int32_t magnitude_bits(float x) { return static_cast<std::int32_t>(to_bits(x) & 0x7fffffffu); }
inline std::int32_t magnitude_bits(bf16 x) { return magnitude_bits(widen(x)); }

// Whether the cache holds all of these as numbers: rounding may make an infinity of a large one.
template <typename Cache, typename T>
bool finite(const T* x, std::size_t n) {
    std::int32_t most = 0;
    for (std::size_t i = 0; i < n; ++i) most = std::max(most, magnitude_bits(x[i]));
    return magnitude_bits(narrow<Cache>(from_bits(static_cast<std::uint32_t>(most)))) < 0x7f800000;
}

// A vector of values that are not all finite is stored as zeros, and its key as NaN. Attention multiplies values that a
// query does not see by 0, and 0 * NaN is NaN; but their scores it overwrites. Who sees the key still gets NaN.

// How a token's key and value of a head are put at place `at` of a page, as they are or rounded.
template <typename Cache, std::size_t PAIR>
struct Elements {
    template <typename T>
    static void put(const PagedCache& cache, std::byte* head, std::size_t at, const T* k, const T* v) {
        const std::size_t size = cache.size, group = at / GROUP * GROUP;
        const std::size_t stride = std::min(GROUP, cache.block - group) * PAIR;
        Cache* to = reinterpret_cast<Cache*>(head) + group * size + (at - group) * PAIR;
        Cache* value = reinterpret_cast<Cache*>(head) + cache.block * size + at / PAIR * size * PAIR + at % PAIR;
        if (!finite<Cache>(v, size)) {
            for (std::size_t i = 0; i < size; i += PAIR, to += stride) std::fill_n(to, PAIR, narrow<Cache>(NOT_A_NUMBER));
            for (std::size_t i = 0; i < size; ++i) value[i * PAIR] = Cache{};
            return;
        }
        for (std::size_t i = 0; i < size; i += PAIR, to += stride)
            for (std::size_t j = 0; j < PAIR; ++j) to[j] = narrow<Cache>(widen(k[i + j]));
        for (std::size_t i = 0; i < size; ++i) value[i * PAIR] = narrow<Cache>(widen(v[i]));
    }
};

// In 8 bits: the largest magnitude has the largest code. Its scale is rounded to bfloat16 first: half a unit of that is
// less than half a step of the largest codes, so no other code becomes the largest, and what is read and written again has
// the same bits.
template <typename Code>
struct Codes {
    template <typename T>
    static void put(const PagedCache& cache, std::byte* head, std::size_t at, const T* k, const T* v) {
        const std::size_t size = cache.size, group = at / GROUP * GROUP;
        auto* scales = reinterpret_cast<bf16*>(head);
        auto* codes = reinterpret_cast<std::uint8_t*>(head + cache.scale_bytes());
        std::uint8_t* value = codes + cache.block * size + at / 2 * size * 2 + at % 2;
        std::uint8_t* key = codes + group * size + (at - group) * 2;
        const std::size_t stride = std::min(GROUP, cache.block - group) * 2;
        const bf16 key_scale = scale(k, size), value_scale = scale(v, size);
        const bool whole = is_finite(value_scale);
        scales[at] = whole ? key_scale : narrow<bf16>(NOT_A_NUMBER);
        scales[cache.block + at] = whole ? value_scale : bf16{};
        encode(k, size, scales[at], [&](std::size_t i, std::uint8_t code) { key[i / 2 * stride + i % 2] = code; });
        encode(v, size, scales[cache.block + at], [&](std::size_t i, std::uint8_t code) { value[i * 2] = code; });
    }

private:
    static bool is_finite(bf16 x) { return (x.bits & 0x7f80u) != 0x7f80u; }

    // NaN where one is no number; 0 where all are as good as that.
    template <typename T>
    static bf16 scale(const T* x, std::size_t n) {
        std::int32_t most = 0;
        for (std::size_t i = 0; i < n; ++i) most = std::max(most, magnitude_bits(x[i]));
        if (most >= 0x7f800000) return narrow<bf16>(NOT_A_NUMBER);
        const float found = from_bits(static_cast<std::uint32_t>(most)) / Code::LIMIT;
        return found < std::numeric_limits<float>::min() ? bf16{} : narrow<bf16>(found);
    }

    template <typename T, typename F>
    static void encode(const T* x, std::size_t n, bf16 scale, F&& put) {
        const float step = widen(scale);
        if (step == 0.0f || !is_finite(scale)) {
            for (std::size_t i = 0; i < n; ++i) put(i, std::uint8_t{0});
            return;
        }
        constexpr std::size_t AT_ONCE = 64;
        for (std::size_t first = 0; first < n; first += AT_ONCE) {
            float wide[AT_ONCE] = {};
            std::uint8_t codes[AT_ONCE];
            const std::size_t count = std::min(AT_ONCE, n - first);
            for (std::size_t i = 0; i < count; ++i) wide[i] = widen(x[first + i]);
            for (std::size_t i = 0; i < AT_ONCE; ++i) codes[i] = Code::code(wide[i] / step);
            for (std::size_t i = 0; i < count; ++i) put(first + i, codes[i]);
        }
    }
};

// Tokens and pairs of elements change places: a run of up to 16 tokens of one group of one head at once.
template <typename How, typename T>
void write_tokens(const AttentionWrite& a, std::size_t first, std::size_t last) {
    const std::size_t block = a.cache.block;
    for (std::size_t begin = first, end; begin < last; begin = end) {
        const auto slot = static_cast<std::size_t>(a.slots[begin]);
        const std::size_t offset = slot % block, group = offset / GROUP, lane = offset % GROUP;
        const std::size_t tokens = std::min(GROUP, block - group * GROUP);
        end = begin + 1;
        while (end < last && end - begin < tokens - lane && a.slots[end] == a.slots[end - 1] + 1) ++end;
        std::byte* bytes = static_cast<std::byte*>(a.cache.base) + slot / block * a.cache.page_stride;
        for (std::size_t head = 0; head < a.cache.heads; ++head, bytes += a.cache.head_bytes())
            for (std::size_t token = begin; token < end; ++token)
                How::put(a.cache, bytes, offset + token - begin,
                         static_cast<const T*>(a.k) + token * a.k_stride + head * a.k_head_stride,
                         static_cast<const T*>(a.v) + token * a.v_stride + head * a.v_head_stride);
    }
}

template <typename How, typename T>
void write(const AttentionWrite& a, int threads) {
    const std::size_t elements = std::max<std::size_t>(1, a.cache.heads * a.cache.size);
    // Whole groups of 16 tokens, so that two threads seldom write to one line.
    const std::size_t piece = std::max(GROUP, PIECE / elements / GROUP * GROUP);
    parallel_for(threads, a.tokens, piece,
                 [&](std::size_t begin, std::size_t end) { write_tokens<How, T>(a, begin, end); });
}

template <typename How>
void write_any(const AttentionWrite& a, int threads) {
    a.dtype == DType::bfloat16 ? write<How, bf16>(a, threads) : write<How, float>(a, threads);
}

}  // namespace

void attention_write(const AttentionWrite& a, int threads) {
    switch (a.cache.dtype) {
        case DType::float32:
            return write<Elements<float, 1>, float>(a, threads);
        case DType::int8:
            return write_any<Codes<Int8>>(a, threads);
        case DType::float8:
            return write_any<Codes<E4M3>>(a, threads);
        default:
            return write_any<Elements<bf16, 2>>(a, threads);
    }
}

}  // namespace engine_cpu::ENGINE_CPU_LEVEL
