// Drawing tokens from logits without sorting them, and what is done to logits before and beside it.
//
// A row is gone through in order of its tokens, in pieces that a cache holds in float32: the largest logit, and whether
// all are numbers; the weights exp((x - largest) / temperature). For top_k and top_p the tokens that are at all likely
// are gathered, and counted and added up in bins by the logarithm of the weight, from the largest down: the bin in which
// the filter is reached is the only one that is sorted. Only where the likely ones do not reach it are all gathered.
#include "sampling.h"

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "levels/convert.h"
#include "levels/lanes.h"
#include "levels/table.h"
#include "parallel.h"

namespace engine_cpu::ENGINE_CPU_LEVEL {
namespace {

using Place = SamplingScratch::Place;
constexpr std::size_t PIECE = 1024;       // logits that are widened together
constexpr std::size_t CHUNK = 512;        // tokens whose weights are added up together
constexpr std::size_t BINS = 2048;        // the last one is for all that is smaller
constexpr float BINS_A_UNIT = 64.0f;      // of (largest - x) / temperature
constexpr std::size_t GRAIN = 4096;       // logits that are worth a thread

// Calls f(row, place) for rows on several threads.
template <typename F>
void for_rows(std::size_t rows, std::size_t vocab, SamplingScratch& scratch, int threads, F&& f) {
    parallel_for(threads, rows, std::max<std::size_t>(1, GRAIN / std::max<std::size_t>(vocab, 1)),
                 [&](std::size_t begin, std::size_t end) {
                     SamplingScratch::Claim claim(scratch);
                     for (std::size_t row = begin; row < end; ++row) f(row, *claim);
                 });
}

float largest_of(const float* x, std::size_t n) {
    Vec top = splat(-INFINITE);
    std::size_t i = 0;
    for (; i + Vec::WIDTH <= n; i += Vec::WIDTH) top = maximum(top, Vec::load(x + i));
    float found = largest(top);
    for (; i < n; ++i) found = x[i] > found ? x[i] : found;
    return found;
}

// Calls f(piece, first, count) for the logits x[first] .. x[first + count - 1] in float32, in order.
template <typename T, typename F>
void in_pieces(const T* x, std::size_t n, F&& f) {
    float wide[PIECE];
    for (std::size_t first = 0; first < n; first += PIECE) {
        const std::size_t count = std::min(PIECE, n - first);
        if constexpr (std::is_same_v<T, float>) {
            f(x + first, first, count);
        } else {
            for (std::size_t i = 0; i < count; ++i) wide[i] = widen(x[first + i]);
            f(static_cast<const float*>(wide), first, count);
        }
    }
}

struct Top {
    float logit = -INFINITE;
    std::int32_t token = 0;  // the first of the largest; any beside NaN
    bool nan = false;
};

template <typename T>
Top top_of(const T* x, std::size_t n) {
    Top top;
    in_pieces(x, n, [&top](const float* piece, std::size_t first, std::size_t count) {
        std::uint32_t nan = 0;
        for (std::size_t i = 0; i < count; ++i) nan |= (to_bits(piece[i]) & 0x7fffffffu) > 0x7f800000u;
        top.nan |= nan != 0;
        const float largest = largest_of(piece, count);
        if (!(largest > top.logit)) return;
        top.logit = largest;
        const float* found = std::find(piece, piece + count - 1, largest);
        top.token = static_cast<std::int32_t>(first + static_cast<std::size_t>(found - piece));
    });
    return top;
}

// weights[i] = exp((x[i] - top) / temperature)
void weigh(const float* x, std::size_t n, float top, float temperature, float* weights) {
    const Vec wide_top = splat(top), divisor = splat(temperature);
    std::size_t i = 0;
    for (; i + Vec::WIDTH <= n; i += Vec::WIDTH)
        store(weights + i, exponential((Vec::load(x + i) - wide_top) / divisor));
    if (i < n) {
        float rest[Vec::WIDTH], result[Vec::WIDTH];
        std::fill_n(rest, Vec::WIDTH, -INFINITE);
        std::copy(x + i, x + n, rest);
        store(result, exponential((Vec::load(rest) - wide_top) / divisor));
        std::copy_n(result, n - i, weights + i);
    }
}

// In double precision, in parts that need no order among themselves.
double total_of(const float* weights, std::size_t n) {
    constexpr std::size_t LANES = 16;
    double parts[LANES] = {};
    std::size_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (std::size_t j = 0; j < LANES; ++j) parts[j] += static_cast<double>(weights[i + j]);
    double total = 0;
    for (; i < n; ++i) total += static_cast<double>(weights[i]);
    for (const double part : parts) total += part;
    return total;
}

// The first token at which the running sum of the weights exceeds u times their sum.
std::int32_t draw(const float* weights, std::size_t n, double u, std::vector<double>& sums) {
    sums.clear();
    double total = 0;
    for (std::size_t begin = 0; begin < n; begin += CHUNK) {
        total += total_of(weights + begin, std::min(CHUNK, n - begin));
        sums.push_back(total);
    }
    const double target = u * total;
    std::size_t last = n - 1;  // of the weights above 0: rounding may leave none that exceeds
    for (std::size_t chunk = 0; chunk < sums.size(); ++chunk) {
        if (!(sums[chunk] > target)) continue;
        double running = chunk ? sums[chunk - 1] : 0.0;
        for (std::size_t i = chunk * CHUNK; i < std::min(n, (chunk + 1) * CHUNK); ++i) {
            running += static_cast<double>(weights[i]);
            if (running > target) return static_cast<std::int32_t>(i);
        }
        last = std::min(n, (chunk + 1) * CHUNK) - 1;
        break;
    }
    while (last > 0 && !(weights[last] > 0.0f)) --last;
    return static_cast<std::int32_t>(last);
}

using Candidate = SamplingScratch::Candidate;

bool earlier(const Candidate& a, const Candidate& b) { return a.logit != b.logit ? a.logit > b.logit : a.id < b.id; }

// Candidates in bins by their logits, from the largest down.
class Bins {
public:
    Bins(const std::vector<Candidate>& all, float top, float temperature)
        : all_(all), top_(top), temperature_(temperature) {
        for (const Candidate& candidate : all) {
            const std::size_t bin = bin_of(candidate.logit);
            ++counts_[bin];
            sums_[bin] += static_cast<double>(candidate.weight);
        }
    }

