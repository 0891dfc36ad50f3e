// Single elements of the narrow types, to float32 and back, rounding to nearest even. Loops over them vectorise.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace engine_cpu::ENGINE_CPU_LEVEL {

struct bf16 {
    std::uint16_t bits;
};
struct fp16 {
    std::uint16_t bits;
};

inline float from_bits(std::uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}
inline std::uint32_t to_bits(float value) {
    std::uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}

inline float widen(bf16 x) { return from_bits(static_cast<std::uint32_t>(x.bits) << 16); }
inline float widen(float x) { return x; }
inline double widen(double x) { return x; }

template <typename To, typename From>
inline To narrow(From x) {
    return static_cast<To>(x);
}
template <>
inline bf16 narrow<bf16, float>(float x) {
    const std::uint32_t bits = to_bits(x);
    const std::uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
    return {static_cast<std::uint16_t>(nan ? 0x7fc0u | (bits >> 16 & 0x8000u) : rounded)};
}

#if defined(__F16C__)
inline float widen(fp16 x) { return _cvtsh_ss(x.bits); }
template <>
inline fp16 narrow<fp16, float>(float x) {
    return {_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT)};
}
#elif defined(ENGINE_CPU_NEON)
inline float widen(fp16 x) {
    __fp16 value;
    std::memcpy(&value, &x.bits, 2);
    return static_cast<float>(value);
}
template <>
inline fp16 narrow<fp16, float>(float x) {
    const auto value = static_cast<__fp16>(x);
    fp16 found;
    std::memcpy(&found.bits, &value, 2);
    return found;
}
#else
inline float widen(fp16 x) {
    const std::uint32_t sign = static_cast<std::uint32_t>(x.bits & 0x8000u) << 16;
    const std::uint32_t magnitude = x.bits & 0x7fffu;
    if (magnitude >= 0x7c00u) return from_bits(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
    // Scaling by 2^112 moves the exponent, and makes a subnormal normal without a branch.
    return from_bits(sign | to_bits(from_bits(magnitude << 13) * from_bits(0x77800000u)));
}
template <>
inline fp16 narrow<fp16, float>(float x) {
    const std::uint32_t bits = to_bits(x);
    const std::uint16_t sign = static_cast<std::uint16_t>(bits >> 16 & 0x8000u);
    const std::uint32_t magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return {static_cast<std::uint16_t>(sign | 0x7e00u)};
    if (magnitude >= 0x477ff000u) return {static_cast<std::uint16_t>(sign | 0x7c00u)};
    if (magnitude < 0x38800000u) {  // subnormal: adding 0.5 leaves the rounded bits at the end of the mantissa
        const std::uint32_t rounded = to_bits(from_bits(magnitude) + 0.5f) - 0x3f000000u;
        return {static_cast<std::uint16_t>(sign | rounded)};
    }
    const std::uint32_t rounded = magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u);
    return {static_cast<std::uint16_t>(sign | rounded >> 13)};
}
#endif

}  // namespace engine_cpu::ENGINE_CPU_LEVEL
