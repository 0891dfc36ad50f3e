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

// Tokens and pairs of elements change places: a run of up to 16 tokens of one group of one head at once.
//
// A vector of values that are not all finite is stored as zeros, and its key as NaN. Attention multiplies values that a
// query does not see by 0, and 0 * NaN is NaN; but their scores it overwrites. Who sees the key still gets NaN.
template <typename Cache, std::size_t PAIR, typename T>
void write_tokens(const AttentionWrite& a, std::size_t first, std::size_t last) {
    const std::size_t size = a.cache.size, block = a.cache.block;
    for (std::size_t begin = first, end; begin < last; begin = end) {
        const auto slot = static_cast<std::size_t>(a.slots[begin]);
        const std::size_t offset = slot % block, group = offset / GROUP, lane = offset % GROUP;
        const std::size_t tokens = std::min(GROUP, block - group * GROUP), stride = tokens * PAIR;
        end = begin + 1;
        while (end < last && end - begin < tokens - lane && a.slots[end] == a.slots[end - 1] + 1) ++end;
        auto* page = reinterpret_cast<Cache*>(static_cast<std::byte*>(a.cache.base) + slot / block * a.cache.page_stride);
        for (std::size_t head = 0; head < a.cache.heads; ++head) {
            Cache* keys = page + head * 2 * block * size;
            Cache* values = keys + block * size;
            for (std::size_t token = begin; token < end; ++token) {
                const std::size_t at = offset + token - begin;
                const T* k = static_cast<const T*>(a.k) + token * a.k_stride + head * a.k_head_stride;
                const T* v = static_cast<const T*>(a.v) + token * a.v_stride + head * a.v_head_stride;
                Cache* to = keys + group * GROUP * size + (at - group * GROUP) * PAIR;
                Cache* value = values + at / PAIR * size * PAIR + at % PAIR;
                if (!finite<Cache>(v, size)) {
                    for (std::size_t i = 0; i < size; i += PAIR, to += stride) std::fill_n(to, PAIR, narrow<Cache>(NOT_A_NUMBER));
                    for (std::size_t i = 0; i < size; ++i) value[i * PAIR] = Cache{};
                    continue;
                }
                for (std::size_t i = 0; i < size; i += PAIR, to += stride)
                    for (std::size_t j = 0; j < PAIR; ++j) to[j] = narrow<Cache>(widen(k[i + j]));
                for (std::size_t i = 0; i < size; ++i) value[i * PAIR] = narrow<Cache>(widen(v[i]));
            }
        }
    }
}

template <typename Cache, std::size_t PAIR, typename T>
void write(const AttentionWrite& a, int threads) {
    const std::size_t elements = std::max<std::size_t>(1, a.cache.heads * a.cache.size);
    // Whole groups of 16 tokens, so that two threads seldom write to one line.
    const std::size_t piece = std::max(GROUP, PIECE / elements / GROUP * GROUP);
    parallel_for(threads, a.tokens, piece,
                 [&](std::size_t begin, std::size_t end) { write_tokens<Cache, PAIR, T>(a, begin, end); });
}

}  // namespace

void attention_write(const AttentionWrite& a, int threads) {
    if (a.cache.dtype == DType::float32)
        write<float, 1, float>(a, threads);
    else if (a.dtype == DType::bfloat16)
        write<bf16, 2, bf16>(a, threads);
    else
        write<bf16, 2, float>(a, threads);
}

}  // namespace engine_cpu::ENGINE_CPU_LEVEL
