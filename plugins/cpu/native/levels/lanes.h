// More of what kernels do to registers of floats: arithmetic, maxima, powers of two; and how a cache's elements meet the
// queries and weights that they are multiplied with.
#pragma once

#include <cmath>
#include <limits>

#include "levels/vector.h"

namespace engine_cpu::ENGINE_CPU_LEVEL {

constexpr float INFINITE = std::numeric_limits<float>::infinity();

// 2^f for f in [-0.5, 0.5], good to 8e-8 of it (fitted for the smallest largest error).
constexpr float POWERS[] = {1.0000001192092896f, 0.6931469440460205f,   0.24022120237350464f,
                            0.05550713092088699f, 0.009675540961325169f, 0.001327647129073739f};

#if defined(__AVX512F__)

inline Vec splat(float x) { return {_mm512_set1_ps(x)}; }
inline Vec operator+(Vec a, Vec b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Vec operator-(Vec a, Vec b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline Vec operator*(Vec a, Vec b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Vec operator/(Vec a, Vec b) { return {_mm512_div_ps(a.v, b.v)}; }
inline Vec maximum(Vec a, Vec b) { return {_mm512_max_ps(a.v, b.v)}; }  // b where one is NaN
inline Vec magnitude(Vec a) { return {_mm512_abs_ps(a.v)}; }
inline float largest(Vec a) { return _mm512_reduce_max_ps(a.v); }
inline void store(float* p, Vec a) { _mm512_storeu_ps(p, a.v); }
inline void store(float* p, Vec a, std::size_t n) {
    _mm512_mask_storeu_ps(p, static_cast<__mmask16>((1u << n) - 1), a.v);
}
inline Vec below(Vec a, float limit, Vec yes, Vec no) {
    return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, _mm512_set1_ps(limit), _CMP_LT_OQ), no.v, yes.v)};
}
inline Vec numbered() {
    return {_mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)};
}
// x in the lanes from `begin` to `end` - 1, `other` in the rest.
inline Vec keep(Vec x, std::ptrdiff_t begin, std::ptrdiff_t end, Vec other) {
    const unsigned upper = end >= 16 ? 0xffffu : end <= 0 ? 0u : (1u << end) - 1;
    const unsigned lower = begin >= 16 ? 0xffffu : begin <= 0 ? 0u : (1u << begin) - 1;
    return {_mm512_mask_blend_ps(static_cast<__mmask16>(upper & ~lower), other.v, x.v)};
}
inline Vec rounded(Vec x) { return {_mm512_roundscale_ps(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
// x * 2^n for a whole n between -200 and 127
inline Vec scaled(Vec x, Vec n) { return {_mm512_scalef_ps(x.v, n.v)}; }
inline void store(bf16* p, Vec a) {
#if defined(__AVX512BF16__)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(a.v)));
#else
    const __m512i bits = _mm512_castps_si512(a.v);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    const __mmask16 nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
    const __m512i kept = _mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7fc00000));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(_mm512_srli_epi32(kept, 16)));
#endif
}

#elif defined(__AVX2__)

inline Vec splat(float x) { return {_mm256_set1_ps(x)}; }
inline Vec operator+(Vec a, Vec b) { return {_mm256_add_ps(a.v, b.v)}; }
inline Vec operator-(Vec a, Vec b) { return {_mm256_sub_ps(a.v, b.v)}; }
inline Vec operator*(Vec a, Vec b) { return {_mm256_mul_ps(a.v, b.v)}; }
inline Vec operator/(Vec a, Vec b) { return {_mm256_div_ps(a.v, b.v)}; }
inline Vec maximum(Vec a, Vec b) { return {_mm256_max_ps(a.v, b.v)}; }
inline Vec magnitude(Vec a) { return {_mm256_andnot_ps(_mm256_set1_ps(-0.0f), a.v)}; }
inline float largest(Vec a) {
    const __m128 half = _mm_max_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
    const __m128 two = _mm_max_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}
