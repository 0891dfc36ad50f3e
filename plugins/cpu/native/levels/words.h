// Registers of 32-bit lanes at this level, of floats and of integers, with what kernels over packed weights do to them.
// `scalar` has registers of one lane.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "levels/convert.h"

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(ENGINE_CPU_NEON)
#include <arm_neon.h>
#endif

namespace engine_cpu::ENGINE_CPU_LEVEL {

inline std::uint32_t load_word(const void* p) {
    std::uint32_t word;
    std::memcpy(&word, p, 4);
    return word;
}

#if defined(__AVX512F__)

struct Floats {
    static constexpr std::size_t LANES = 16;
    __m512 v;
    static Floats zero() { return {_mm512_setzero_ps()}; }
    static Floats all(float x) { return {_mm512_set1_ps(x)}; }
    static Floats load(const float* p) { return {_mm512_loadu_ps(p)}; }
    static Floats load(const fp16* p) {
        return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
    }
    static Floats load(const std::int8_t* p) {
        return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
    }
    static Floats fma(Floats a, Floats b, Floats c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
    friend Floats operator*(Floats a, Floats b) { return {_mm512_mul_ps(a.v, b.v)}; }
    void store(float* p) const { _mm512_storeu_ps(p, v); }
};

struct Words {
    static constexpr std::size_t LANES = 16;
    __m512i v;
    static Words zero() { return {_mm512_setzero_si512()}; }
    static Words all(std::uint32_t x) { return {_mm512_set1_epi32(static_cast<int>(x))}; }
    static Words load(const void* p) { return {_mm512_loadu_si512(p)}; }
    Words low_nibbles() const { return {_mm512_and_si512(v, _mm512_set1_epi8(15))}; }
    Words high_nibbles() const { return {_mm512_and_si512(_mm512_srli_epi16(v, 4), _mm512_set1_epi8(15))}; }
    Floats as_floats() const { return {_mm512_castsi512_ps(v)}; }
    // bfloat16s of a pair
    Floats earlier() const { return {_mm512_castsi512_ps(_mm512_slli_epi32(v, 16))}; }
    Floats later() const {
        return {_mm512_castsi512_ps(_mm512_and_si512(v, _mm512_set1_epi32(static_cast<int>(0xffff0000u))))};
    }
    Floats to_floats() const { return {_mm512_cvtepi32_ps(v)}; }
    friend Words operator-(Words a, Words b) { return {_mm512_sub_epi32(a.v, b.v)}; }
    friend Words operator&(Words a, Words b) { return {_mm512_and_si512(a.v, b.v)}; }
    friend Words operator|(Words a, Words b) { return {_mm512_or_si512(a.v, b.v)}; }
    // to the right; what comes over from a neighbour of the byte is the caller's to cut off
    template <int BITS>
    Words shifted() const {
        if constexpr (BITS >= 0)
            return {_mm512_srli_epi16(v, BITS)};
        else
            return {_mm512_slli_epi16(v, -BITS)};
    }
    // bytes below 16 -> table's
    Words looked_up(const std::uint8_t* table) const {
        return {_mm512_shuffle_epi8(
            _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table))), v)};
    }
    // sum + the four unsigned bytes of w times the four signed ones of x, lane by lane
    static Words dot(Words sum, Words w, Words x) {
#if defined(__AVX512VNNI__)
        // gcc 12 copies the sum from register to register around the intrinsic, and runs out of them
        asm("vpdpbusd %2, %1, %0" : "+v"(sum.v) : "v"(w.v), "v"(x.v));
        return sum;
#else
        const __m512i bytes = _mm512_set1_epi16(0xff);
        const __m512i even = _mm512_madd_epi16(_mm512_and_si512(w.v, bytes),
                                               _mm512_srai_epi16(_mm512_slli_epi16(x.v, 8), 8));
        const __m512i odd = _mm512_madd_epi16(_mm512_srli_epi16(w.v, 8), _mm512_srai_epi16(x.v, 8));
        return {_mm512_add_epi32(sum.v, _mm512_add_epi32(even, odd))};
#endif
    }
    // the same, where the bytes of w are below 64 and those of x no -128: the sum of two products fits 16 bits
    static Words dot_small(Words sum, Words w, Words x) {
#if defined(__AVX512VNNI__)
        return dot(sum, w, x);
#else
        const __m512i pairs = _mm512_maddubs_epi16(w.v, x.v);
        return {_mm512_add_epi32(sum.v, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)))};
#endif
    }
};

#elif defined(__AVX2__)

