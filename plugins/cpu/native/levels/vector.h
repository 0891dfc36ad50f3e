// A register of floats at this level, with what the kernels do to it. `scalar` has registers of one element, on ARM too,
// where every compiler knows NEON: ENGINE_CPU_NEON says that a level is to use it.
#pragma once

#include <cstddef>

#include "levels/convert.h"

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(ENGINE_CPU_NEON)
#include <arm_neon.h>
#endif

namespace engine_cpu::ENGINE_CPU_LEVEL {

#if defined(__AVX512F__)

struct Vec {
    static constexpr std::size_t WIDTH = 16;
    __m512 v;
    static Vec zero() { return {_mm512_setzero_ps()}; }
    static Vec load(const float* p) { return {_mm512_loadu_ps(p)}; }
    static Vec load(const float* p, std::size_t n) { return {_mm512_maskz_loadu_ps(mask(n), p)}; }
    static Vec load(const bf16* p) { return from(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
    static Vec load(const bf16* p, std::size_t n) { return from(_mm256_maskz_loadu_epi16(mask(n), p)); }
    static Vec fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
    float sum() const { return _mm512_reduce_add_ps(v); }

private:
    static __mmask16 mask(std::size_t n) { return static_cast<__mmask16>((1u << n) - 1); }
    static Vec from(__m256i x) { return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16))}; }
};

#elif defined(__AVX2__)

struct Vec {
    static constexpr std::size_t WIDTH = 8;
    __m256 v;
    static Vec zero() { return {_mm256_setzero_ps()}; }
    static Vec load(const float* p) { return {_mm256_loadu_ps(p)}; }
    static Vec load(const bf16* p) {
        const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
        return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16))};
    }
    template <typename T>
    static Vec load(const T* p, std::size_t n) {
        float part[WIDTH] = {};
        for (std::size_t i = 0; i < n; ++i) part[i] = widen(p[i]);
        return load(part);
    }
    static Vec fma(Vec a, Vec b, Vec c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
    float sum() const {
        const __m128 half = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
        const __m128 two = _mm_add_ps(half, _mm_movehl_ps(half, half));
        return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
    }
};

#elif defined(ENGINE_CPU_NEON)

struct Vec {
    static constexpr std::size_t WIDTH = 4;
    float32x4_t v;
    static Vec zero() { return {vdupq_n_f32(0.0f)}; }
    static Vec load(const float* p) { return {vld1q_f32(p)}; }
    static Vec load(const bf16* p) { return {vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(&p->bits), 16))}; }
    template <typename T>
    static Vec load(const T* p, std::size_t n) {
        float part[WIDTH] = {};
        for (std::size_t i = 0; i < n; ++i) part[i] = widen(p[i]);
        return load(part);
    }
    static Vec fma(Vec a, Vec b, Vec c) { return {vfmaq_f32(c.v, a.v, b.v)}; }
    float sum() const { return vaddvq_f32(v); }
};

#else

struct Vec {
    static constexpr std::size_t WIDTH = 1;
    float v;
    static Vec zero() { return {0.0f}; }
    template <typename T>
    static Vec load(const T* p) {
        return {widen(*p)};
    }
    template <typename T>
    static Vec load(const T* p, std::size_t) {
        return load(p);
    }
    static Vec fma(Vec a, Vec b, Vec c) { return {a.v * b.v + c.v}; }
    float sum() const { return v; }
};

#endif

}  // namespace engine_cpu::ENGINE_CPU_LEVEL