inline void store(float* p, Vec a) { _mm256_storeu_ps(p, a.v); }
inline void store(float* p, Vec a, std::size_t n) {
    float part[8];
    store(part, a);
    for (std::size_t i = 0; i < n; ++i) p[i] = part[i];
}
inline Vec below(Vec a, float limit, Vec yes, Vec no) {
    return {_mm256_blendv_ps(no.v, yes.v, _mm256_cmp_ps(a.v, _mm256_set1_ps(limit), _CMP_LT_OQ))};
}
inline Vec numbered() { return {_mm256_setr_ps(0, 1, 2, 3, 4, 5, 6, 7)}; }
inline Vec keep(Vec x, std::ptrdiff_t begin, std::ptrdiff_t end, Vec other) {
    const float from = begin < 0 ? 0 : begin > 8 ? 8 : static_cast<float>(begin);
    const float to = end < 0 ? 0 : end > 8 ? 8 : static_cast<float>(end);
    const __m256 lane = numbered().v;
    const __m256 inside = _mm256_and_ps(_mm256_cmp_ps(lane, _mm256_set1_ps(from), _CMP_GE_OQ),
                                        _mm256_cmp_ps(lane, _mm256_set1_ps(to), _CMP_LT_OQ));
    return {_mm256_blendv_ps(other.v, x.v, inside)};
}
inline Vec rounded(Vec x) { return {_mm256_round_ps(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
inline Vec scaled(Vec x, Vec n) {  // 0 for n below -126
    const __m256 tiny = _mm256_cmp_ps(n.v, _mm256_set1_ps(-126.0f), _CMP_LT_OQ);
    const __m256i exponent = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n.v), _mm256_set1_epi32(127)), 23);
    return {_mm256_andnot_ps(tiny, _mm256_mul_ps(x.v, _mm256_castsi256_ps(exponent)))};
}
inline void store(bf16* p, Vec a) {
    float part[8];
    store(part, a);
    for (int i = 0; i < 8; ++i) p[i] = narrow<bf16>(part[i]);
}

#elif defined(ENGINE_CPU_NEON)

inline Vec splat(float x) { return {vdupq_n_f32(x)}; }
inline Vec operator+(Vec a, Vec b) { return {vaddq_f32(a.v, b.v)}; }
inline Vec operator-(Vec a, Vec b) { return {vsubq_f32(a.v, b.v)}; }
inline Vec operator*(Vec a, Vec b) { return {vmulq_f32(a.v, b.v)}; }
inline Vec operator/(Vec a, Vec b) { return {vdivq_f32(a.v, b.v)}; }
inline Vec maximum(Vec a, Vec b) { return {vbslq_f32(vcgtq_f32(a.v, b.v), a.v, b.v)}; }  // b where one is NaN
inline Vec magnitude(Vec a) { return {vabsq_f32(a.v)}; }
inline float largest(Vec a) { return vmaxnmvq_f32(a.v); }
inline void store(float* p, Vec a) { vst1q_f32(p, a.v); }
inline void store(float* p, Vec a, std::size_t n) {
    float part[4];
    store(part, a);
    for (std::size_t i = 0; i < n; ++i) p[i] = part[i];
}
inline Vec below(Vec a, float limit, Vec yes, Vec no) {
    return {vbslq_f32(vcltq_f32(a.v, vdupq_n_f32(limit)), yes.v, no.v)};
}
inline Vec numbered() {
    constexpr float NUMBERS[] = {0, 1, 2, 3};
    return {vld1q_f32(NUMBERS)};
}
inline Vec keep(Vec x, std::ptrdiff_t begin, std::ptrdiff_t end, Vec other) {
    const float from = begin < 0 ? 0 : begin > 4 ? 4 : static_cast<float>(begin);
    const float to = end < 0 ? 0 : end > 4 ? 4 : static_cast<float>(end);
    const float32x4_t lane = numbered().v;
    const uint32x4_t inside = vandq_u32(vcgeq_f32(lane, vdupq_n_f32(from)), vcltq_f32(lane, vdupq_n_f32(to)));
    return {vbslq_f32(inside, x.v, other.v)};
}
inline Vec rounded(Vec x) { return {vrndnq_f32(x.v)}; }
inline Vec scaled(Vec x, Vec n) {  // 0 for n below -126
    const int32x4_t exponent = vshlq_n_s32(vaddq_s32(vcvtq_s32_f32(n.v), vdupq_n_s32(127)), 23);
    const uint32x4_t found = vreinterpretq_u32_f32(vmulq_f32(x.v, vreinterpretq_f32_s32(exponent)));
    return {vreinterpretq_f32_u32(vbicq_u32(found, vcltq_f32(n.v, vdupq_n_f32(-126.0f))))};
}
inline void store(bf16* p, Vec a) {
#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
    vst1_u16(&p->bits, vreinterpret_u16_bf16(vcvt_bf16_f32(a.v)));
#else
    const uint32x4_t bits = vreinterpretq_u32_f32(a.v);
    const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    const uint32x4_t rounded = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
    const uint32x4_t kept = vbslq_u32(vceqq_f32(a.v, a.v), rounded, vdupq_n_u32(0x7fc00000));
    vst1_u16(&p->bits, vshrn_n_u32(kept, 16));
#endif
}