    // The k-th largest logit.
    float kth(std::size_t k, std::vector<Candidate>& found) const {
        std::size_t bin = 0, before = 0;
        while (bin < BINS - 1 && before + counts_[bin] < k) before += counts_[bin++];
        collect(bin, -INFINITE, 0.0f, found);
        if (found.empty()) return -INFINITE;  // what is not a number
        const auto at = found.begin() + static_cast<std::ptrdiff_t>(std::min(k - before, found.size()) - 1);
        std::nth_element(found.begin(), at, found.end(), earlier);
        return at->logit;
    }

    // Of the candidates with logits from `least` on and weights from `floor` on, the last one of the shortest prefix, in
    // order of falling logits and rising ids, whose weights reach `goal`; the last of all where rounding keeps them from it.
    Candidate prefix(double goal, float least, float floor, std::vector<Candidate>& found) const {
        std::size_t bin = 0;
        double running = 0;
        while (bin < BINS - 1 && running + sums_[bin] < goal) running += sums_[bin++];
        collect(bin, least, floor, found);
        const bool missed = found.empty();
        while (found.empty() && bin > 0) collect(--bin, least, floor, found);
        if (found.empty()) return {-INFINITE, 0.0f, 0};
        std::sort(found.begin(), found.end(), earlier);
        for (const Candidate& candidate : found) {
            running += static_cast<double>(candidate.weight);
            if (!missed && running >= goal) return candidate;
        }
        return found.back();
    }

private:
    std::size_t bin_of(float logit) const {
        const float place = (top_ - logit) / temperature_ * BINS_A_UNIT;
        if (!(place < static_cast<float>(BINS - 1))) return BINS - 1;  // what is not a number, too
        return place > 0.0f ? static_cast<std::size_t>(place) : 0;  // beside NaN the top may not be the largest
    }

    void collect(std::size_t bin, float least, float floor, std::vector<Candidate>& found) const {
        found.clear();
        for (const Candidate& candidate : all_)
            if (bin_of(candidate.logit) == bin && candidate.logit >= least && candidate.weight >= floor)
                found.push_back(candidate);
    }

