#include "experts.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "parallel.h"

namespace engine_cpu {
namespace {

constexpr std::size_t PIECE = 32768;  // bytes to copy that are worth a thread
constexpr std::size_t FEW = 256;      // rows of all experts together that go through each projection at once

// What a step needs beside its tensors, in one piece of memory: where its parts begin. An expert's tokens are taken in
// as many pieces as it needs for no piece to have more than the step has rows: ids repeat where logits were no numbers.
struct Scratch {
    std::size_t bytes = 0;
    std::size_t starts;  // int32 [experts + 2]: where an expert's tokens begin among all that are sorted by expert
    std::size_t tokens;  // int32 [rows * per_token]: whose
    std::size_t places;  // int32 [rows, per_token]: where a token stands for one of its experts
    std::size_t gathered, inner, acted, terms, packed;

    Scratch(const Layout& first, const Layout& last, std::size_t experts, std::size_t rows, std::size_t per_token,
            std::size_t item) {
        const std::size_t all = rows * per_token;
        starts = take((experts + 2) * 4);
        tokens = take(all * 4);
        places = take(all * 4);
        const std::size_t most = std::max(rows, std::min(all, FEW));  // at once
        gathered = take(most * first.inputs * item);
        inner = take(most * first.outputs * item);
        acted = take(most * last.inputs * item);
        terms = take(all * last.outputs * item);
        packed = take(std::max(first.scratch_bytes(most), last.scratch_bytes(most)) + std::min(experts, FEW) * 64);
    }