#else

inline Vec splat(float x) { return {x}; }
inline Vec operator+(Vec a, Vec b) { return {a.v + b.v}; }
inline Vec operator-(Vec a, Vec b) { return {a.v - b.v}; }
inline Vec operator*(Vec a, Vec b) { return {a.v * b.v}; }
inline Vec operator/(Vec a, Vec b) { return {a.v / b.v}; }
inline Vec maximum(Vec a, Vec b) { return {a.v > b.v ? a.v : b.v}; }  // b where one is NaN
inline Vec magnitude(Vec a) { return {std::fabs(a.v)}; }
inline float largest(Vec a) { return a.v; }
inline void store(float* p, Vec a) { *p = a.v; }
inline void store(float* p, Vec a, std::size_t) { *p = a.v; }
inline Vec below(Vec a, float limit, Vec yes, Vec no) { return a.v < limit ? yes : no; }
inline Vec numbered() { return {0.0f}; }
inline Vec keep(Vec x, std::ptrdiff_t begin, std::ptrdiff_t end, Vec other) { return begin <= 0 && end > 0 ? x : other; }
inline Vec rounded(Vec x) { return {std::nearbyint(x.v)}; }
inline Vec scaled(Vec x, Vec n) { return std::isnan(n.v) ? n : Vec{std::ldexp(x.v, static_cast<int>(n.v))}; }
inline void store(bf16* p, Vec a) { *p = narrow<bf16>(a.v); }

#endif

inline Vec power(Vec f, Vec n) {  // 2^(f + n), f in [-0.5, 0.5]
    Vec p = splat(POWERS[5]);
    for (int i = 4; i >= 0; --i) p = Vec::fma(p, f, splat(POWERS[i]));
    return scaled(p, n);
}

// 2^x for x up to 127; 0 below -149.
inline Vec exp2(Vec x) {
    x = maximum(splat(-200.0f), x);  // x where it is NaN
    const Vec n = rounded(x);
    return power(x - n, n);
}

// e^x for x up to 88, good to two units in the last place; 0 below -103.
inline Vec exponential(Vec x) {
    x = maximum(splat(-138.0f), x);
    const Vec n = rounded(x * splat(1.44269504088896341f));
    const Vec r = Vec::fma(n, splat(2.12194440e-4f), Vec::fma(n, splat(-0.693359375f), x));  // x - n * ln 2, in two parts
    return power(r * splat(1.44269504088896341f), n);
}

inline float exp2(float x) {
    float lanes[Vec::WIDTH];
    store(lanes, exp2(splat(x)));
    return lanes[0];
}

// tanh, good to 2e-7 of it: by its series near 0, where the other form cancels.
inline Vec tanh(Vec x) {
    const Vec square = x * x;
    Vec series = splat(62.0f / 2835);
    for (const float c : {-17.0f / 315, 2.0f / 15, -1.0f / 3, 1.0f}) series = Vec::fma(series, square, splat(c));
    const Vec size = magnitude(x);
    // (1 - e) / (1 + e) with e = exp(-2 |x|); the sign is x / |x|
    const Vec e = exp2(size * splat(-2.885390081777927f));
    const Vec far = (splat(1.0f) - e) / (splat(1.0f) + e) * (x / maximum(splat(1e-30f), size));
    return below(size, 0.3f, x * series, far);
}

// How elements of a cache meet those of queries or weights, PAIR of each at once: `Wide` holds WIDTH of the cache's
// pairs, `Spread` one pair of the others in every lane.

struct Singles {
    using Cache = float;
    using Operand = float;
    using Wide = Vec;
    using Spread = Vec;
    static constexpr std::size_t PAIR = 1;
    static Wide load(const float* p) { return Vec::load(p); }
    static Wide load(const float* p, std::size_t n) { return Vec::load(p, n); }
    static Spread spread(const float* p) { return splat(*p); }
    static Vec dot(Vec sum, Spread a, Wide b) { return Vec::fma(a, b, sum); }
};

