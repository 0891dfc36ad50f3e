// Keys and values of 8 bits: codes to bfloat16, which holds each of them exactly, and numbers to codes.
//
// Widening costs little beside reading memory: some instructions for 32 codes. It knows no code that is not a number
// (e4m3 has one for each sign, which nothing writes, and which reads as 480): so what nobody wrote, multiplied by a
// weight of 0, is 0.
#pragma once

#include <algorithm>
#include <type_traits>

#include "levels/lanes.h"

namespace engine_cpu::ENGINE_CPU_LEVEL {

// Eight bits of a whole number, -127 .. 127.
struct Int8 {
    static constexpr float LIMIT = 127.0f;

    static bf16 wide(std::uint8_t code) {
        return {static_cast<std::uint16_t>(to_bits(static_cast<float>(static_cast<std::int8_t>(code))) >> 16)};
    }
    // x: within a rounding of -LIMIT .. LIMIT
    static std::uint8_t code(float x) {
        return static_cast<std::uint8_t>(static_cast<std::int8_t>(__builtin_rintf(std::clamp(x, -LIMIT, LIMIT))));
    }

#if defined(__AVX512BW__)
    static __m512i wide32(const std::uint8_t* p) {
        const auto* halves = reinterpret_cast<const __m128i*>(p);
        const __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(halves)));
        const __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(halves + 1)));
        return upper_halves(_mm512_castps_si512(low), _mm512_castps_si512(high));
    }

private:
    // Of each 32 bits the upper 16, which are all that these floats have.
    static __m512i upper_halves(__m512i low, __m512i high) {
        const __m512i odd = _mm512_add_epi32(_mm512_set1_epi32(0x00030001),
                                             _mm512_mullo_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12,
                                                                                  13, 14, 15),
                                                                _mm512_set1_epi32(0x00040004)));
        return _mm512_permutex2var_epi16(low, odd, high);
    }
#elif defined(__AVX2__)
    static __m256i wide16(const std::uint8_t* p) {
        const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
        const __m256 low = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(codes));
        const __m256 high = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(codes, 8)));
        const __m256i both = _mm256_packus_epi32(_mm256_srli_epi32(_mm256_castps_si256(low), 16),
                                                 _mm256_srli_epi32(_mm256_castps_si256(high), 16));
        return _mm256_permute4x64_epi64(both, 0xd8);
    }
#endif
};

// A sign, 4 bits of an exponent with bias 7, 3 bits after the point; from 2^-9 to 448.
struct E4M3 {
    static constexpr float LIMIT = 448.0f;

    static bf16 wide(std::uint8_t code) {
        const std::uint32_t size = code & 0x7fu, sign = (code & 0x80u) << 8;
        const std::uint32_t small = to_bits(static_cast<float>(size) * 0x1p-9f) >> 16;
        return {static_cast<std::uint16_t>((size < 8 ? small : (size << 4) + 0x3c00u) | sign)};
    }
    static std::uint8_t code(float x) {
        const std::uint32_t sign = to_bits(x) >> 24 & 0x80u;
        const float size = std::min(from_bits(to_bits(x) & 0x7fffffffu), LIMIT);
        const std::uint32_t bits = to_bits(size);
        const std::uint32_t normal = ((bits + 0x7ffffu + (bits >> 20 & 1u)) >> 20) - (120u << 3);
        const auto small = static_cast<std::uint32_t>(static_cast<std::int32_t>(__builtin_rintf(size * 512.0f)));
        return static_cast<std::uint8_t>((size < 0x1p-6f ? small : normal) | sign);
    }

