// Drawing tokens, and what is done to logits before and beside it: what the kernels take, and the memory they compute in.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "kernels.h"

namespace engine_cpu {

// Rows of float32, `stride` elements apart.
struct Logits {
    float* data;
    std::size_t stride, rows, vocab;
};

// out [rows]: a token of each row of x [rows, vocab], `stride` elements apart; see the interface for the parameters.
// broken [rows]: whether it holds a NaN.
struct Sample {
    DType dtype;
    const void* x;
    std::size_t stride, rows, vocab;
    const float* temperature;
    const std::int32_t* top_k;
    const float* top_p;
    const float* min_p;
    const std::int64_t* seed;
    const std::int64_t* position;
    std::int32_t* out;
    std::uint8_t* broken;
};

// Of each row and its token: the log probability, the token's rank, and the k most likely tokens with theirs [rows, k].
struct Logprobs {
    Logits logits;
    const std::int64_t* tokens;
    std::size_t k;
    float* chosen;
    std::int32_t* rank;
    std::int32_t* top_ids;
    float* top_values;
};

// On the logits' rows `row` [count]; tokens [count, stride].
struct Penalties {
    Logits logits;
    const std::int64_t* row;
    std::size_t count;
    const std::int32_t* tokens;
    std::size_t stride;
    const std::int32_t* num_prompt;
    const std::int32_t* num_tokens;
    const float* presence;
    const float* frequency;
    const float* repetition;
};

// Sets logits of rows `row` [count] to -inf where a bit is 0; bits [count, stride].
struct Bitmask {
    Logits logits;
    const std::int64_t* row;
    std::size_t count;
    const std::int32_t* bits;
    std::size_t stride;
};

// What a call computes in: a vocabulary's worth of numbers for each thread. It serves one call at a time.
class SamplingScratch {
public:
    struct Candidate {
        float logit, weight;
        std::int32_t id;
    };
    struct Place {
        std::vector<float> weights;
        std::vector<double> sums;
        std::vector<std::int32_t> counts;  // zeros between calls
        std::vector<Candidate> candidates, found;
        std::atomic<bool> taken{false};
    };

    explicit SamplingScratch(int threads) : size_(threads > 0 ? static_cast<std::size_t>(threads) : 1),
                                            places_(new Place[size_]) {}

    // The memory of one thread, until it is given back.
    class Claim {
    public:
        explicit Claim(SamplingScratch& scratch) : place_(scratch.find()) {}
        ~Claim() { place_.taken.store(false, std::memory_order_release); }
        Claim(const Claim&) = delete;
        Claim& operator=(const Claim&) = delete;
        Place& operator*() const { return place_; }

    private:
        Place& place_;
    };

private:
    Place& find() {
        for (std::size_t i = 0;; i = i + 1 == size_ ? 0 : i + 1)
            if (!places_[i].taken.exchange(true, std::memory_order_acquire)) return places_[i];
    }

    std::size_t size_;
    std::unique_ptr<Place[]> places_;
};

// The engine's random numbers, see interfaces/ops.py: in [0, 1), of a seed, a position and a purpose (Philox4x32-10).
double uniform(std::int64_t seed, std::int64_t position, std::uint32_t purpose);

}  // namespace engine_cpu
