#include "sampling.h"

namespace engine_cpu {

double uniform(std::int64_t seed, std::int64_t position, std::uint32_t purpose) {
    constexpr std::uint64_t FIRST = 0xD2511F53u, SECOND = 0xCD9E8D57u;
    const auto bits = static_cast<std::uint64_t>(seed);
    std::uint32_t key[2] = {static_cast<std::uint32_t>(bits), static_cast<std::uint32_t>(bits >> 32)};
    std::uint32_t x[4] = {static_cast<std::uint32_t>(position), purpose, 0, 0};
    for (int round = 0; round < 10; ++round) {
        const std::uint64_t a = FIRST * x[0], b = SECOND * x[2];
        const std::uint32_t next[4] = {static_cast<std::uint32_t>(b >> 32) ^ x[1] ^ key[0], static_cast<std::uint32_t>(b),
                                       static_cast<std::uint32_t>(a >> 32) ^ x[3] ^ key[1], static_cast<std::uint32_t>(a)};
        for (int i = 0; i < 4; ++i) x[i] = next[i];
        key[0] += 0x9E3779B9u;
        key[1] += 0xBB67AE85u;
    }
    return (static_cast<double>(x[0] >> 5) * 67108864.0 + static_cast<double>(x[1] >> 6)) / 9007199254740992.0;
}

}  // namespace engine_cpu