struct Two {
    Vec even, odd;
};

#if defined(__AVX512F__)
inline Two halves(__m512i pairs) {
    return {{_mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16))},
            {_mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xffff0000u))))}};
}
inline Two load_pairs(const bf16* p) { return halves(_mm512_loadu_si512(p)); }
inline Two load_pairs(const bf16* p, std::size_t n) {
    return halves(_mm512_maskz_loadu_epi32(static_cast<__mmask16>((1u << n) - 1), p));
}
#elif defined(__AVX2__)
inline Two halves(__m256i pairs) {
    return {{_mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16))},
            {_mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(static_cast<int>(0xffff0000u))))}};
}
inline Two load_pairs(const bf16* p) { return halves(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
inline Two load_pairs(const bf16* p, std::size_t n) {
    bf16 part[16] = {};
    std::memcpy(part, p, 4 * n);
    return load_pairs(part);
}
#elif defined(ENGINE_CPU_NEON)
inline Two load_pairs(const bf16* p) {
    const uint32x4_t pairs = vreinterpretq_u32_u16(vld1q_u16(&p->bits));
    return {{vreinterpretq_f32_u32(vshlq_n_u32(pairs, 16))},
            {vreinterpretq_f32_u32(vandq_u32(pairs, vdupq_n_u32(0xffff0000u)))}};
}
inline Two load_pairs(const bf16* p, std::size_t n) {
    bf16 part[8] = {};
    std::memcpy(part, p, 4 * n);
    return load_pairs(part);
}
#else
inline Two load_pairs(const bf16* p) { return {{widen(p[0])}, {widen(p[1])}}; }
inline Two load_pairs(const bf16* p, std::size_t) { return load_pairs(p); }
#endif

// bfloat16 widened: operands are float32, so that one instruction spreads each.
struct WidenedPairs {
    using Cache = bf16;
    using Operand = float;
    using Wide = Two;
    using Spread = Two;
    static constexpr std::size_t PAIR = 2;
    static Wide load(const bf16* p) { return load_pairs(p); }
    static Wide load(const bf16* p, std::size_t n) { return load_pairs(p, n); }
    static Spread spread(const float* p) { return {splat(p[0]), splat(p[1])}; }
    static Vec dot(Vec sum, Spread a, Wide b) { return Vec::fma(a.odd, b.odd, Vec::fma(a.even, b.even, sum)); }
};

#if defined(__AVX512BF16__)
struct BF16Pairs {
    using Cache = bf16;
    using Operand = bf16;
    using Wide = __m512bh;
    using Spread = __m512bh;
    static constexpr std::size_t PAIR = 2;
    static Wide load(const bf16* p) { return reinterpret_cast<Wide>(_mm512_loadu_si512(p)); }
    static Wide load(const bf16* p, std::size_t n) {
        return reinterpret_cast<Wide>(_mm512_maskz_loadu_epi32(static_cast<__mmask16>((1u << n) - 1), p));
    }
    static Spread spread(const bf16* p) {
        int pair;
        std::memcpy(&pair, p, 4);
        return reinterpret_cast<Spread>(_mm512_set1_epi32(pair));
    }
    static Vec dot(Vec sum, Spread a, Wide b) { return {_mm512_dpbf16_ps(sum.v, a, b)}; }
};
#elif defined(ENGINE_CPU_NEON) && defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
struct BF16Pairs {
    using Cache = bf16;
    using Operand = bf16;
    using Wide = bfloat16x8_t;
    using Spread = bfloat16x8_t;
    static constexpr std::size_t PAIR = 2;
    static Wide load(const bf16* p) { return vreinterpretq_bf16_u16(vld1q_u16(&p->bits)); }
    static Wide load(const bf16* p, std::size_t n) {
        bf16 part[8] = {};
        std::memcpy(part, p, 4 * n);
        return load(part);
    }
    static Spread spread(const bf16* p) {
        std::uint32_t pair;
        std::memcpy(&pair, p, 4);
        return vreinterpretq_bf16_u32(vdupq_n_u32(pair));
    }
    static Vec dot(Vec sum, Spread a, Wide b) { return {vbfdotq_f32(sum.v, a, b)}; }
};
#else
using BF16Pairs = WidenedPairs;
#endif

}  // namespace engine_cpu::ENGINE_CPU_LEVEL
