// Functions of float32, of arithmetic alone, so that loops over them become this level's instructions.
#pragma once

#include "levels/convert.h"

namespace engine_cpu::ENGINE_CPU_LEVEL {

// exp(x) for x <= 88, good to two units in the last place (Cephes' polynomial). Below -87 it is as good as 0.
inline float exponential(float x) {
    x = x < -87.0f ? -87.0f : x;
    x = x > 88.0f ? 88.0f : x;
    const float shifted = x * 1.44269504088896341f + 12582912.0f;  // 1.5 * 2^23: the sum's last bits are the integer
    const float n = shifted - 12582912.0f;
    const float r = x - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return p * from_bits((to_bits(shifted) + 127u) << 23);
}

// tanh(x): a polynomial near 0 (Cephes'), where the other form would lose its digits.
inline float hyperbolic_tangent(float x) {
    const float square = x * x;
    float near = -5.70498872745e-3f;
    near = near * square + 2.06390887954e-2f;
    near = near * square - 5.37397155531e-2f;
    near = near * square + 1.33314422036e-1f;
    near = near * square - 3.33332819422e-1f;
    near = near * square * x + x;
    const float far = 1.0f - 2.0f / (exponential(2.0f * (x < 0 ? -x : x)) + 1.0f);
    return square < 0.390625f ? near : x < 0 ? -far : far;
}

// erf(x) to 1.5e-7 (Abramowitz, Stegun: Handbook of Mathematical Functions, 7.1.26).
inline float error_function(float x) {
    const float size = x < 0 ? -x : x;
    const float t = 1.0f / (1.0f + 0.3275911f * size);
    float p = 1.061405429f;
    p = p * t - 1.453152027f;
    p = p * t + 1.421413741f;
    p = p * t - 0.284496736f;
    p = p * t + 0.254829592f;
    const float y = 1.0f - p * t * exponential(-size * size);
    return x < 0 ? -y : y;
}

}  // namespace engine_cpu::ENGINE_CPU_LEVEL