struct Floats {
    static constexpr std::size_t LANES = 8;
    __m256 v;
    static Floats zero() { return {_mm256_setzero_ps()}; }
    static Floats all(float x) { return {_mm256_set1_ps(x)}; }
    static Floats load(const float* p) { return {_mm256_loadu_ps(p)}; }
    static Floats load(const fp16* p) {
        return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
    }
    static Floats load(const std::int8_t* p) {
        return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))))};
    }
    static Floats fma(Floats a, Floats b, Floats c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
    friend Floats operator*(Floats a, Floats b) { return {_mm256_mul_ps(a.v, b.v)}; }
    void store(float* p) const { _mm256_storeu_ps(p, v); }
};

struct Words {
    static constexpr std::size_t LANES = 8;
    __m256i v;
    static Words zero() { return {_mm256_setzero_si256()}; }
    static Words all(std::uint32_t x) { return {_mm256_set1_epi32(static_cast<int>(x))}; }
    static Words load(const void* p) { return {_mm256_loadu_si256(static_cast<const __m256i*>(p))}; }
    Words low_nibbles() const { return {_mm256_and_si256(v, _mm256_set1_epi8(15))}; }
    Words high_nibbles() const { return {_mm256_and_si256(_mm256_srli_epi16(v, 4), _mm256_set1_epi8(15))}; }
    Floats as_floats() const { return {_mm256_castsi256_ps(v)}; }
    Floats earlier() const { return {_mm256_castsi256_ps(_mm256_slli_epi32(v, 16))}; }
    Floats later() const {
        return {_mm256_castsi256_ps(_mm256_and_si256(v, _mm256_set1_epi32(static_cast<int>(0xffff0000u))))};
    }
    Floats to_floats() const { return {_mm256_cvtepi32_ps(v)}; }
    friend Words operator-(Words a, Words b) { return {_mm256_sub_epi32(a.v, b.v)}; }
    friend Words operator&(Words a, Words b) { return {_mm256_and_si256(a.v, b.v)}; }
    friend Words operator|(Words a, Words b) { return {_mm256_or_si256(a.v, b.v)}; }
    template <int BITS>
    Words shifted() const {
        if constexpr (BITS >= 0)
            return {_mm256_srli_epi16(v, BITS)};
        else
            return {_mm256_slli_epi16(v, -BITS)};
    }
    Words looked_up(const std::uint8_t* table) const {
        return {_mm256_shuffle_epi8(
            _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table))), v)};
    }
    static Words dot(Words sum, Words w, Words x) {
        // pairs of products do not fit the 16 bits of vpmaddubsw, so both sides are widened first
        const __m256i bytes = _mm256_set1_epi16(0xff);
        const __m256i even = _mm256_madd_epi16(_mm256_and_si256(w.v, bytes),
                                               _mm256_srai_epi16(_mm256_slli_epi16(x.v, 8), 8));
        const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(w.v, 8), _mm256_srai_epi16(x.v, 8));
        return {_mm256_add_epi32(sum.v, _mm256_add_epi32(even, odd))};
    }
    static Words dot_small(Words sum, Words w, Words x) {
        const __m256i pairs = _mm256_maddubs_epi16(w.v, x.v);
        return {_mm256_add_epi32(sum.v, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)))};
    }
};

#elif defined(ENGINE_CPU_NEON)

struct Floats {
    static constexpr std::size_t LANES = 4;
    float32x4_t v;
    static Floats zero() { return {vdupq_n_f32(0.0f)}; }
    static Floats all(float x) { return {vdupq_n_f32(x)}; }
    static Floats load(const float* p) { return {vld1q_f32(p)}; }
    static Floats load(const fp16* p) { return {vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(&p->bits)))}; }
    static Floats load(const std::int8_t* p) {
        return {vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_u32(vdup_n_u32(load_word(p)))))))};
    }
    static Floats fma(Floats a, Floats b, Floats c) { return {vfmaq_f32(c.v, a.v, b.v)}; }
    friend Floats operator*(Floats a, Floats b) { return {vmulq_f32(a.v, b.v)}; }
    void store(float* p) const { vst1q_f32(p, v); }
};