    std::size_t take(std::size_t size) {
        const std::size_t found = bytes;
        bytes += (size + 63) / 64 * 64;
        return found;
    }
};

struct Sorted {
    std::int32_t *starts, *tokens, *places;
};

[[noreturn]] void no_expert(std::int32_t id) {
    throw std::out_of_range("there is no expert " + std::to_string(id));
}

bool is_below(std::int32_t id, std::size_t end) {
    return static_cast<std::size_t>(static_cast<std::uint32_t>(id)) < end;
}

// Sorts the tokens by expert, keeping their order; those of nobody have no place. Throws std::out_of_range for an expert
// that there is not.
void sort(const Experts& a, const Sorted& to) {
    const std::size_t all = a.rows * a.per_token;
    std::memset(to.starts, 0, (a.experts + 2) * 4);
    for (std::size_t i = 0; i < all; ++i) {
        if (!is_below(a.ids[i], a.experts + 1)) no_expert(a.ids[i]);
        ++to.starts[a.ids[i] + 1];
    }
    for (std::size_t e = 0; e < a.experts; ++e) to.starts[e + 1] += to.starts[e];
    for (std::size_t i = 0; i < all; ++i) {
        to.places[i] = -1;
        if (!is_below(a.ids[i], a.experts)) continue;
        const std::int32_t place = to.starts[a.ids[i]]++;
        to.places[i] = place;
        to.tokens[place] = static_cast<std::int32_t>(i / a.per_token);
    }
    for (std::size_t e = a.experts; e > 0; --e) to.starts[e] = to.starts[e - 1];
    to.starts[0] = 0;
}

}  // namespace

std::size_t experts_scratch_bytes(const Layout& first, const Layout& last, std::size_t experts, std::size_t rows,
                                  std::size_t per_token, DType dtype) {
    return Scratch(first, last, experts, rows, per_token, size_of(dtype)).bytes;
}

void experts(const Kernels& kernels, const Experts& a, int threads) {
    if (!a.rows) return;
    const std::size_t item = size_of(a.dtype), hidden = a.first.layout.inputs, outputs = a.last.layout.outputs;
    // of the last projection's rows: it may read some inputs twice, by its order
    const std::size_t inner = a.act.gated ? a.first.layout.outputs / 2 : a.first.layout.outputs;
    const Scratch at(a.first.layout, a.last.layout, a.experts, a.rows, a.per_token, item);
    auto* scratch = static_cast<std::uint8_t*>(a.scratch);
    const auto ints = [scratch](std::size_t offset) { return reinterpret_cast<std::int32_t*>(scratch + offset); };
    const Sorted sorted{ints(at.starts), ints(at.tokens), ints(at.places)};
    sort(a, sorted);
    const auto all = static_cast<std::size_t>(sorted.starts[a.experts]);  // that somebody computes
    const auto begin_of = [&](std::size_t expert) { return static_cast<std::size_t>(sorted.starts[expert]); };
    const auto gather = [&](std::size_t begin, std::size_t rows) {
        const std::size_t bytes = hidden * item;
        parallel_for(threads, rows, PIECE / (bytes + 1) + 1, [&](std::size_t first, std::size_t last) {
            for (std::size_t row = first; row < last; ++row) {
                const auto token = static_cast<std::size_t>(sorted.tokens[begin + row]);
                std::memcpy(scratch + at.gathered + row * bytes,
                            static_cast<const std::uint8_t*>(a.x) + token * a.x_stride * item, bytes);
            }
        });
    };
    const auto act = [&](std::size_t rows) {
        GatedAct act = a.act;
        act.x = scratch + at.inner;
        act.x_stride = a.first.layout.outputs;
        act.rows = rows;
        act.size = inner;
        act.out = scratch + at.acted;
        kernels.gated_act(a.dtype, act, threads);
    };
    // An expert's, of rows of so many elements that lie at x.
    const auto product = [&](const ExpertMatrices& by, std::size_t expert, std::size_t x, std::size_t width,
                             std::size_t rows, std::size_t out, std::size_t room) {
        const auto of = [expert](const std::uintptr_t* each) { return reinterpret_cast<const float*>(each[expert]); };
        Packed found{by.layout, a.dtype, scratch + x, width, rows, reinterpret_cast<const void*>(by.weights[expert]),
                     of(by.scales), of(by.biases), scratch + out, scratch + room};
        if (by.orders) found.order = reinterpret_cast<const std::int32_t*>(by.orders[expert]);
        return found;
    };
    const auto at_once = [&](const ExpertMatrices& by, std::size_t x, std::size_t width, std::size_t out) {
        std::vector<Packed> products;
        std::size_t room = at.packed;
        for (std::size_t expert = 0; expert < a.experts; ++expert) {
            const std::size_t begin = begin_of(expert), rows = begin_of(expert + 1) - begin;
            if (!rows) continue;
            products.push_back(product(by, expert, x + begin * width * item, width, rows,
                                       out + begin * by.layout.outputs * item, room));
            room += (by.layout.scratch_bytes(rows) + 63) / 64 * 64;
        }
        if (products.empty()) return;
        if (kernels.packed_all(products.data(), products.size(), threads)) return;
        for (const Packed& each : products) kernels.packed(each, threads);
    };
    if (all <= FEW) {
        gather(0, all);
        at_once(a.first, at.gathered, hidden, at.inner);
        act(all);
        at_once(a.last, at.acted, inner, at.terms);
    } else {
        for (std::size_t expert = 0; expert < a.experts; ++expert)
            for (std::size_t begin = begin_of(expert), end = begin_of(expert + 1); begin < end; begin += a.rows) {
                const std::size_t rows = std::min(a.rows, end - begin);
                gather(begin, rows);
                kernels.packed(product(a.first, expert, at.gathered, hidden, rows, at.inner, at.packed), threads);
                act(rows);
                kernels.packed(product(a.last, expert, at.acted, inner, rows, at.terms + begin * outputs * item, at.packed),
                               threads);
            }
    }
    kernels.combine(a.dtype, {scratch + at.terms, sorted.places, a.weights, a.rows, a.per_token, outputs, a.out},
                    threads);
}

void place_experts(const PlaceExperts& a) {
    for (std::size_t i = 0; i < a.rows * a.per_token; ++i) {
        if (!is_below(a.ids[i], a.experts)) no_expert(a.ids[i]);
        const std::size_t row = i / a.per_token;
        const std::int32_t place = a.table[static_cast<std::size_t>(a.ids[i]) * a.replicas + row % a.replicas] - a.first;
        const bool here = is_below(place, a.count);
        a.out[i] = here ? place : static_cast<std::int32_t>(a.count);
        if (here) ++a.load[place];
    }
}

}  // namespace engine_cpu
