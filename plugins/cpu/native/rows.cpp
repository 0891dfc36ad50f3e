#include "rows.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "parallel.h"

namespace engine_cpu {
namespace {

constexpr std::size_t PIECE = 65536;  // bytes that are worth a thread

template <typename Index>
void gather(const GatherRows& a, int threads) {
    const auto* index = static_cast<const Index*>(a.index);
    const auto* x = static_cast<const unsigned char*>(a.x);
    auto* out = static_cast<unsigned char*>(a.out);
    const std::size_t piece = std::max<std::size_t>(1, PIECE / std::max<std::size_t>(1, a.row_bytes));
    parallel_for(threads, a.count, piece, [&](std::size_t begin, std::size_t end) {
        for (std::size_t i = begin; i < end; ++i) {
            const std::int64_t row = static_cast<std::int64_t>(index[i]) - a.first;
            if (row >= 0 && static_cast<std::size_t>(row) < a.rows)
                std::memcpy(out + i * a.row_bytes, x + static_cast<std::size_t>(row) * a.stride, a.row_bytes);
            else if (a.part)
                std::memset(out + i * a.row_bytes, 0, a.row_bytes);
            else
                throw std::out_of_range("row " + std::to_string(row) + " of " + std::to_string(a.rows));
        }
    });
}

}  // namespace

void gather_rows(const GatherRows& a, int threads) {
    a.wide ? gather<std::int64_t>(a, threads) : gather<std::int32_t>(a, threads);
}

void copy_rows(const CopyRows& a, int threads) {
    const std::size_t piece = std::max<std::size_t>(1, PIECE / std::max<std::size_t>(1, a.parts * a.part_bytes));
    parallel_for(threads, a.rows, piece, [&](std::size_t begin, std::size_t end) {
        for (std::size_t row = begin; row < end; ++row)
            for (std::size_t part = 0; part < a.parts; ++part)
                std::memcpy(static_cast<unsigned char*>(a.out) + row * a.out_stride + part * a.part_bytes,
                            static_cast<const unsigned char*>(a.x) + row * a.row_stride + part * a.stride, a.part_bytes);
    });
}

void prepare_inputs(const PrepareInputs& a, std::size_t rows, std::size_t num_tokens) {
    // A step of one token a row needs no other bounds, and has no padding tokens.
    const bool single = rows == num_tokens;
    const std::size_t real = single ? num_tokens : static_cast<std::size_t>(a.query_start_loc[rows]);
    // Tables are as wide as the longest request may be: what no row of this step has is left out.
    std::int64_t longest = 0;
    for (std::size_t row = 0; row < rows; ++row)
        longest = std::max<std::int64_t>(
            longest, a.num_computed[row] + (single ? 1 : a.query_start_loc[row + 1] - a.query_start_loc[row]));
    for (const auto& group : a.groups) {
        const auto blocks = static_cast<std::size_t>((longest + group.tokens_per_block - 1) / group.tokens_per_block);
        const std::size_t bytes = std::min(blocks, static_cast<std::size_t>(group.table_width)) * sizeof(std::int32_t);
        for (std::size_t row = 0; row < rows; ++row)
            std::memcpy(group.block_table + row * group.block_stride,
                        group.table + static_cast<std::size_t>(a.slot_of_row[row]) * group.table_stride,
                        bytes);
    }
    for (std::size_t row = 0; row < rows; ++row) {
        const std::size_t begin = single ? row : static_cast<std::size_t>(a.query_start_loc[row]);
        const std::size_t end = single ? row + 1 : static_cast<std::size_t>(a.query_start_loc[row + 1]);
        const std::int32_t* tokens = a.tokens + static_cast<std::size_t>(a.slot_of_row[row]) * a.tokens_stride;
        for (std::size_t token = begin; token < end; ++token) {
            const std::int64_t position = a.num_computed[row] + static_cast<std::int64_t>(token - begin);
            a.positions[token] = position;
            a.token_ids[token] = tokens[position];
            for (const auto& group : a.groups) {
                const std::int64_t block = position / group.tokens_per_block;
                const std::int64_t page = group.block_table[row * group.block_stride + static_cast<std::size_t>(block)];
                group.slot_mapping[token] = position + (page - block) * group.tokens_per_block;
            }
        }
    }
    std::fill(a.token_ids + real, a.token_ids + num_tokens, 0);
    std::fill(a.positions + real, a.positions + num_tokens, 0);
    for (const auto& group : a.groups) std::fill(group.slot_mapping + real, group.slot_mapping + num_tokens, 0);
}

void place_tokens(const PlaceTokens& a) {
    for (std::size_t i = 0; i < a.count; ++i) {
        a.table[static_cast<std::size_t>(a.slot[i]) * a.stride + static_cast<std::size_t>(a.place[i])] = a.tokens[i];
        a.out[i] = a.broken[i] ? a.mark : a.tokens[i];
    }
}

}  // namespace engine_cpu