struct Words {
    static constexpr std::size_t LANES = 4;
    uint32x4_t v;
    static Words zero() { return {vdupq_n_u32(0)}; }
    static Words all(std::uint32_t x) { return {vdupq_n_u32(x)}; }
    static Words load(const void* p) { return {vreinterpretq_u32_u8(vld1q_u8(static_cast<const std::uint8_t*>(p)))}; }
    Words low_nibbles() const { return {vandq_u32(v, vdupq_n_u32(0x0f0f0f0fu))}; }
    Words high_nibbles() const { return {vreinterpretq_u32_u8(vshrq_n_u8(vreinterpretq_u8_u32(v), 4))}; }
    Floats as_floats() const { return {vreinterpretq_f32_u32(v)}; }
    Floats earlier() const { return {vreinterpretq_f32_u32(vshlq_n_u32(v, 16))}; }
    Floats later() const { return {vreinterpretq_f32_u32(vandq_u32(v, vdupq_n_u32(0xffff0000u)))}; }
    Floats to_floats() const { return {vcvtq_f32_s32(vreinterpretq_s32_u32(v))}; }
    friend Words operator-(Words a, Words b) { return {vsubq_u32(a.v, b.v)}; }
    friend Words operator&(Words a, Words b) { return {vandq_u32(a.v, b.v)}; }
    friend Words operator|(Words a, Words b) { return {vorrq_u32(a.v, b.v)}; }
    template <int BITS>
    Words shifted() const {
        if constexpr (BITS > 0)
            return {vshrq_n_u32(v, BITS)};
        else if constexpr (BITS < 0)
            return {vshlq_n_u32(v, -BITS)};
        else
            return *this;
    }
    Words looked_up(const std::uint8_t* table) const {
        return {vreinterpretq_u32_u8(vqtbl1q_u8(vld1q_u8(table), vreinterpretq_u8_u32(v)))};
    }
    static Words dot_small(Words sum, Words w, Words x) { return dot(sum, w, x); }
    static Words dot(Words sum, Words w, Words x) {
#if defined(__ARM_FEATURE_MATMUL_INT8)
        return {vreinterpretq_u32_s32(vusdotq_s32(vreinterpretq_s32_u32(sum.v), vreinterpretq_u8_u32(w.v),
                                                  vreinterpretq_s8_u32(x.v)))};
#else
        // a product of an unsigned and a signed byte fits 16 bits, and only their sums have to be wider
        const int16x8_t codes = vreinterpretq_s16_u32(w.v), bytes = vreinterpretq_s16_u32(x.v);
        const int16x8_t even = vmulq_s16(vandq_s16(codes, vdupq_n_s16(0xff)), vshrq_n_s16(vshlq_n_s16(bytes, 8), 8));
        const int16x8_t odd = vmulq_s16(vreinterpretq_s16_u16(vshrq_n_u16(vreinterpretq_u16_u32(w.v), 8)),
                                        vshrq_n_s16(bytes, 8));
        return {vreinterpretq_u32_s32(vpadalq_s16(vpadalq_s16(vreinterpretq_s32_u32(sum.v), even), odd))};
#endif
    }
};

#else

struct Floats {
    static constexpr std::size_t LANES = 1;
    float v;
    static Floats zero() { return {0.0f}; }
    static Floats all(float x) { return {x}; }
    static Floats load(const float* p) { return {*p}; }
    static Floats load(const fp16* p) { return {widen(*p)}; }
    static Floats load(const std::int8_t* p) { return {static_cast<float>(*p)}; }
    static Floats fma(Floats a, Floats b, Floats c) { return {std::fma(a.v, b.v, c.v)}; }  // rounded as at other levels
    friend Floats operator*(Floats a, Floats b) { return {a.v * b.v}; }
    void store(float* p) const { *p = v; }
};

struct Words {
    static constexpr std::size_t LANES = 1;
    std::uint32_t v;
    static Words zero() { return {0}; }
    static Words all(std::uint32_t x) { return {x}; }
    static Words load(const void* p) { return {load_word(p)}; }
    Words low_nibbles() const { return {v & 0x0f0f0f0fu}; }
    Words high_nibbles() const { return {v >> 4 & 0x0f0f0f0fu}; }
    Floats as_floats() const { return {from_bits(v)}; }
    Floats earlier() const { return {from_bits(v << 16)}; }
    Floats later() const { return {from_bits(v & 0xffff0000u)}; }
    Floats to_floats() const { return {static_cast<float>(static_cast<std::int32_t>(v))}; }
    friend Words operator-(Words a, Words b) { return {a.v - b.v}; }
    friend Words operator&(Words a, Words b) { return {a.v & b.v}; }
    friend Words operator|(Words a, Words b) { return {a.v | b.v}; }
    template <int BITS>
    Words shifted() const {
        if constexpr (BITS >= 0)
            return {v >> BITS};
        else
            return {v << -BITS};
    }
    Words looked_up(const std::uint8_t* table) const {
        std::uint32_t found = 0;
        for (int i = 0; i < 32; i += 8) found |= static_cast<std::uint32_t>(table[v >> i & 15]) << i;
        return {found};
    }
    static Words dot_small(Words sum, Words w, Words x) { return dot(sum, w, x); }
    static Words dot(Words sum, Words w, Words x) {
        std::int32_t added = 0;
        for (int i = 0; i < 32; i += 8)
            added += static_cast<std::int32_t>(w.v >> i & 0xff) * static_cast<std::int8_t>(x.v >> i & 0xff);
        return {sum.v + static_cast<std::uint32_t>(added)};
    }
};

#endif

}  // namespace engine_cpu::ENGINE_CPU_LEVEL