    // The exponent's bias is added where it stands in a bfloat16. With an exponent of 0 the number is one of 8.
#if defined(__AVX512BW__)
    static __m512i wide32(const std::uint8_t* p) {
        const __m512i code = _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
        const __m512i moved = _mm512_and_si512(_mm512_slli_epi16(code, 4), _mm512_set1_epi16(0x07f0));
        const __m512i normal = _mm512_add_epi16(moved, _mm512_set1_epi16(0x3c00));
        const __m512i small = _mm512_broadcast_i32x4(_mm_setr_epi16(0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60));
        const __mmask32 is_small = _mm512_testn_epi16_mask(code, _mm512_set1_epi16(0x78));
        const __m512i size = _mm512_mask_permutexvar_epi16(normal, is_small, code, small);
        return _mm512_ternarylogic_epi32(size, code, _mm512_set1_epi16(static_cast<short>(0x8000)), 0xf8);  // a | b & c
    }
#elif defined(__AVX2__)
    static __m256i wide16(const std::uint8_t* p) {
        const __m256i code = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
        const __m256i moved = _mm256_and_si256(_mm256_slli_epi16(code, 4), _mm256_set1_epi16(0x07f0));
        const __m256i normal = _mm256_add_epi16(moved, _mm256_set1_epi16(0x3c00));
        const __m256i small = _mm256_broadcastsi128_si256(
            _mm_setr_epi16(0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60));
        // the bytes of entry i are 2 i and 2 i + 1
        const __m256i entry = _mm256_mullo_epi16(_mm256_and_si256(code, _mm256_set1_epi16(7)), _mm256_set1_epi16(0x0202));
        const __m256i found = _mm256_shuffle_epi8(small, _mm256_add_epi16(entry, _mm256_set1_epi16(0x0100)));
        const __m256i is_small = _mm256_cmpeq_epi16(_mm256_and_si256(code, _mm256_set1_epi16(0x78)), _mm256_setzero_si256());
        const __m256i size = _mm256_blendv_epi8(normal, found, is_small);
        return _mm256_or_si256(size, _mm256_and_si256(code, _mm256_set1_epi16(static_cast<short>(0x8000))));
    }
#endif
};

// A cache's elements that meet queries or weights as those of `How` do.
template <typename How>
struct AsStored {
    using Element = typename How::Cache;
    using Wide = typename How::Wide;
    static Wide load(const Element* p) { return How::load(p); }
    static Wide load(const Element* p, std::size_t n) { return How::load(p, n); }
};
template <typename How, typename Code>
struct Decoded {
    using Element = std::uint8_t;
    using Wide = typename How::Wide;
    static Wide load(const std::uint8_t* p) {
#if defined(__AVX512BW__)
        return wide(Code::wide32(p));
#elif defined(__AVX2__)
        return halves(Code::wide16(p));
#else
        return load(p, Vec::WIDTH);
#endif
    }
    static Wide load(const std::uint8_t* p, std::size_t n) {
        bf16 part[2 * Vec::WIDTH] = {};
        for (std::size_t i = 0; i < 2 * n; ++i) part[i] = Code::wide(p[i]);
        return How::load(part);
    }

private:
#if defined(__AVX512BW__)
    static Wide wide(__m512i pairs) {
        if constexpr (sizeof(Wide) == sizeof(Two))
            return halves(pairs);
        else
            return reinterpret_cast<Wide>(pairs);
    }
#endif
};

// `to` [n] of the codes `from` [n]; memory that lies `ahead` bytes after them is asked for.
template <typename Code>
inline void widen_codes(const std::uint8_t* from, bf16* to, std::size_t n, std::ptrdiff_t ahead) {
    constexpr int LEVEL_2 = 2;
    std::size_t i = 0;
    for (; i + 64 <= n; i += 64) {
        __builtin_prefetch(reinterpret_cast<const char*>(from) + i + ahead, 0, LEVEL_2);
#if defined(__AVX512BW__)
        for (std::size_t j = i; j < i + 64; j += 32) _mm512_storeu_si512(to + j, Code::wide32(from + j));
#elif defined(__AVX2__)
        for (std::size_t j = i; j < i + 64; j += 16)
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + j), Code::wide16(from + j));
#else
        for (std::size_t j = i; j < i + 64; ++j) to[j] = Code::wide(from[j]);
#endif
    }
    for (; i < n; ++i) to[i] = Code::wide(from[i]);
}

}  // namespace engine_cpu::ENGINE_CPU_LEVEL