    const std::vector<Candidate>& all_;
    float top_, temperature_;
    std::size_t counts_[BINS] = {};
    double sums_[BINS] = {};
};

// The tokens whose weights are `cut` or more, in order of their ids.
template <typename T>
void gather(const T* x, const float* weights, std::size_t n, float cut, std::vector<Candidate>& found) {
    constexpr std::size_t PART = 64;
    found.clear();
    for (std::size_t begin = 0; begin < n; begin += PART) {
        const std::size_t end = std::min(n, begin + PART);
        if (largest_of(weights + begin, end - begin) < cut) continue;
        for (std::size_t i = begin; i < end; ++i)
            if (weights[i] >= cut) found.push_back({widen(x[i]), weights[i], static_cast<std::int32_t>(i)});
    }
}

// Keeps what top_k and top_p leave of the candidates, which are all tokens whose weights are `cut` or more. False where
// others would have to be looked at.
bool filter(const Sample& a, std::size_t row, float top, float cut, float floor, Place& place) {
    const std::size_t n = a.vocab, k = static_cast<std::size_t>(std::max(a.top_k[row], 0));
    auto& candidates = place.candidates;
    const bool limited = k > 0 && k < n, nucleus = a.top_p[row] < 1.0f;
    if (limited && cut > 0.0f && candidates.size() < k) return false;
    const Bins bins(candidates, top, a.temperature[row]);
    float least = limited ? bins.kth(k, place.found) : -INFINITE;
    std::int32_t last = static_cast<std::int32_t>(n);
    if (nucleus) {
        double total = 0;
        for (const Candidate& candidate : candidates)
            if (candidate.logit >= least && candidate.weight >= floor) total += static_cast<double>(candidate.weight);
        double goal = total;
        if (!limited && floor < cut) {
            goal = 0;
            if (floor > 0.0f)
                for (std::size_t i = 0; i < n; ++i) goal += place.weights[i] >= floor ? place.weights[i] : 0.0f;
            else
                goal = total_of(place.weights.data(), n);
        }
        goal *= static_cast<double>(a.top_p[row]);
        if (cut > 0.0f && goal > total) return false;
        const Candidate end = bins.prefix(goal, least, floor, place.found);
        least = end.logit;
        last = end.id;
    }
    const auto dropped = [=](const Candidate& candidate) {
        const bool kept = candidate.logit > least || (candidate.logit == least && candidate.id <= last);
        return !(kept && candidate.weight >= floor);
    };
    candidates.erase(std::remove_if(candidates.begin(), candidates.end(), dropped), candidates.end());
    return true;
}

template <typename T>
std::int32_t sample_row(const Sample& a, std::size_t row, Place& place) {
    constexpr float LIKELY = 1e-6f;  // weights, of the largest: those below are seldom kept by top_k or top_p
    const std::size_t n = a.vocab;
    const T* x = static_cast<const T*>(a.x) + row * a.stride;
    const float temperature = a.temperature[row];
    const Top top = top_of(x, n);
    a.broken[row] = top.nan;
    if (!(temperature > 0.0f)) return top.token;
    place.weights.resize(n);
    float* weights = place.weights.data();
    in_pieces(x, n, [=](const float* piece, std::size_t first, std::size_t count) {
        weigh(piece, count, top.logit, temperature, weights + first);
    });
    const double u = uniform(a.seed[row], a.position[row], 0);
    const float floor = a.min_p[row] * POWERS[0];  // which is the largest weight
    const bool limited = a.top_k[row] > 0 && static_cast<std::size_t>(a.top_k[row]) < n;
    if (limited || a.top_p[row] < 1.0f) {
        auto& kept = place.candidates;
        gather(x, weights, n, LIKELY, kept);
        if (!filter(a, row, top.logit, LIKELY, floor, place)) {
            gather(x, weights, n, 0.0f, kept);
            filter(a, row, top.logit, 0.0f, floor, place);
        }
        double total = 0, running = 0;
        for (const Candidate& candidate : kept) total += static_cast<double>(candidate.weight);
        for (const Candidate& candidate : kept)
            if ((running += static_cast<double>(candidate.weight)) > u * total) return candidate.id;
        return kept.empty() ? 0 : kept.back().id;  // what is not a number
    }
    if (floor > 0.0f)
        for (std::size_t i = 0; i < n; ++i) weights[i] = weights[i] >= floor ? weights[i] : 0.0f;
    return draw(weights, n, u, place.sums);
}

// The k largest, with lower ids first among equals, as a heap whose top is the least of them.
void keep_largest(const float* x, std::size_t n, std::size_t k, Place& place) {
    constexpr std::size_t PART = 64;
    auto& heap = place.candidates;
    heap.clear();
    for (std::size_t begin = 0; begin < n; begin += PART) {
        const std::size_t end = std::min(n, begin + PART);
        if (heap.size() == k && !(largest_of(x + begin, end - begin) > heap.front().logit)) continue;
        for (std::size_t i = begin; i < end; ++i) {
            if (heap.size() == k) {
                if (!(x[i] > heap.front().logit)) continue;
                std::pop_heap(heap.begin(), heap.end(), earlier);
                heap.pop_back();
            }
            heap.push_back({x[i], 0.0f, static_cast<std::int32_t>(i)});
            std::push_heap(heap.begin(), heap.end(), earlier);
        }
    }
    std::sort_heap(heap.begin(), heap.end(), earlier);
}

void report(const Logprobs& a, std::size_t row, Place& place) {
    const std::size_t n = a.logits.vocab;
    const float* x = a.logits.data + row * a.logits.stride;
    const float top = largest_of(x, n), logit = x[a.tokens[row]];
    place.weights.resize(n);
    weigh(x, n, top, 1.0f, place.weights.data());
    const double total = static_cast<double>(top) + std::log(total_of(place.weights.data(), n));
    a.chosen[row] = static_cast<float>(static_cast<double>(logit) - total);
    std::int32_t larger = 0;
    for (std::size_t i = 0; i < n; ++i) larger += x[i] > logit;
    a.rank[row] = larger + 1;
    if (!a.k) return;
    keep_largest(x, n, a.k, place);
    for (std::size_t i = 0; i < a.k; ++i) {
        a.top_ids[row * a.k + i] = place.candidates[i].id;
        a.top_values[row * a.k + i] = static_cast<float>(static_cast<double>(place.candidates[i].logit) - total);
    }
}

void penalise(const Penalties& a, std::size_t i, Place& place) {
    float* x = a.logits.data + static_cast<std::size_t>(a.row[i]) * a.logits.stride;
    const std::int32_t* tokens = a.tokens + i * a.stride;
    auto& counts = place.counts;
    counts.resize(std::max(counts.size(), a.logits.vocab), 0);
    // -1 for a token of the prompt alone; how often it is in the output, else.
    const auto known = static_cast<std::size_t>(a.num_tokens[i]), prompt = static_cast<std::size_t>(a.num_prompt[i]);
    for (std::size_t j = 0; j < known; ++j) {
        std::int32_t& count = counts[static_cast<std::size_t>(tokens[j])];
        count = j < prompt ? -1 : std::max(count, 0) + 1;
    }
    const float repetition = a.repetition[i], frequency = a.frequency[i], presence = a.presence[i];
    for (std::size_t j = 0; j < known; ++j) {
        std::int32_t& count = counts[static_cast<std::size_t>(tokens[j])];
        if (!count) continue;  // done already
        float& logit = x[tokens[j]];
        logit = logit > 0.0f ? logit / repetition : logit * repetition;
        if (count > 0) logit = logit - frequency * static_cast<float>(count) - presence;
        count = 0;
    }
}

void forbid(const Bitmask& a, std::size_t i) {
    float* x = a.logits.data + static_cast<std::size_t>(a.row[i]) * a.logits.stride;
    const std::int32_t* bits = a.bits + i * a.stride;
    const std::size_t n = a.logits.vocab;
    const auto allowed = [bits](std::size_t t) { return static_cast<std::uint32_t>(bits[t / 32]) >> (t % 32) & 1u; };
    bool stuck = true;
    for (std::size_t t = 0; t < n; ++t) {
        x[t] = allowed(t) ? x[t] : -INFINITE;
        stuck &= x[t] == -INFINITE;
    }
    if (!stuck) return;
    for (std::size_t t = 0; t < n; ++t)
        if (!allowed(t)) x[t] = 0.0f;
}

}  // namespace

void logprobs(const Logprobs& a, SamplingScratch& scratch, int threads) {
    for_rows(a.logits.rows, a.logits.vocab, scratch, threads,
             [&](std::size_t row, Place& place) { report(a, row, place); });
}

void penalties(const Penalties& a, SamplingScratch& scratch, int threads) {
    for_rows(a.count, a.stride, scratch, threads, [&](std::size_t row, Place& place) { penalise(a, row, place); });
}

void apply_bitmask(const Bitmask& a, int threads) {
    parallel_for(threads, a.count, std::max<std::size_t>(1, GRAIN / std::max<std::size_t>(a.logits.vocab, 1)),
                 [&](std::size_t begin, std::size_t end) {
                     for (std::size_t i = begin; i < end; ++i) forbid(a, i);
                 });
}

void sample(const Sample& a, SamplingScratch& scratch, int threads) {
    const auto row = a.dtype == DType::bfloat16 ? sample_row<bf16> : sample_row<float>;
    for_rows(a.rows, a.vocab, scratch, threads, [&](std::size_t i, Place& place) { a.out[i] = row(a, i, place); });
}

}  // namespace engine_cpu::ENGINE_CPU_LEVEL
